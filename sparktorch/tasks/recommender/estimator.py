"""The recommender: users and items of any ids, their vectors, and lists of the best for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ConflictError
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.recommender.learned import FEWEST_ROWS, LearnedPairs, learn_pairs
from sparktorch.tasks.recommender.model import RecommenderModel
from sparktorch.tasks.recommender.network import IdIndex, PairLoss, Pairs, Towers
from sparktorch.tasks.recommender.pairs import PairColumns, Paired
from sparktorch.tasks.recommender.params import RecommenderParams
from sparktorch.tasks.shared.estimator import LearningEstimator
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT
from sparktorch.tasks.shared.settings import AutomaticSettings, TaskSettings
from sparktorch.train.recipe.dry_run import OutputSpec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ROW_SAMPLES", "USER_SAMPLES", "Recommender"]

# A sample is a row: a rating, or an item that a user has chosen, with other items that are drawn for it.
ROW_SAMPLES = TaskSettings(
    learning_rate=0.1,
    usual_rate=0.1,
    scheduler="CosineAnnealingLR",
    largest_batch=2048,
    steps_per_epoch=32,
    most_patience=3,
    least_patience=3,
    least_steps=100,
    most_epochs=8,
    unwatched_epochs=8,
)
# A sample is a user with all the items that it has chosen, each of which is ranked among all items.
USER_SAMPLES = TaskSettings(
    learning_rate=0.3,
    usual_rate=0.3,
    scheduler="CosineAnnealingLR",
    smallest_batch=32,
    largest_batch=128,
    steps_per_epoch=32,
    most_patience=3,
    least_patience=3,
    least_steps=300,
    most_epochs=16,
    unwatched_epochs=16,
)

# These Params decide whether a sample is a user.
_USER_SAMPLE_PARAMS = ("numNegatives", "strategy", "split")
_MOST_RANKED_ITEMS = 20_000  # If there are more items, no item is ranked among all of them.
_USUAL_NEGATIVES = 64  # This number of other items is then drawn for each row.
# Sparse gradients are faster if the tables have more rows than this for each row that a step reaches.
_SPARSE_RATIO = 4
# Workers add up dense gradients faster if the tables have no more rows than this.
_MOST_DENSE_ROWS = 5_000


class Recommender(Paired, LearningEstimator, RecommenderParams):
    """Learns vectors of users and items from pairs of them: ratings, or what users have chosen.

    Its Params and the methods of its model are those of Spark's `ALS`. Users and items are strings or whole numbers.
    Where they have features, each of the two has a tower of layers, too.

    Example:
        >>> rows = [(f"u{i % 4}", f"i{i % 5}", float(1 + (i % 4 + i % 5) % 5)) for i in range(20)]
        >>> ratings = spark.createDataFrame(rows, "user string, item string, rating float")
        >>> model = Recommender(rank=4, epochs=60, batchSize=5, regParam=0.0, progress=False).fit(ratings)
        >>> lists = model.recommendForAllUsers(2)
        >>> lists.columns, lists.count()
        (['user', 'recommendations'], 4)
        >>> abs(model.predict({"user": "u0", "item": "i4"}) - 5.0) < 0.5
        True

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "generic"
    _model_class = RecommenderModel
    _learns_from = (
        "userCol",
        "itemCol",
        "ratingCol",
        "userFeatures",
        "itemFeatures",
        "implicitPrefs",
        "alpha",
        *(*_USER_SAMPLE_PARAMS, "validationIndicatorCol", "nullPolicy"),
    )
    _searched = {"rank": [8, 16, 64, 128], "regParam": [0.03, 0.07, 0.2]}
    _searched_rates = (0.5, 2.0)
    _learned: LearnedPairs | None = None

    @property
    def _task_settings(self) -> TaskSettings:
        return USER_SAMPLES if self._samples_are_users else ROW_SAMPLES

    @property
    def _unit(self) -> str:  # type: ignore[override]
        return "users" if self._samples_are_users else "rows"

    @property
    def _samples_are_users(self) -> bool:
        """Whether a sample is a user, whose items are ranked among all items; otherwise, a sample is a row."""
        return bool(Values(self)["implicitPrefs"]) and not self._negatives_per_row

    @property
    def _negatives_per_row(self) -> int:
        """The number of other items that are drawn for each row; 0 if none are drawn."""
        p = Values(self)
        if not p["implicitPrefs"]:
            return 0
        if p["numNegatives"]:
            negatives: int = p["numNegatives"]
            return negatives
        has_many_items = self._learned is not None and len(self._learned.items) > _MOST_RANKED_ITEMS
        # A user can be a sample only if one rank has all of its rows. Meshes and kept partitions do not move rows to
        # one rank, and a rank that trains a model of its own has no row of the users that another rank has.
        splits_users = p["strategy"] == "mesh" or p["split"] == "keep" or p.strategy.own_batches
        return _USUAL_NEGATIVES if has_many_items or splits_users else 0

    @property
    def _weight(self) -> str:
        """The column of weights.

        Where samples are rows, the weights replace the ratings under the name of their column, so that an error names a
        column of the user's.
        """
        assert self._learned is not None
        if self._samples_are_users:
            return self._learned.weight
        return Values(self)["ratingCol"] or self._learned.weight

    def _task_training(self) -> TaskTraining:
        """Returns the column that groups the rows of a user, if samples are users."""
        return TaskTraining(
            group=self._learned.group if self._learned is not None and self._samples_are_users else None
        )

    @property
    def _holds_out(self) -> bool:
        """Whether a fit is to mark rows that it holds out.

        With implicit preferences, it does so only if a Param that is set needs them: more epochs do no harm there.
        """
        return super()._holds_out and (not self.getImplicitPrefs() or self._asks_for_validation)

    def _holding_out(self) -> Self:
        """Returns a copy that holds out rows, with implicit preferences too.

        The copy is for a search, which needs a validation: the loss in training does not tell which settings are
        better.
        """
        estimator = self.copy()
        if super()._holds_out:
            # Only a share that is set, even if to its default, is held out of implicit preferences.
            estimator._set(validationFraction=self.getValidationFraction())
        return estimator

    @property
    def _needs_count(self) -> bool:
        return super()._needs_count or self._samples_are_users

    def _settings(self, *, held_out: bool) -> AutomaticSettings:
        """Returns what "auto" stands for.

        If epochs are set, rows get the fixed settings, whose batch has 256 samples. A batch of 256 users would leave
        few steps to an epoch: users get the automatic settings, but no patience.
        """
        p = Values(self)
        if not self._samples_are_users or held_out or p["epochs"] == "auto":
            return super()._settings(held_out=held_out)
        automatic = self.copy()
        automatic.clear(automatic.getParam("epochs"))
        settings = super(Recommender, automatic)._settings(held_out=False)
        return replace(settings, patience=None, validation_interval=1, validation_unit="epoch")

    def _differing(self, other: Any) -> list[str]:
        """Returns the Params by which this estimator learns something else from the rows than another one.

        Some Params matter only in so far as they decide whether a sample is a user, and count if the decisions differ.
        """
        estimator = self.copy()
        estimator._learned = other._learned  # The decision also depends on the number of items.
        ignored: tuple[str, ...] = ()
        if not self.getImplicitPrefs():
            ignored = (*_USER_SAMPLE_PARAMS, "alpha")
        elif estimator._samples_are_users == other._samples_are_users:
            ignored = _USER_SAMPLE_PARAMS
        return [name for name in super()._differing(other) if name not in ignored]

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from others and, if it has learned from the rows, from these."""
        estimator = super().completed().copy()
        p = Values(estimator)
        _check_params(p)
        estimator._set(module=Towers, inputCols=self.getInputCols())
        implicit = p["implicitPrefs"]
        learned = self._learned
        if learned is None:
            step = PairLoss(1 if implicit else None, p["regParam"])
            return estimator._set(labelCol="" if implicit else p["ratingCol"], trainingStep=step)
        ranks_all = estimator._samples_are_users
        users = len(learned.users)
        items = len(learned.items)
        scale = 1.0 if implicit else learned.deviation or 1.0
        negatives = self._negatives_per_row
        # A step that ranks all items reaches all rows of their table: its gradient is never sparse.
        sparse_rows = users if ranks_all else users + items
        params = {
            "users": users,
            "items": items,
            "rank": p["rank"],
            "mean": 0.0 if implicit else learned.mean,
            "user_features": len(p["userFeatures"]),
            "item_features": len(p["itemFeatures"]),
            "sparse": _wants_sparse(p, sparse_rows, negatives),
            "user_bias": not implicit,
            "scale": scale,
            "ranks_all": ranks_all,
        }
        if implicit:
            estimator._set(weightCol=estimator._weight)
        return estimator._set(
            labelCol=p["ratingCol"] if ranks_all or not implicit else "",
            trainingStep=PairLoss(
                items if implicit else None,
                p["regParam"],
                scale=scale,
                alpha=p["alpha"] if ranks_all else 0.0,
                catalogue=IdIndex(learned.items).features if ranks_all else None,
            ),
            preprocess=Pairs(p["userCol"], p["itemCol"], learned.users, learned.items, negatives, p["seed"]),
            moduleParams=params | self.getModuleParams(),
        )

    def _learn(self, dataset: DataFrame) -> LearnedPairs:
        p = Values(self)
        # Where the estimator holds rows out itself, users and items come from all rows.
        marks = None if self._marks else p["validationIndicatorCol"]
        return learn_pairs(dataset, PairColumns.of(self), implicit=p["implicitPrefs"], marks=marks)

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows; with implicit preferences, with a weight.

        If samples are users, the rows of a user are in one group, and have the sum of their weights.
        """
        p = Values(self)
        columns = PairColumns.of(self)
        names = ColumnNames.of(dataset)
        learned = self._learned
        if learned is None or not p["implicitPrefs"]:
            return dataset
        weight = F.lit(1.0)
        if columns.rating:
            rating = names.column(columns.rating).cast("double")
            weight = F.when(rating.isNotNull(), F.when(rating > 0, 1 + p["alpha"] * F.log1p(rating)).otherwise(0.0))
        if not self._samples_are_users:
            return dataset.withColumn(self._weight, weight)
        # An incomplete row is left out of the training, and must not count for the weight of its user.
        weight = F.when(columns.is_complete(names), weight).otherwise(0.0)
        is_held_out = F.lit(False)
        if p["validationIndicatorCol"]:
            is_held_out = F.coalesce(names.column(p["validationIndicatorCol"]), F.lit(False))
        rows = dataset.withColumn(learned.group, F.xxhash64(names.column(columns.user), is_held_out))
        return rows.withColumn(learned.weight, F.sum(weight).over(Window.partitionBy(learned.group)))

    def _chosen(self) -> dict[str, Any]:
        """Returns what was chosen, and the validation loss of predicting the mean rating."""
        fields = super()._chosen()
        learned = self._learned
        p = Values(self)
        if learned is not None and p.validated and not p["implicitPrefs"]:
            fields["baseline"] = {"val_loss": learned.deviation**2}
        return fields

    @property
    def _chosen_by(self) -> str:
        return f"{super()._chosen_by}, but none of users and items with fewer than {FEWEST_ROWS} rows"

    def _distinguishing_columns(self, names: ColumnNames) -> Sequence[str]:
        return PairColumns.of(self).read_by_fit

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        """Returns the rows with a share of them marked, but for rows whose user or item has few."""
        rows, counts = super()._mark_held_out(dataset, names, share)
        columns = PairColumns.of(self)
        for name in (columns.user, columns.item):
            row_count = F.count(F.lit(1)).over(Window.partitionBy(names.column(name)))
            rows = rows.withColumn(self._marks, F.col(self._marks) & (row_count >= FEWEST_ROWS))
        return rows, counts

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        """Returns how many samples train, and about how many are held out: a hash chooses them."""
        assert self._learned is not None
        users = len(self._learned.users)
        pairs = self._learned.rows
        if not self._marks:
            return (users if self._samples_are_users else pairs), 0
        held_out = self._pairs_held_out
        if self._samples_are_users:
            return users, min(users, held_out)
        return pairs - held_out, held_out

    def _capped(self, trained: int, held_out: int) -> tuple[float, int]:
        """Returns the part of the share that holds out `MOST_HELD_OUT` samples, and how many samples train then.

        If samples are users, pairs are held out instead, and all users train.
        """
        if not self._samples_are_users:
            return super()._capped(trained, held_out)
        return min(1.0, MOST_HELD_OUT / self._pairs_held_out), trained

    @property
    def _pairs_held_out(self) -> int:
        """About how many rows a hash holds out."""
        assert self._learned is not None
        return round(max(0, self._learned.rows - self._learned.rare) * self.getValidationFraction())

    def _model(self, *parts: Any) -> RecommenderModel:
        """Returns the model, which scores pairs: its `preprocess` draws no other items for a row."""
        model: RecommenderModel = super()._model(*parts)
        trained = model.trained
        assert isinstance(trained.preprocess, Pairs)
        assert trained.arguments is not None
        shapes: list[tuple[int, ...]] = [(), (), (len(self.getUserFeatures()),), (len(self.getItemFeatures()),)]
        # Without features, there are two arguments.
        arguments = tuple(replace(spec, shape=shape) for spec, shape in zip(trained.arguments, shapes, strict=False))
        pairs = replace(trained.preprocess, negatives=0)
        scoring = replace(trained, preprocess=pairs, arguments=arguments, outputs=(OutputSpec("", ()),))
        return model._with(scoring, model._summary)


