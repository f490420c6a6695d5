"""The recommender: users and items of any ids, their vectors, and lists of the best for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.base.config import at_least, one_of
from sparktorch.errors import ColumnError, ConfigError, Refusal, refuse
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import RecommenderParams
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import table_of
from sparktorch.tasks.recommender.model import Paired, RecommenderModel, id_type, structs
from sparktorch.tasks.recommender.network import Known, PairLoss, Pairs, Towers
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT, free_name
from sparktorch.tasks.shared.learning import LearningEstimator, check_rows
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

_LEAST_OF_EACH = 3  # rows of a user, and of an item, from which on some are held out
_MOST_RANKED = 20_000  # items, among which the cross-entropy is that of all
_DRAWN = 64  # other items of each row, where they are more
_FEW = 4  # rows of a table for each that a step reaches, from which on sparse gradients are the faster ones
_SMALL = 5_000  # Workers add up the gradients of tables of fewer rows faster if they are dense.
_WHOLE_USERS = ("numNegatives", "strategy", "split")  # The Params that say whether a sample is a user.
_REFUSED = (
    Refusal(
        "ratingCol",
        lambda p: not (p["ratingCol"] or p["implicitPrefs"]),
        "ratingCol is '', and without implicitPrefs the ratings are what is learned",
        "name the column, or set implicitPrefs=True",
    ),
    Refusal(
        "nullPolicy",
        lambda p: p["nullPolicy"] == "fill",
        "nullPolicy is 'fill', and no number stands for a user",
        "set nullPolicy='drop', or fill features before",
    ),
)


class LearnedPairs(NamedTuple):
    """What an estimator has learned of rows."""

    users: pa.StructArray
    items: pa.StructArray
    mean: float  # The mean of the ratings.
    deviation: float = 1.0  # The standard deviation of the ratings; 0 if they are equal.
    group: str = ""  # The column that tells apart what a user has chosen in training and in validation.
    weight: str = ""  # The column of weights.
    rows: int = 0
    rare: int = 0  # The rows of users and items that have too few to hold some out.


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
        many = self._learned is not None and len(self._learned.items) > _MOST_RANKED
        kept = p["strategy"] == "mesh" or p["split"] == "keep"  # users cannot stay whole
        # A rank that trains a model of its own would have no row of the users that another one has.
        divided = kept or p.strategy.own_batches
        default = _DRAWN if many or divided else 0
        return (p["numNegatives"] or default) if p["implicitPrefs"] else 0

    @property
    def _weight(self) -> str:
        """The column of weights; that of a row is in the place of its rating, whose name an error then has."""
        assert self._learned is not None
        return self._learned.weight if self._ranks_all else Values(self)["ratingCol"] or self._learned.weight

    def _group(self) -> str | None:
        return self._learned.group if self._learned is not None and self._ranks_all else None

    @property
    def _holds_out(self) -> bool:
        """Whether a fit is to mark rows; with implicit preferences only if asked, as more epochs do not harm there."""
        return super()._holds_out and (not self.getImplicitPrefs() or self._asks_for_validation)

    def _holding_out(self) -> Self:
        """Returns a copy that holds out rows, of choices too: their loss in training does not tell which is better."""
        that = self.copy()
        return that._set(validationFraction=self.getValidationFraction()) if super()._holds_out else that

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
        counted = self.copy()
        counted.clear(counted.getParam("epochs"))
        chosen = super(Recommender, counted)._settings(held_out=False)
        return replace(chosen, patience=None, validation_interval=1, validation_unit="epoch")

    def _differing(self, other: Any) -> list[str]:
        ours = self.copy()
        ours._learned = other._learned
        same = _WHOLE_USERS if ours._ranks_all == other._ranks_all else ()
        ignored = same if self.getImplicitPrefs() else (*_WHOLE_USERS, "alpha")
        return [name for name in super()._differing(other) if name not in ignored]

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from others and, once they were seen, from the rows."""
        that = super().completed().copy()
        p = Values(that)
        refuse(_REFUSED, p)
        for name, least in (("rank", 1), ("regParam", 0), ("alpha", 0)):
            at_least(name, p[name], least)
        if p["numNegatives"] is not None:
            at_least("numNegatives", p["numNegatives"], 1)
        one_of("coldStartStrategy", p["coldStartStrategy"], ("nan", "drop"))
        implicit, rating, seen = p["implicitPrefs"], p["ratingCol"], self._learned
        items = len(seen.items) if seen is not None else 1
        ranks_all = that._ranks_all and seen is not None
        that._set(
            module=Towers,
            inputCols=self.getInputCols(),
            labelCol=rating if ranks_all or not implicit else "",
            trainingStep=PairLoss(
                items if implicit else None,
                p["regParam"],
                scale=1.0 if implicit or seen is None else seen.deviation or 1.0,
                alpha=p["alpha"] if ranks_all else 0.0,
                catalogue=Known(seen.items).features if ranks_all and seen is not None else None,
            ),
        )
        if seen is None:
            return that
        if implicit:
            that._set(weightCol=that._weight)
        told = {
            "users": len(seen.users),
            "items": items,
            "rank": p["rank"],
            "mean": 0.0 if implicit else seen.mean,
            "user_features": len(p["userFeatures"]),
            "item_features": len(p["itemFeatures"]),
            "sparse": _wants_sparse(p, len(seen.users) + items * (not ranks_all), self._drawn),
            "user_bias": not implicit,
            "scale": 1.0 if implicit else seen.deviation or 1.0,
            "ranks_all": ranks_all,
        }
        pairs = Pairs(p["userCol"], p["itemCol"], seen.users, seen.items, self._drawn, p["seed"])
        return that._set(preprocess=pairs, moduleParams=told | self.getModuleParams())

    def _learn(self, dataset: DataFrame) -> LearnedPairs:
        """Returns what two jobs learn of the rows that train."""
        p, names = Values(self), ColumnNames.of(dataset)
        rating = p["ratingCol"]
        columns = [p["userCol"], p["itemCol"], *p["userFeatures"], *p["itemFeatures"], *([rating] if rating else [])]
        if repeated := names.repeated(columns):
            raise ConfigError(f"column {repeated!r} has two roles", hint="name another one for each", param="userCol")
        check_numbers(names, columns[2:])
        marks = None if self._marks else p["validationIndicatorCol"]  # else users and items are those of all rows
        complete = dataset.where(_complete(names, columns))  # the ranks refuse other rows, or leave them out
        rows = complete.where(~names.column(marks)) if marks else complete
        score = names.column(rating).cast("double") if rating else F.lit(0.0)
        tables: list[pa.StructArray] = []
        rare = 0
        for name, features in ((p["userCol"], p["userFeatures"]), (p["itemCol"], p["itemFeatures"])):
            groups = rows.groupBy(names.column(name).cast(id_type(names, name)).alias("id"))
            figures = [F.max(names.column(one).cast("double")).alias(f"f{at}") for at, one in enumerate(features)]
            of_ratings = [F.avg(score).alias("mean"), F.var_pop(score).alias("variance")]
            extremes = [F.min(score).alias("least"), F.max(score).alias("most")]
            found = table_of(groups.agg(*figures, F.count(F.lit(1)).alias("rows"), *of_ratings, *extremes))
            check_rows(found.num_rows)
            kept = found.sort_by("id").select([0, *range(1, 1 + len(features))])
            tables.append(structs(kept, [name, *features]))
            count = pc.sum(found["rows"]).as_py()
            mean, deviation = _moments(*(found[name].to_numpy() for name in ("rows", "mean", "variance")))
            least, most = pc.min(found["least"]).as_py(), pc.max(found["most"]).as_py()
            rare += pc.sum(found["rows"].filter(pc.less(found["rows"], _LEAST_OF_EACH))).as_py() or 0
        if p["implicitPrefs"] and rating and marks:
            least = complete.agg(F.min(score)).collect()[0][0]  # Rows for validation are weighed, too.
        if p["implicitPrefs"] and rating and least < 0:
            what, hint = f"column {rating!r} has ratings below 0", "leave these rows out, or learn what users rate"
            raise ColumnError(what, hint=hint, column=rating, code="ST-WEIGHT")
        users, items = tables
        group = free_name(names, "_chosen_by") if p["implicitPrefs"] else ""
        weight = free_name(names, "_weight") if p["implicitPrefs"] else ""
        if least == most:  # What rounding leaves of equal ratings is no deviation.
            deviation = 0.0
        return LearnedPairs(users, items, mean, deviation, group, weight, count, rare)

    def _arranged(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows of implicit preferences with the weight of each, or of all that a user has chosen."""
        p, names, seen = Values(self), ColumnNames.of(dataset), self._learned
        if seen is None or not p["implicitPrefs"]:
            return dataset
        weight, marks = F.lit(1.0), p["validationIndicatorCol"]
        if p["ratingCol"]:
            rating = names.column(p["ratingCol"]).cast("double")
            weight = F.when(rating.isNotNull(), F.when(rating > 0, 1 + p["alpha"] * F.log1p(rating)).otherwise(0.0))
        if not self._ranks_all:
            return dataset.withColumn(self._weight, weight)
        # A row that is left out counts for nothing in the weight of its user, whose other rows train.
        columns = [*self.getInputCols(), *([p["ratingCol"]] if p["ratingCol"] else [])]
        weight = F.when(_complete(names, columns), weight).otherwise(0.0)
        user = names.column(p["userCol"])
        held_out = F.coalesce(names.column(marks), F.lit(False)) if marks else F.lit(False)
        rows = dataset.withColumn(seen.group, F.xxhash64(user, held_out))
        return rows.withColumn(seen.weight, F.sum(weight).over(Window.partitionBy(seen.group)))

    def _chosen(self) -> dict[str, Any]:
        """Returns what was chosen, and the loss of the mean rating where rows validate."""
        found, seen, p = super()._chosen(), self._learned, Values(self)
        if seen is not None and p.validated and not p["implicitPrefs"]:
            found["baseline"] = {"val_loss": seen.deviation**2}
        return found

    @property
    def _chosen_by(self) -> str:
        return f"{super()._chosen_by}, but of users and items with less than {_LEAST_OF_EACH} rows none"

    def _contents(self, names: ColumnNames) -> Sequence[str]:
        rating = Values(self)["ratingCol"]
        return [*self.getInputCols(), *([rating] if rating else [])]

    def _marked(self, dataset: DataFrame, names: ColumnNames, share: float) -> tuple[DataFrame, tuple[int, int] | None]:
        rows, counts = super()._marked(dataset, names, share)
        for name in self.getInputCols()[:2]:
            often = F.count(F.lit(1)).over(Window.partitionBy(names.column(name))) >= _LEAST_OF_EACH
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

    def _model(self, *made: Any) -> RecommenderModel:
        """Returns the model, which scores a pair at a time."""
        model: RecommenderModel = super()._model(*made)
        trained = model.trained
        assert isinstance(trained.preprocess, Pairs)
        assert trained.arguments is not None
        shapes: list[tuple[int, ...]] = [(), (), (len(self.getUserFeatures()),), (len(self.getItemFeatures()),)]
        arguments = tuple(replace(spec, shape=shape) for spec, shape in zip(trained.arguments, shapes, strict=False))
        pairs = replace(trained.preprocess, negatives=0)
        scoring = replace(trained, preprocess=pairs, arguments=arguments, outputs=(OutputSpec("", ()),))
        return model._with(scoring, model._summary)


def _wants_sparse(p: Values, rows: int, drawn: int) -> bool:
    """Whether gradients of the tables, of so many rows, are to be sparse: a step reaches few, and the optimizer can."""
    reached = p["batchSize"] * (2 + drawn)
    clips = p["gradientClipNorm"] is not None or p["gradientClipValue"] is not None
    plain = p["optimizer"] in ("Adagrad", "SGD") and not p["optimizerParams"]
    return rows > max(_SMALL, _FEW * reached) and plain and not clips and not p.strategy.divides_parameters


def _complete(names: ColumnNames, columns: Sequence[str]) -> Column:
    """Returns whether a row has a user, an item and finite numbers, in columns in this order."""
    user, item, *numbers = map(names.column, columns)
    finite = (F.coalesce(F.abs(number.cast("double")) < float("inf"), F.lit(False)) for number in numbers)
    return reduce(and_, finite, user.isNotNull() & item.isNotNull())


def _moments(rows: Any, means: Any, variances: Any) -> tuple[float, float]:
    """Returns mean and standard deviation of ratings by the number of rows, mean and variance of each group.

    The last digits, which depend on the order in which Spark adds up, are left out.
    """
    mean = np.average(means, weights=rows)
    variance = np.average(variances + np.square(means - mean), weights=rows)
    return float(f"{mean:.8g}"), float(f"{variance**0.5:.6g}")
