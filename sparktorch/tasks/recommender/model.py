"""The model of a recommender: vectors of users and items, and lists of the best for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.base.config import at_least, one_of
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec, input_name
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.checks import naming_params
from sparktorch.ml.model import TorchModelBase
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, table_of
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.session import session_of
from sparktorch.tasks.recommender.evaluation import RankingMetrics, ranking_metrics
from sparktorch.tasks.recommender.lists import Vectors, best_candidates
from sparktorch.tasks.recommender.network import Pairs, Towers
from sparktorch.tasks.recommender.pairs import Paired, id_type, structs
from sparktorch.tasks.recommender.params import RecommenderModelParams
from sparktorch.train.recipe.dry_run import ArgumentSpec, OutputSpec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RecommenderModel"]


class RecommenderModel(Paired, TorchModelBase, RecommenderModelParams):
    """Vectors of users and items, fitted by `Recommender`.

    `transform` adds `predictionCol`, float: the rating of a pair or, with implicit preferences, a score that orders
    items.
    """

    _estimator = "sparktorch.tasks.recommender.estimator:Recommender"
    _vectors: dict[str, Vectors] = {}

    def _with(self, trained: TrainedModule, summary: Any) -> Self:
        self._vectors = {}
        return super()._with(trained, summary)

    @classmethod
    def fromFactors(cls, userFactors: DataFrame, itemFactors: DataFrame, **params: Any) -> Self:
        """Returns a model with vectors that were fitted elsewhere, such as those of Spark's `ALSModel`.

        Args:
            userFactors: The columns `id`, of strings or whole numbers, and `features`, an array of numbers.
            itemFactors: The same columns, for items.
            params: Params of the model, such as `userCol`.

        Raises:
            ColumnError: A column is missing, or ids are of another type.
            ConfigError: Vectors have different lengths.
        """
        model = cls()
        model._set(**params)
        specs: list[TensorSpec] = []
        id_structs: list[pa.StructArray] = []
        weights: list[torch.Tensor] = []
        lengths: set[int] = set()
        factors_by_param = (("userFactors", userFactors), ("itemFactors", itemFactors))
        for index, (name, (param, factors)) in enumerate(zip(model.getInputCols(), factors_by_param, strict=True)):
            names = ColumnNames.of(factors)
            kind = id_type(names, "id")
            specs.append(TensorSpec(name=input_name(index), column=name, dtype="float32", kind="any", sql=kind))
            features = names.column("features").cast("array<float>").alias("features")
            table = table_of(factors.select(names.column("id").cast(kind).alias("id"), features)).sort_by("id")
            lists = table["features"].combine_chunks()
            lengths.update(lists.value_lengths().unique().to_pylist())
            if not len(lists) or len(lengths) != 1:
                raise ConfigError("features are empty, or of several lengths", param=param)
            id_structs.append(structs(table.select(["id"]), [name]))
            vectors = torch.tensor(lists.flatten().to_numpy()).view(len(lists), -1)
            # The last element of a vector is the bias, which vectors from elsewhere do not have.
            weights.append(torch.nn.functional.pad(vectors, (0, 1)))
        users, items = weights
        known_users, known_items = id_structs
        trained = TrainedModule(
            source=f"{Towers.__module__}:{Towers.__qualname__}",
            params={"users": len(users), "items": len(items), "rank": users.shape[1] - 1},
            weights=pack_state({"users.weight": users, "items.weight": items}),
            inputs=tuple(specs),
            arguments=tuple(ArgumentSpec(name, "int64", ()) for name in ("user", "item")),
            preprocess=Pairs(specs[0].column, specs[1].column, known_users, known_items),
            returned=("user", "item"),
            outputs=(OutputSpec("", ()),),
            task="generic",
        )
        return model._set(inputCols=model.getInputCols())._with(trained, None)

    @property
    def rank(self) -> int:
        """The number of elements of a vector, without its bias."""
        return int(self.trained.params["rank"])

    @property
    def userFactors(self) -> DataFrame:
        """The columns `id` and `features`, an array of floats: a user's vector, its bias plus the mean, and 1."""
        return frame_of_rows(session_of(None), self._vectors_of("user").table())

    @property
    def itemFactors(self) -> DataFrame:
        """The columns `id` and `features`, an array of floats: an item's vector, 1, and its bias.

        The prediction is the product of an item's features and a user's features.
        """
        return frame_of_rows(session_of(None), self._vectors_of("item").table())

    def predict(self, value: Any) -> float | None:
        """Predicts one pair, a `Row` or dict by the names of the columns, in this process and without a Spark job."""
        score: float | None = self._score_row(value, "prediction")
        return score

    def recommendForAllUsers(self, numItems: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best items of each user, the best one first; of items with equal scores, the smaller id first.

        Args:
            numItems: Length of the lists.
            exclude: Pairs that are not recommended, in the columns `userCol` and `itemCol`.

        Returns:
            A DataFrame of the user's id and `recommendations`, an array of structs of the item's id and `rating`.
        """
        return self._recommend("user", None, numItems, exclude)

    def recommendForAllItems(self, numUsers: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best users of each item, in the way of `recommendForAllUsers`."""
        return self._recommend("item", None, numUsers, exclude)

    def recommendForUserSubset(self, dataset: DataFrame, numItems: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best items of each user in `userCol` of a dataset that the fit had."""
        return self._recommend("user", dataset, numItems, exclude)

    def recommendForItemSubset(self, dataset: DataFrame, numUsers: int, exclude: DataFrame | None = None) -> DataFrame:
        """Returns the best users of each item in `itemCol` of a dataset that the fit had."""
        return self._recommend("item", dataset, numUsers, exclude)

    def evaluate(self, dataset: DataFrame, k: int = 10, exclude: DataFrame | None = None) -> RankingMetrics:
        """Compares the `k` best items of each user with the user's items in a dataset; see `recommendForAllUsers`.

        Users that the fit did not have are left out. For the error of ratings, there is Spark's `RegressionEvaluator`.

        Raises:
            ColumnError: The fit had none of the users, or no row has a user and an item.
        """
        user, item = self.getUserCol(), self.getItemCol()
        pairs = self._pairs(dataset, "user", "item").where("one is not null and other is not null")
        relevant = pairs.groupBy(F.col("one").alias(user)).agg(F.collect_set("other").alias("relevant"))
        lists = self.recommendForUserSubset(dataset, k, exclude).join(relevant, user)
        return ranking_metrics(lists, user, item, k)

    def _recommend(self, side: str, dataset: DataFrame | None, count: int, exclude: DataFrame | None) -> DataFrame:
        """Returns lists for all ids on one side, "user" or "item", or only for the ids that a dataset has."""
        other_side = "item" if side == "user" else "user"
        at_least("numItems" if side == "user" else "numUsers", count, 1)
        rows = frame_of_rows(session_of(dataset), self._vectors_of(side).table())
        if dataset is not None:
            rows = rows.join(self._pairs(dataset, side).distinct().toDF("id"), "id", "left_semi")
        if exclude is not None:
            seen = self._pairs(exclude, side, other_side).groupBy(F.col("one").alias("id"))
            rows = rows.join(seen.agg(F.collect_set("other").alias("seen")), "id", "left")
        return best_candidates(
            rows,
            self._vectors_of(other_side),
            count,
            name=self.getOrDefault(f"{side}Col"),
            candidate_name=self.getOrDefault(f"{other_side}Col"),
        )

    def _pairs(self, dataset: DataFrame, *sides: str) -> DataFrame:
        """Returns the ids on one or both sides as the columns `one` and `other`, cast to the types of the known ids."""
        rows = dataframe_of(dataset, "a recommender")
        names = ColumnNames.of(rows)
        kinds = {"user": self.trained.inputs[0].sql, "item": self.trained.inputs[1].sql}
        with naming_params(self, fits=False):
            columns = [names.column(self.getOrDefault(f"{side}Col")).cast(kinds[side]) for side in sides]
        return rows.select(*(column.alias(name) for column, name in zip(columns, ("one", "other"), strict=False)))

    @torch.no_grad()
    def _vectors_of(self, side: str) -> Vectors:
        """Returns the vectors of all users, or of all items, so that the product of two vectors is the prediction.

        For this, biases and mean are elements of the vectors: (vector, bias + mean, 1) and (vector, 1, bias). The scale
        of products is in the vectors of users.
        """
        if side in self._vectors:
            return self._vectors[side]
        module = self.module
        pairs = self.trained.preprocess
        assert isinstance(module, Towers)
        assert isinstance(pairs, Pairs)
        is_user = side == "user"
        index = pairs.user_index if is_user else pairs.item_index
        vectors_with_bias = (module.user_vectors if is_user else module.item_vectors)(
            torch.arange(len(index.ids)), torch.from_numpy(index.features)
        )
        vectors = vectors_with_bias[:, :-1]
        bias = module.scale * vectors_with_bias[:, -1:]
        ones = torch.ones(len(vectors), 1)
        if is_user:
            values = torch.cat([module.scale * vectors, bias + module.mean, ones], dim=1)
        else:
            values = torch.cat([vectors, ones, bias], dim=1)
        self._vectors[side] = Vectors(pairs.users if is_user else pairs.items, values.numpy())
        return self._vectors[side]

    def _row_filter(self, scored: Column, inputs: Sequence[TensorSpec]) -> Column | None:
        strategy = self.getColdStartStrategy()
        one_of("coldStartStrategy", strategy, ("nan", "drop"))
        if strategy == "drop":
            return ~F.isnan(scored["prediction"])
        return super()._row_filter(scored, inputs)
