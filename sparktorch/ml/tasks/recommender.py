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
import torch
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.base.config import at_least, one_of
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec, input_name
from sparktorch.data.pairs import Known, PairLoss, Pairs, Towers
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.ml.fit.checks import naming_params
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import RecommenderModelParams, RecommenderParams
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.ml.scoring.ranking import RankingMetrics, ranking_metrics
from sparktorch.ml.tasks.automatic import CHOICES, RATINGS, AutomaticSettings, TaskSettings
from sparktorch.ml.tasks.held_out import MOST_HELD_OUT, free_name
from sparktorch.ml.tasks.learning import LearningEstimator, check_rows
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, table_of
from sparktorch.spark.frame.encoding import kept_as
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.recommend import Vectors, recommended
from sparktorch.spark.session import session_of
from sparktorch.train.recipe.dry_run import ArgumentSpec, OutputSpec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Recommender", "RecommenderModel"]

_IDS = ("string", "tinyint", "smallint", "int", "bigint")
_LEAST_OF_EACH = 3  # rows of a user, and of an item, from which on some are held out
_MOST_RANKED = 20_000  # items, among which the cross-entropy is that of all
_DRAWN = 64  # other items of each row, where they are more
_FEW = 4  # rows of a table for each that a step reaches, from which on sparse gradients are the faster ones
_SMALL = 5_000  # Workers add up the gradients of tables of fewer rows faster if they are dense.
_WHOLE_USERS = ("numNegatives", "strategy", "split")  # The Params that say whether a sample is a user.


class _Seen(NamedTuple):
    """What an estimator has learned of rows."""

    users: pa.StructArray
    items: pa.StructArray
    mean: float  # The mean of the ratings.
    deviation: float = 1.0  # The standard deviation of the ratings; 0 if they are equal.
    group: str = ""  # The column that tells apart what a user has chosen in training and in validation.
    weight: str = ""  # The column of weights.
    rows: int = 0
    rare: int = 0  # The rows of users and items that have too few to hold some out.


class _Paired:
    """Has columns of users, items and their features in place of `inputCols`."""

    def getInputCols(self) -> list[str]:
        """Gets the columns of users and items, and those of their features."""
        p = Values(self)  # type: ignore[arg-type]  # a mixin of Params
        return [p["userCol"], p["itemCol"], *p["userFeatures"], *p["itemFeatures"]]


