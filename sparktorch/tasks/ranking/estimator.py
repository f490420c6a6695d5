"""The ranker and its model: scores that order the rows of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch.base.config import one_of
from sparktorch.base.imports import is_object
from sparktorch.errors import ConflictError, shortens
from sparktorch.ml.fit.refusals import check_named_groups
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.fit.values import Values
from sparktorch.ml.regression import ValueModel
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.groups import check_group
from sparktorch.spark.rdd import dataframe_of
from sparktorch.tasks.ranking.evaluation import RankingSummary, evaluate_ranker
from sparktorch.tasks.ranking.loss import LOSSES, measured
from sparktorch.tasks.ranking.params import RankerParams, RankingModelParams
from sparktorch.tasks.shared.held_out import in_share, marked
from sparktorch.tasks.shared.settings import TaskSettings
from sparktorch.tasks.tables.estimator import TabularEstimator, TabularModel
from sparktorch.tasks.tables.network import TableNetwork
from sparktorch.tasks.tables.preprocess import TableColumns

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Ranker", "RankingModel"]

RANKING = TaskSettings(
    learning_rate=3e-3,
    scheduler="CosineAnnealingLR",
    smallest_batch=16,
    largest_batch=128,
    patience_steps=400,
    least_patience=6,
    most_epochs=80,
    least_epochs=6,
)


class RankingModel(TabularModel, ValueModel, RankingModelParams):
    """A module fitted by `Ranker`.

    `transform` adds `predictionCol`, a double: the larger it is, the earlier comes the row in its group. It scores row
    by row, and needs no group.
    """

    _estimator = "sparktorch.tasks.ranking.estimator:Ranker"

    def _quality(self, scored: DataFrame, label: str) -> tuple[str, int, float]:
        check_numbers(ColumnNames.of(scored), [self.getPredictionCol()])

        def as_it_is(rows: DataFrame) -> DataFrame:
            return rows

        ranked = evaluate_ranker(self, as_it_is, scored)
        return "NDCG at 10", ranked.numInstances, ranked.ndcg(10)

    @shortens
    def evaluate(self, dataset: DataFrame) -> RankingSummary:
        """Scores rows and compares their order in each group of `groupCol` with `labelCol`.

        With `weightCol`, a group weighs the mean of its rows' weights.

        Raises:
            ColumnError: A column is missing or not numeric, a row has no group, weight, prediction or label, or a label
                is negative.
            ConfigError: `groupCol` is not set.
        """
        check_named_groups(Values(self))
        named = self._named()
        return evaluate_ranker(named, named.transform, dataframe_of(dataset, "evaluate"))


class Ranker(TabularEstimator, RankerParams):
    """Trains a PyTorch module to order the rows of each group, such as the documents that a query finds.

    Without `module`, it takes the columns of a table as they are, as `TabularRegressor` does, and trains its network.
    A module of your own gets the input columns, and returns one score a row, of shape `(rows,)` or `(rows, 1)`. Labels
    are grades, numbers >= 0; the larger one is the better. A batch has `batchSize` whole groups. Validations show
    `val_ndcg_at_10` and `val_mrr`.

    Example:
        >>> rows = [(query, float(i), "ab"[query % 2], float(i // 2)) for query in range(30) for i in range(6)]
        >>> found = spark.createDataFrame(rows, "query int, price double, kind string, label float")
        >>> ranker = Ranker(groupCol="query", batchSize=10, epochs=5, learningRate=0.01, progress=False)
        >>> model = ranker.fit(found)
        >>> model.evaluate(found).ndcg(10) > 0.99
        True

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "regression"
    _model_class = RankingModel
    _task_settings = RANKING
    _unit = "groups"
    _searched = {"optimizerParams.weight_decay": [0.1, 1.0]}
    _ema_decay = None  # No set of groups has shown that an average is better.
    _hint_of_labels = "labels are grades, and the larger one is the better"

    @property
    def _takes_table(self) -> bool:
        """Whether the network for tables takes columns as they are; the user's own module gets input columns."""
        p = Values(self)
        if p.trained is not None:
            return isinstance(p.trained.preprocess, TableColumns)
        has_users_preprocess = p["preprocess"] is not None and self._learned is None
        is_table_network = p["module"] is None or is_object(p["module"], TableNetwork)
        return is_table_network and not (has_users_preprocess or p.is_set("featuresCol"))

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from what it has learned from the rows: inputs and network."""
        _check_members(Values(self))
        return super().completed() if self._takes_table else super(TabularEstimator, self).completed()

    @property
    def _learns(self) -> bool:
        return self._takes_table or self._needs_count

    @property
    def _needs_count(self) -> bool:
        # The penalty on categories is in units of the loss of a group, and so depends on the number of groups.
        return self._takes_table or super()._needs_count

    @property
    def _has_learned(self) -> bool:
        return self._learned is not None or self._sample is not None

    def _learn_rows(self, rows: DataFrame) -> None:
        if self._takes_table:
            # A column that cannot group rows is refused before there is a job.
            check_group(ColumnNames.of(rows), self.getGroupCol())
            super()._learn_rows(rows)

    @property
    def _network_arguments(self) -> dict[str, Any]:
        arguments = super()._network_arguments
        del arguments["scales"]  # Scores have no unit, and may be negative.
        arguments.pop("nonnegative", None)
        if _is_custom(self.getLoss()):
            arguments["members"] = 1
        return arguments

    def _required_columns(self, names: ColumnNames) -> Sequence[str]:
        p = Values(self)
        takes_nulls = self._takes_table or getattr(p["preprocess"], "takes_nulls", False)
        inputs = [] if takes_nulls else p["inputCols"] or [self.getFeaturesCol()]
        return [*inputs, *super()._required_columns(names), self.getGroupCol()]

    @property
    def _chosen_by(self) -> str:
        return f"a hash of {self.getGroupCol()!r}"

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        check_group(names, self.getGroupCol())
        return marked(dataset, in_share([names.column(self.getGroupCol())], share), self._marks), None

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        """Returns how many groups train, and how many are marked for validation."""
        rows = self._without_dropped(rows)
        p = Values(self)
        names = ColumnNames.of(rows)
        is_marked = names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(False)
        groups = rows.groupBy(names.column(self.getGroupCol())).agg(F.max(is_marked).cast("int").alias("marks"))
        held_out, count = groups.agg(F.sum("marks"), F.count(F.lit(1))).collect()[0]
        held_out = held_out or 0  # A sum over no groups is null.
        return count - held_out, held_out

    def _task_training(self) -> TaskTraining:
        """Returns the loss and the metrics of whole groups; a loss with a name is one of `LOSSES`."""
        loss = self.getLoss()
        if isinstance(loss, str) and ":" not in loss:
            one_of("loss", loss, tuple(LOSSES))
            loss = LOSSES[loss]
        return TaskTraining(graded=True, loss=loss, metrics=measured)


def _check_members(p: Values) -> None:
    """Refuses the user's own loss for a fitted network of several members, each of which has a score for a row."""
    if p.trained is not None and _members(p.trained) > 1 and _is_custom(p["loss"]):
        raise ConflictError(
            "loss is your own and gets one score a row, and the network of the fitted model has several members",
            hint="fit that model with this loss or with moduleParams={'members': 1}, or set loss='listnet'",
            param="loss",
        )


def _is_custom(loss: Any) -> bool:
    """Whether a loss is the user's own: only the losses with names in `LOSSES` take the scores of several members."""
    return not isinstance(loss, str) or ":" in loss


def _members(trained: TrainedModule) -> int:
    """Returns the number of members that a fitted network for tables has; 1 for any other module."""
    return int(trained.params.get("members", 1)) if is_object(trained.source, TableNetwork) else 1
