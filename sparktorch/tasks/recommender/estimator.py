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
from sparktorch.tasks.recommender.learned import LEAST_OF_EACH, LearnedPairs, learn_pairs
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

__all__ = ["CHOICES", "RATINGS", "Recommender"]

RATINGS = TaskSettings(
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
# A sample is a user with all that it has chosen, whose items all others are compared with.
CHOICES = TaskSettings(
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

_MOST_RANKED = 20_000  # The cross-entropy is that among all items, if they are no more than these.
_DRAWN = 64  # Of more items, so many others are drawn for each row.
_FEW = 4  # Sparse gradients are the faster ones of tables with more rows than this for each that a step reaches.
_SMALL = 5_000  # Workers add up the gradients of tables of fewer rows faster if they are dense.
_WHOLE_USERS = ("numNegatives", "strategy", "split")  # The Params that say whether a sample is a user.


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
        *("userCol", "itemCol", "ratingCol", "userFeatures", "itemFeatures", "implicitPrefs", "alpha"),
        *(*_WHOLE_USERS, "validationIndicatorCol", "nullPolicy"),
    )
    _searched = {"rank": [8, 16, 64, 128], "regParam": [0.03, 0.07, 0.2]}
    _searched_rates = (0.5, 2.0)
    _learned: LearnedPairs | None = None

    @property
    def _task_settings(self) -> TaskSettings:
        return CHOICES if self._ranks_all else RATINGS

    @property
    def _unit(self) -> str:  # type: ignore[override]
        return "users" if self._ranks_all else "rows"

    @property
    def _ranks_all(self) -> bool:
        """Whether each user's items are ranked among all, so that a sample is a user, and not a row."""
        return bool(Values(self)["implicitPrefs"]) and not self._drawn

    @property
    def _drawn(self) -> int:
        """Number of other items that are drawn for each row; 0 for none, where all are compared."""
        p = Values(self)
        many_items = self._learned is not None and len(self._learned.items) > _MOST_RANKED
        # A rank that trains a model of its own has no row of the users that another rank has.
        splits_users = p["strategy"] == "mesh" or p["split"] == "keep" or p.strategy.own_batches
        if not p["implicitPrefs"]:
            return 0
        return p["numNegatives"] or (_DRAWN if many_items or splits_users else 0)

    @property
    def _weight(self) -> str:
        """The column of weights. Where rows have weights, these replace the ratings, whose name errors then have."""
        assert self._learned is not None
        return self._learned.weight if self._ranks_all else Values(self)["ratingCol"] or self._learned.weight

    def _task_training(self) -> TaskTraining:
        """Returns the column whose groups are all that a user has chosen, where all items are ranked."""
        return TaskTraining(group=self._learned.group if self._learned is not None and self._ranks_all else None)

    @property
    def _holds_out(self) -> bool:
        """Whether a fit is to mark rows; with implicit preferences only if asked, as more epochs do not harm there."""
        return super()._holds_out and (not self.getImplicitPrefs() or self._asks_for_validation)

    def _holding_out(self) -> Self:
        """Returns a copy that holds out rows, of choices too: their loss in training does not tell which is better."""
        estimator = self.copy()
        return estimator._set(validationFraction=self.getValidationFraction()) if super()._holds_out else estimator

    @property
    def _needs_count(self) -> bool:
        return super()._needs_count or self._ranks_all

    def _settings(self, *, held_out: bool) -> AutomaticSettings:
        """Returns what "auto" stands for, of choices with batches of few users whatever their epochs are.

        A batch of 256 users would leave few steps to an epoch.
        """
        p = Values(self)
        if not self._ranks_all or held_out or p["epochs"] == "auto":
            return super()._settings(held_out=held_out)
        automatic = self.copy()
        automatic.clear(automatic.getParam("epochs"))
        settings = super(Recommender, automatic)._settings(held_out=False)
        return replace(settings, patience=None, validation_interval=1, validation_unit="epoch")

    def _differing(self, other: Any) -> list[str]:
        ours = self.copy()
        ours._learned = other._learned
        same = _WHOLE_USERS if ours._ranks_all == other._ranks_all else ()
        ignored = same if self.getImplicitPrefs() else (*_WHOLE_USERS, "alpha")
        return [name for name in super()._differing(other) if name not in ignored]

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from others and, once they were seen, from the rows."""
        estimator = super().completed().copy()
        p = Values(estimator)
        _check_params(p)
        for name, least in (("rank", 1), ("regParam", 0), ("alpha", 0)):
            at_least(name, p[name], least)
        if p["numNegatives"] is not None:
            at_least("numNegatives", p["numNegatives"], 1)
        one_of("coldStartStrategy", p["coldStartStrategy"], ("nan", "drop"))
        columns, implicit, learned = PairColumns.of(self), p["implicitPrefs"], self._learned
        items = len(learned.items) if learned is not None else 1
        ranks_all = estimator._ranks_all and learned is not None
        estimator._set(
            module=Towers,
            inputCols=columns.inputs,
            labelCol=columns.rating if ranks_all or not implicit else "",
            trainingStep=PairLoss(
                items if implicit else None,
                p["regParam"],
                scale=1.0 if implicit or learned is None else learned.deviation or 1.0,
                alpha=p["alpha"] if ranks_all else 0.0,
                catalogue=IdIndex(learned.items).features if ranks_all and learned is not None else None,
            ),
        )
        if learned is None:
            return estimator
        if implicit:
            estimator._set(weightCol=estimator._weight)
        params = {
            "users": len(learned.users),
            "items": items,
            "rank": p["rank"],
            "mean": 0.0 if implicit else learned.mean,
            "user_features": len(columns.user_features),
            "item_features": len(columns.item_features),
            "sparse": _wants_sparse(p, len(learned.users) + items * (not ranks_all), self._drawn),
            "user_bias": not implicit,
            "scale": 1.0 if implicit else learned.deviation or 1.0,
            "ranks_all": ranks_all,
        }
        pairs = Pairs(columns.user, columns.item, learned.users, learned.items, self._drawn, p["seed"])
        return estimator._set(preprocess=pairs, moduleParams=params | self.getModuleParams())

    def _learn(self, dataset: DataFrame) -> LearnedPairs:
        # Where the estimator holds rows out itself, users and items are those of all rows.
        marks = None if self._marks else Values(self)["validationIndicatorCol"]
        return learn_pairs(dataset, PairColumns.of(self), implicit=self.getImplicitPrefs(), marks=marks)

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows of implicit preferences with the weight of each, or of all that a user has chosen."""
        names, columns, learned = ColumnNames.of(dataset), PairColumns.of(self), self._learned
        if learned is None or not self.getImplicitPrefs():
            return dataset
        weight, marks = F.lit(1.0), Values(self)["validationIndicatorCol"]
        if columns.rating:
            rating = names.column(columns.rating).cast("double")
            above = 1 + self.getAlpha() * F.log1p(rating)
            weight = F.when(rating.isNotNull(), F.when(rating > 0, above).otherwise(0.0))
        if not self._ranks_all:
            return dataset.withColumn(self._weight, weight)
        # A row that is left out counts for nothing in the weight of its user, whose other rows train.
        weight = F.when(columns.complete(names), weight).otherwise(0.0)
        user = names.column(columns.user)
        held_out = F.coalesce(names.column(marks), F.lit(False)) if marks else F.lit(False)
        rows = dataset.withColumn(learned.group, F.xxhash64(user, held_out))
        return rows.withColumn(learned.weight, F.sum(weight).over(Window.partitionBy(learned.group)))

    def _chosen(self) -> dict[str, Any]:
        """Returns what was chosen, and the loss of the mean rating where rows validate."""
        fields, learned, p = super()._chosen(), self._learned, Values(self)
        if learned is not None and p.validated and not p["implicitPrefs"]:
            fields["baseline"] = {"val_loss": learned.deviation**2}
        return fields

    @property
    def _chosen_by(self) -> str:
        return f"{super()._chosen_by}, but of users and items with less than {LEAST_OF_EACH} rows none"

    def _distinguishing_columns(self, names: ColumnNames) -> Sequence[str]:
        return PairColumns.of(self).with_rating

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        rows, counts = super()._mark_held_out(dataset, names, share)
        for name in self.getInputCols()[:2]:
            often = F.count(F.lit(1)).over(Window.partitionBy(names.column(name))) >= LEAST_OF_EACH
            rows = rows.withColumn(self._marks, F.col(self._marks) & often)
        return rows, counts

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        """Returns how many rows train and are held out, of the latter about as many as a hash holds out."""
        assert self._learned is not None
        if not self._marks:
            return len(self._learned.users) if self._ranks_all else self._learned.rows, 0
        held_out, users = self._pairs_held_out, len(self._learned.users)
        return (users, min(users, held_out)) if self._ranks_all else (self._learned.rows - held_out, held_out)

    def _capped(self, trained: int, held_out: int) -> tuple[float, int]:
        """Returns both, where a sample is a user by the pairs that are held out: all users train."""
        if not self._ranks_all:
            return super()._capped(trained, held_out)
        return min(1.0, MOST_HELD_OUT / self._pairs_held_out), trained

    @property
    def _pairs_held_out(self) -> int:
        assert self._learned is not None
        return round(max(0, self._learned.rows - self._learned.rare) * self.getValidationFraction())

    def _model(self, *parts: Any) -> RecommenderModel:
        """Returns the model, which scores a pair at a time."""
        model: RecommenderModel = super()._model(*parts)
        trained = model.trained
        assert isinstance(trained.preprocess, Pairs)
        assert trained.arguments is not None
        shapes: list[tuple[int, ...]] = [(), (), (len(self.getUserFeatures()),), (len(self.getItemFeatures()),)]
        arguments = tuple(replace(spec, shape=shape) for spec, shape in zip(trained.arguments, shapes, strict=False))
        pairs = replace(trained.preprocess, negatives=0)
        scoring = replace(trained, preprocess=pairs, arguments=arguments, outputs=(OutputSpec("", ()),))
        return model._with(scoring, model._summary)


def _check_params(p: Values) -> None:
    """Refuses ratings without a column of them, and a number in place of a user."""
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


def _wants_sparse(p: Values, rows: int, drawn: int) -> bool:
    """Whether gradients of the tables, of so many rows, are to be sparse: a step reaches few, and the optimizer can."""
    rows_reached = p["batchSize"] * (2 + drawn)
    clips = p["gradientClipNorm"] is not None or p["gradientClipValue"] is not None
    plain = p["optimizer"] in ("Adagrad", "SGD") and not p["optimizerParams"]
    return rows > max(_SMALL, _FEW * rows_reached) and plain and not clips and not p.strategy.divides_parameters