class RecommenderModel(_Paired, TorchModelBase, RecommenderModelParams):
    """Vectors of users and items, fitted by `Recommender`.

    `transform` adds `predictionCol`, float: the rating of a pair or, with implicit preferences, a score that orders
    items.
    """

    _estimator = "sparktorch.ml.tasks.recommender:Recommender"
    _vectors: dict[str, Vectors] = {}

    def _with(self, trained: TrainedModule, summary: Any) -> Self:
        self._vectors = {}
        return super()._with(trained, summary)

    @classmethod
    def fromFactors(cls, userFactors: DataFrame, itemFactors: DataFrame, **params: Any) -> Self:
        """Returns a model of vectors that were fitted elsewhere, such as those of Spark's `ALSModel`.

        Args:
            userFactors: The columns `id`, of strings or whole numbers, and `features`, an array of numbers.
            itemFactors: Likewise.
            params: Params of the model, such as `userCol`.

        Raises:
            ColumnError: A column is missing, or ids are of another type.
            ConfigError: Vectors have different lengths.
        """
        model = cls()
        model._set(**params)
        specs, tables, weights, lengths = [], [], [], set[int]()
        given = (("userFactors", userFactors), ("itemFactors", itemFactors))
        for place, (name, (param, factors)) in enumerate(zip(model.getInputCols(), given, strict=True)):
            names = ColumnNames.of(factors)
            kind = _id_type(names, "id")
            specs.append(TensorSpec(name=input_name(place), column=name, dtype="float32", kind="any", sql=kind))
            features = names.column("features").cast("array<float>").alias("features")
            found = table_of(factors.select(names.column("id").cast(kind).alias("id"), features)).sort_by("id")
            lists = found["features"].combine_chunks()
            lengths.update(lists.value_lengths().unique().to_pylist())
            if not len(lists) or len(lengths) != 1:
                raise ConfigError("features are empty, or of several lengths", param=param)
            tables.append(_structs(found.select(["id"]), [name]))
            vectors = torch.tensor(lists.flatten().to_numpy()).view(len(lists), -1)
            weights.append(torch.nn.functional.pad(vectors, (0, 1)))  # biases are 0
        users, items = weights
        trained = TrainedModule(
            source=f"{Towers.__module__}:{Towers.__qualname__}",
            params={"users": len(users), "items": len(items), "rank": users.shape[1] - 1},
            weights=pack_state({"users.weight": users, "items.weight": items}),
            inputs=tuple(specs),
            arguments=tuple(ArgumentSpec(name, "int64", ()) for name in ("user", "item")),
            preprocess=Pairs(specs[0].column, specs[1].column, *tables),
            returned=("user", "item"),
            outputs=(OutputSpec("", ()),),
            task="generic",
        )
        return model._set(inputCols=model.getInputCols())._with(trained, None)

    @property
    def rank(self) -> int:
        """Number of elements of a vector, without bias."""
        return int(self.trained.params["rank"])

    @property
    def userFactors(self) -> DataFrame:
        """The columns `id` and `features`, an array of floats: a user's vector, then bias and constant, then 1."""
        return frame_of_rows(session_of(None), self._of("user").table())

    @property
    def itemFactors(self) -> DataFrame:
        """The columns `id` and `features`, an array of floats: an item's vector, then 1, then its bias.

        Its product with the features of a user is the prediction.
        """
        return frame_of_rows(session_of(None), self._of("item").table())

    def predict(self, value: Any) -> float | None:
        """Predicts one pair in this process, without a Spark job: a `Row` or dict by the names of the columns."""
        found: float | None = self._score_row(value, "prediction")
        return found

    def recommendForAllUsers(self, numItems: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best items of each user, best first; of equal ones, that with the smaller id.

        Args:
            numItems: Length of the lists.
            exclude: Pairs that are not recommended, in the columns `userCol` and `itemCol`.

        Returns:
            A DataFrame of the user's id and `recommendations`, an array of structs of the item's id and `rating`.
        """
        return self._recommended("user", None, numItems, exclude)

    def recommendForAllItems(self, numUsers: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best users of each item, as `recommendForAllUsers`."""
        return self._recommended("item", None, numUsers, exclude)

    def recommendForUserSubset(self, dataset: DataFrame, numItems: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best items of each user in `userCol` of a dataset that the fit had."""
        return self._recommended("user", dataset, numItems, exclude)

    def recommendForItemSubset(self, dataset: DataFrame, numUsers: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best users of each item in `itemCol` of a dataset that the fit had."""
        return self._recommended("item", dataset, numUsers, exclude)

    def evaluate(self, dataset: DataFrame, k: int = 10, exclude: DataFrame | None = None) -> RankingMetrics:
        """Compares the `k` best items of each user with those of a dataset, in `itemCol`; see `recommendForAllUsers`.

        Users that the fit did not have are left out. For the error of ratings, there is Spark's `RegressionEvaluator`.

        Raises:
            ColumnError: The fit had none of the users, or no row has a user and an item.
        """
        user, item = self.getUserCol(), self.getItemCol()
        pairs = self._pairs(dataset, "user", "item").where("one is not null and other is not null")
        relevant = pairs.groupBy(F.col("one").alias(user)).agg(F.collect_set("other").alias("relevant"))
        lists = self.recommendForUserSubset(dataset, k, exclude).join(relevant, user)
        return ranking_metrics(lists, user, item, k)

    def _recommended(self, side: str, dataset: DataFrame | None, count: int, exclude: DataFrame | None) -> DataFrame:
        other = "item" if side == "user" else "user"
        at_least("numItems" if side == "user" else "numUsers", count, 1)
        own = self._of(side)
        rows = frame_of_rows(session_of(dataset), own.table())
        if dataset is not None:
            rows = rows.join(self._pairs(dataset, side).distinct().toDF("id"), "id", "left_semi")
        if exclude is not None:
            seen = self._pairs(exclude, side, other).groupBy(F.col("one").alias("id"))
            rows = rows.join(seen.agg(F.collect_set("other").alias("seen")), "id", "left")
        names = [self.getOrDefault(f"{of}Col") for of in (side, other)]
        return recommended(rows, self._of(other), count, *names)

    def _pairs(self, dataset: DataFrame, *sides: str) -> DataFrame:
        """Returns the ids in columns of a dataset as `one` and `other`, cast to the types of the known ones."""
        found = dataframe_of(dataset, "a recommender")
        names = ColumnNames.of(found)
        kinds = {"user": self.trained.inputs[0].sql, "item": self.trained.inputs[1].sql}
        with naming_params(self, fits=False):
            columns = [names.column(self.getOrDefault(f"{side}Col")).cast(kinds[side]) for side in sides]
        return found.select(*(c.alias(name) for c, name in zip(columns, ("one", "other"), strict=False)))

    @torch.no_grad()
    def _of(self, side: str) -> Vectors:
        """Returns the vectors of all users, or items, with biases folded in."""
        if side not in self._vectors:
            module, pairs = self.module, self.trained.preprocess
            assert isinstance(module, Towers)
            assert isinstance(pairs, Pairs)
            known = pairs.known_users if side == "user" else pairs.known_items
            vectors = (module.user_vectors if side == "user" else module.item_vectors)(
                torch.arange(len(known.ids)), torch.from_numpy(known.features)
            )
            bias, ones = module.scale * vectors[:, -1:], torch.ones(len(vectors), 1)
            rest = [bias + module.mean, ones] if side == "user" else [ones, bias]
            scale = module.scale if side == "user" else 1.0
            folded = torch.cat([scale * vectors[:, :-1], *rest], dim=1).numpy()
            self._vectors[side] = Vectors(pairs.users if side == "user" else pairs.items, folded)
        return self._vectors[side]

    def _kept(self, scored: Column, inputs: Sequence[TensorSpec]) -> Column | None:
        strategy = self.getColdStartStrategy()
        one_of("coldStartStrategy", strategy, ("nan", "drop"))
        return super()._kept(scored, inputs) if strategy == "nan" else ~F.isnan(scored["prediction"])


class Recommender(_Paired, LearningEstimator, RecommenderParams):
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
    _seen: _Seen | None = None

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
        many = self._seen is not None and len(self._seen.items) > _MOST_RANKED
        kept = p["strategy"] == "mesh" or p["split"] == "keep"  # users cannot stay whole
        # A rank that trains a model of its own would have no row of the users that another one has.
        divided = kept or p.strategy.own_batches
        default = _DRAWN if many or divided else 0
        return (p["numNegatives"] or default) if p["implicitPrefs"] else 0

    @property
    def _weight(self) -> str:
        """The column of weights; that of a row is in the place of its rating, whose name an error then has."""
        assert self._seen is not None
        return self._seen.weight if self._ranks_all else Values(self)["ratingCol"] or self._seen.weight

    def _group(self) -> str | None:
        return self._seen.group if self._seen is not None and self._ranks_all else None

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
        ours._seen = other._seen
        same = _WHOLE_USERS if ours._ranks_all == other._ranks_all else ()
        ignored = same if self.getImplicitPrefs() else (*_WHOLE_USERS, "alpha")
        return [name for name in super()._differing(other) if name not in ignored]

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from others and, once they were seen, from the rows."""
        that = super().completed().copy()
        p = Values(that)
        _check_params(p)
        for name, least in (("rank", 1), ("regParam", 0), ("alpha", 0)):
            at_least(name, p[name], least)
        if p["numNegatives"] is not None:
            at_least("numNegatives", p["numNegatives"], 1)
        one_of("coldStartStrategy", p["coldStartStrategy"], ("nan", "drop"))
        implicit, rating, seen = p["implicitPrefs"], p["ratingCol"], self._seen
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

    def _learn(self, dataset: DataFrame) -> _Seen:
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
            groups = rows.groupBy(names.column(name).cast(_id_type(names, name)).alias("id"))
            figures = [F.max(names.column(one).cast("double")).alias(f"f{at}") for at, one in enumerate(features)]
            of_ratings = [F.avg(score).alias("mean"), F.var_pop(score).alias("variance")]
            extremes = [F.min(score).alias("least"), F.max(score).alias("most")]
            found = table_of(groups.agg(*figures, F.count(F.lit(1)).alias("rows"), *of_ratings, *extremes))
            check_rows(found.num_rows)
            kept = found.sort_by("id").select([0, *range(1, 1 + len(features))])
            tables.append(_structs(kept, [name, *features]))
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
        return _Seen(users, items, mean, deviation, group, weight, count, rare)

    def _arranged(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows of implicit preferences with the weight of each, or of all that a user has chosen."""
        p, names, seen = Values(self), ColumnNames.of(dataset), self._seen
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
        found, seen, p = super()._chosen(), self._seen, Values(self)
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
        assert self._seen is not None
        if not self._marks:
            return len(self._seen.users) if self._ranks_all else self._seen.rows, 0
        held_out, users = self._pairs_held_out, len(self._seen.users)
        return (users, min(users, held_out)) if self._ranks_all else (self._seen.rows - held_out, held_out)

    def _capped(self, trained: int, held_out: int) -> tuple[float, int]:
        """Returns both, where a sample is a user by the pairs that are held out: all users train."""
        if not self._ranks_all:
            return super()._capped(trained, held_out)
        return min(1.0, MOST_HELD_OUT / self._pairs_held_out), trained

    @property
    def _pairs_held_out(self) -> int:
        assert self._seen is not None
        return round(max(0, self._seen.rows - self._seen.rare) * self.getValidationFraction())

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


def _check_params(p: Values) -> None:
    """Refuses ratings without a column of them, and a number in place of a user."""
    if not (p["ratingCol"] or p["implicitPrefs"]):
        raise ConfigError(
            "ratingCol is '', and without implicitPrefs the ratings are what is learned",
            hint="name the column, or set implicitPrefs=True",
            param="ratingCol",
            code="ST-CLASH",
        )
    if p["nullPolicy"] == "fill":
        raise ConfigError(
            "nullPolicy is 'fill', and no number stands for a user",
            hint="set nullPolicy='drop', or fill features before",
            param="nullPolicy",
            code="ST-CLASH",
        )


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


def _structs(table: pa.Table, names: Sequence[str]) -> pa.StructArray:
    return pa.StructArray.from_arrays([column.combine_chunks() for column in table.columns], names=list(names))


def _id_type(names: ColumnNames, name: str) -> str:
    """Returns the SQL type of a column of users or items."""
    kind = names.type_of(name)
    sql = kept_as(kind)
    if sql not in _IDS:
        hint = f"cast({names.sql(name)} as string), or as bigint"
        what = f"column {name!r} is {kind.simpleString()}, and users and items are strings or whole numbers"
        raise ColumnError(what, hint=hint, column=name)
    return sql
