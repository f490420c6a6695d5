"""Metrics of held-out folds, by the user's evaluator."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning.folded_rows import MOST_BYTES, FoldedRows, NotInOnePass
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, inheriting, to_vector
from sparktorch.spark.session import slots

__all__ = ["Metrics", "carried_columns", "results_for", "weight_of"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds without a metric, after which the ranks free their slots
_OUTPUTS = ("predictionCol", "probabilityCol", "rawPredictionCol")


def carried_columns(evaluator: Evaluator, dataset: DataFrame, estimators: list[Any]) -> tuple[str, ...]:
    """Returns the numeric columns of the dataset that an evaluator reads.

    Raises:
        NotInOnePass: They, and the outputs of the models, are not all that it needs.
    """
    read, names = _columns_of(evaluator), ColumnNames.of(dataset)
    made = [{one.getOrDefault(name) for name in _OUTPUTS if one.hasParam(name)} - {""} for one in estimators]
    if any(names.called(name) for name in set().union(*made)):
        raise NotInOnePass("the DataFrame already has an output column of the model")  # which `transform` refuses
    if made and not any(outputs.intersection(read) for outputs in made):
        raise NotInOnePass(f"{type(evaluator).__name__} names no output column of the model")
    carried = [name for name in dict.fromkeys(read) if any(name not in outputs for outputs in made)]
    for name in carried:
        if not names.called(name) or not isinstance(names.type_of(name), T.NumericType):
            raise NotInOnePass(f"the evaluator reads {name!r}, which is no number, and not every model makes it")
    return tuple(carried)


def results_for(evaluator: Evaluator, model: TorchModelBase) -> dict[str, str]:
    """Returns the results of the scorer that an evaluator reads, with the name of the column of each."""
    read = _columns_of(evaluator)
    return {field: name for name, field in model._fields()[1].items() if name in read}


def weight_of(evaluator: Evaluator, carried: Sequence[str]) -> str | None:
    """Returns the column by whose sums an evaluator takes equal rows as one; `None` if it needs each row."""
    if not _counts(evaluator):
        return None
    if not evaluator.isDefined("weightCol") or not evaluator.getOrDefault("weightCol"):
        return f"{evaluator.uid}_weight"
    weight: str = evaluator.getOrDefault("weightCol")
    return weight if weight in carried and weight != evaluator.getOrDefault("labelCol") else None


def _counts(evaluator: Evaluator) -> bool:
    """Whether an evaluator reads no more than a confusion matrix."""
    return type(evaluator) is MulticlassClassificationEvaluator and evaluator.getOrDefault("metricName") != "logLoss"


class Metrics:
    """Metrics, computed in threads: their Spark jobs may have to wait for the slots of the ranks."""

    def __init__(self, evaluator: Evaluator, rows: FoldedRows, *, parallelism: int, weight: str | None) -> None:
        """Sets the evaluator, who holds the rows, the most metrics at a time, and what `weight_of` says."""
        self._rows, self._evaluator = rows, evaluator
        if weight is not None:
            self._evaluator = evaluator.copy({evaluator.getParam("weightCol"): weight})
        self._pool = ThreadPoolExecutor(parallelism, "sparktorch-metrics")
        self._found: dict[tuple[int, int], Future[float]] = {}
        self._bytes: dict[Future[float], int] = {}

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Begins to compute a metric of scored rows; raises the error of an earlier one. Waits if many are left."""
        kinds, outputs = model._fields()
        columns = [_column(name, outputs.get(name), kinds, model) for name in table.column_names]
        compute = partial(self._evaluate, table, columns)
        future = self._found[fold, index] = self._pool.submit(inheriting(self._rows.dataset.sparkSession, compute))
        self._bytes[future] = table.nbytes
        self._settle(MOST_BYTES)

    def all(self, folds: int, models: int) -> list[list[float]]:
        """Waits for the metrics, by fold and model; frees the slots of the ranks if there are no others."""
        self._settle(-1)
        return [[self._found[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _evaluate(self, table: pa.Table, columns: Sequence[Any]) -> float:
        return self._evaluator.evaluate(frame_of_rows(self._rows.dataset.sparkSession, table).select(*columns))

    def _settle(self, most: int) -> None:
        """Waits until the scores of missing metrics take at most that many bytes, or, below 0, until there are none."""
        count = slots(self._rows.dataset.sparkSession)
        patience: float | None = _PATIENCE if count is None or count > self._rows.slots_held else 0.0
        while True:
            for done in [future for future in self._bytes if future.done()]:
                del self._bytes[done]
                done.result()
            if sum(self._bytes.values()) <= most or not self._bytes:
                return
            if not wait(self._bytes, timeout=patience, return_when=FIRST_COMPLETED).done:
                _LOG.info("the evaluator's jobs find no slot: the ranks free theirs, and read the rows again later")
                self._rows.let_go()
                patience = None


def _column(name: str, field: str | None, kinds: Mapping[str, str], model: TorchModelBase) -> Any:
    column = F.col(f"`{name}`")
    if field is None:
        return column
    kind = kinds[field]
    return (to_vector(column) if kind == "vector" else column).alias(name, metadata=model._attribute(field, kind))


def _columns_of(evaluator: Evaluator) -> list[str]:
    """Returns the columns that an evaluator's Params name."""
    unread = "probabilityCol" if _counts(evaluator) else ""
    named = [param for param in evaluator.params if param.name.endswith("Col") and param.name != unread]
    return [name for param in named if evaluator.isDefined(param) and (name := evaluator.getOrDefault(param))]
