"""Metrics of held-out folds, by the user's evaluator."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Semaphore, Thread
from typing import Any

import pyarrow as pa
from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.errors import ColumnError, nearest
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning.folded_rows import MOST_BYTES, FoldedRows
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, inheriting, to_vector

__all__ = ["Metrics", "carried_columns", "results_for", "weight_of"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds without a metric, after which the ranks free their slots
_OUTPUTS = ("predictionCol", "probabilityCol", "rawPredictionCol")


def carried_columns(evaluator: Evaluator, dataset: DataFrame, estimators: list[Any]) -> tuple[str, ...] | str:
    """Returns the numeric columns of the dataset that an evaluator reads; or why they are not all that it needs."""
    read = _columns_of(evaluator)
    made = [_outputs_of(estimator) for estimator in estimators]
    if not any(name in outputs for name in read for outputs in made):
        return f"{type(evaluator).__name__} names no output column of the model"
    names, carried = ColumnNames.of(dataset), []
    if any(names.called(name) for outputs in made for name in outputs if name):
        return "the DataFrame already has an output column of the model"  # which `transform` refuses
    for name in read:
        if all(name in outputs for outputs in made):
            continue
        named = [param.name for param in evaluator.params if _names(evaluator, param, name)]
        if named and not names.called(name) and not any(name in outputs for outputs in made):
            raise ColumnError(
                f"the evaluator's {named[0]} is {name!r}, which neither the DataFrame nor the model has",
                hint=nearest(name, [*dataset.columns, *made[0]]),
                column=name,
            )
        if any(name in outputs for outputs in made) or not names.called(name):
            return f"the evaluator reads {name!r}, which not every model makes"
        if not isinstance(names.type_of(name), T.NumericType):
            return f"the evaluator reads {name!r}, which is no number"
        carried.append(name)
    return tuple(dict.fromkeys(carried))


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

    def __init__(self, evaluator: Evaluator, spark: SparkSession, *, parallelism: int, weight: str | None) -> None:
        """Sets the evaluator, the most metrics that are computed at a time, and what `weight_of` says."""
        self._evaluator, self._spark = evaluator, spark
        if weight is not None:
            self._evaluator = evaluator.copy({evaluator.getParam("weightCol"): weight})
        self._turns = Semaphore(parallelism)
        self._found: dict[tuple[int, int], Future[float]] = {}
        self._bytes: dict[Future[float], int] = {}
        self._threads: list[Thread] = []
        self._over = False

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True

    def add(self, rows: FoldedRows, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Begins to compute a metric of scored rows; raises the error of an earlier one. Waits if many are left."""
        for earlier in self._found.values():
            if earlier.done():
                earlier.result()
        future: Future[float] = Future()
        self._found[fold, index] = future
        kinds, outputs = model._fields()
        columns = [_column(name, outputs.get(name), kinds, model) for name in table.column_names]
        self._bytes[future] = table.nbytes
        frame: list[Any] = [table]
        del table, model  # the thread may wait for long

        def compute() -> None:
            with self._turns:
                if self._over:  # interrupted, or failed
                    return
                try:
                    data = frame_of_rows(self._spark, frame.pop())
                    future.set_result(self._evaluator.evaluate(data.select(*columns)))
                except BaseException as error:
                    future.set_exception(error)

        thread = Thread(target=inheriting(self._spark, compute), name="sparktorch-metrics", daemon=True)
        self._threads.append(thread)
        thread.start()
        self._settle(rows, MOST_BYTES)

    def all(self, rows: FoldedRows, folds: int, models: int) -> list[list[float]]:
        """Waits for the metrics, by fold and model; frees the slots of the ranks if there are no others."""
        self._settle(rows, -1)
        for thread in self._threads:
            thread.join()
        return [[self._found[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _settle(self, rows: FoldedRows, most: int) -> None:
        """Waits until the scores of missing metrics take at most that many bytes, or, below 0, until there are none."""
        patience: float | None = _PATIENCE if rows.leaves_slots else 0.0
        while (left := [one for one in self._bytes if not one.done()]) and sum(self._bytes[one] for one in left) > most:
            if not wait(left, timeout=patience, return_when=FIRST_COMPLETED).done:
                _LOG.info(
                    "the evaluator's jobs find no slot: the ranks free theirs, and read the rows again afterwards"
                )
                rows.let_go()
                patience = None


def _column(name: str, field: str | None, kinds: Mapping[str, str], model: TorchModelBase) -> Any:
    column = F.col(f"`{name}`")
    if field is None:
        return column
    kind = kinds[field]
    return (to_vector(column) if kind == "vector" else column).alias(name, metadata=model._attribute(field, kind))


def _columns_of(evaluator: Evaluator) -> list[str]:
    """Returns the columns that an evaluator's Params name."""
    named = [param for param in evaluator.params if param.name.endswith("Col") and evaluator.isDefined(param)]
    names = [
        evaluator.getOrDefault(param) for param in named if param.name != "probabilityCol" or not _counts(evaluator)
    ]
    return [name for name in names if name]


def _names(evaluator: Evaluator, param: Any, name: str) -> bool:
    """Whether the user has set a Param of the evaluator to the name of that column."""
    return param.name.endswith("Col") and evaluator.isSet(param) and evaluator.getOrDefault(param) == name


def _outputs_of(estimator: Any) -> list[str]:
    return [estimator.getOrDefault(name) for name in _OUTPUTS if estimator.hasParam(name)]