def _check_params(p: Values) -> None:
    """Refuses Params that contradict each other, and values out of range."""
    if not (p["ratingCol"] or p["implicitPrefs"]):
        raise ConflictError(
            "ratingCol is '', and without implicitPrefs the ratings are what is learned",
            hint="name the column, or set implicitPrefs=True",
            param="ratingCol",
        )
    if p["nullPolicy"] == "fill":
        raise ConflictError(
            "nullPolicy is 'fill', and no number stands for a user",
            hint="set nullPolicy='drop', or fill features before",
            param="nullPolicy",
        )

    for name, least in (("rank", 1), ("regParam", 0), ("alpha", 0)):
        at_least(name, p[name], least)
    if p["numNegatives"] is not None:
        at_least("numNegatives", p["numNegatives"], 1)
    one_of("coldStartStrategy", p["coldStartStrategy"], ("nan", "drop"))


def _wants_sparse(p: Values, rows: int, negatives: int) -> bool:
    """Whether the tables, which have `rows` rows in all, should have sparse gradients.

    They should if a step reaches few of the rows, and if the optimizer supports sparse gradients.
    """
    rows_reached = p["batchSize"] * (2 + negatives)
    clips = p["gradientClipNorm"] is not None or p["gradientClipValue"] is not None
    is_plain = p["optimizer"] in ("Adagrad", "SGD") and not p["optimizerParams"]
    has_many_rows = rows > max(_MOST_DENSE_ROWS, _SPARSE_RATIO * rows_reached)
    return has_many_rows and is_plain and not clips and not p.strategy.divides_parameters
