"""Metrics of held-out folds, by the user's evaluator."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from threading import Semaphore, Thread
from typing import Any

import pyarrow as pa
from pyspark.ml.evaluation import Evaluator
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.errors import ColumnError, nearest
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning.folded_rows import FoldedRows
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows, inheriting, to_vector

__all__ = ["Metrics", "carried_columns", "results_for"]

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


class Metrics:
    """Metrics, computed in threads: their Spark jobs may have to wait for the slots of the ranks."""

    def __init__(self, evaluator: Evaluator, spark: SparkSession, *, parallelism: int) -> None:
        """Sets the evaluator, and the most metrics that are computed at a time."""
        self._evaluator, self._spark = evaluator, spark
        self._turns = Semaphore(parallelism)
        self._found: dict[tuple[int, int], Future[float]] = {}
        self._threads: list[Thread] = []
        self._over = False

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True

    def add(self, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Begins to compute a metric of scored rows; raises the error of an earlier one."""
        for earlier in self._found.values():
            if earlier.done():
                earlier.result()
        future: Future[float] = Future()
        self._found[fold, index] = future
        outputs = {name: (field, model._fields()[0][field]) for name, field in model._fields()[1].items()}
        frame: list[Any] = [table]
        del table

        def compute() -> None:
            with self._turns:
                if self._over:  # interrupted, or failed
                    return
                try:
                    data = frame_of_rows(self._spark, frame.pop())
                    columns = [
                        _column(name, *outputs[name], model) if name in outputs else F.col(f"`{name}`")
                        for name in data.columns
                    ]
                    future.set_result(self._evaluator.evaluate(data.select(*columns)))
                except BaseException as error:
                    future.set_exception(error)

        thread = Thread(target=inheriting(self._spark, compute), name="sparktorch-metrics", daemon=True)
        self._threads.append(thread)
        thread.start()

    def all(self, rows: FoldedRows, folds: int, models: int) -> list[list[float]]:
        """Waits for the metrics, by fold and model; frees the slots of the ranks if there are no others."""
        waiting = set(self._found.values())
        patience: float | None = _PATIENCE if rows.leaves_slots else 0.0
        while waiting:
            done, waiting = wait(waiting, timeout=patience, return_when=FIRST_COMPLETED)
            if waiting and not done:
                _LOG.info(
                    "the evaluator's jobs find no slot: the ranks free theirs, and read the rows again afterwards"
                )
                rows.let_go()
                patience = None
        for thread in self._threads:
            thread.join()
        return [[self._found[fold, index].result() for index in range(models)] for fold in range(folds)]


def _column(name: str, field: str, kind: str, model: TorchModelBase) -> Any:
    column = F.col(f"`{name}`")
    return (to_vector(column) if kind == "vector" else column).alias(name, metadata=model._attribute(field, kind))


def _columns_of(evaluator: Evaluator) -> list[str]:
    """Returns the columns that an evaluator's Params name."""
    named = [param for param in evaluator.params if param.name.endswith("Col") and evaluator.isDefined(param)]
    return [name for name in map(evaluator.getOrDefault, named) if name]


def _names(evaluator: Evaluator, param: Any, name: str) -> bool:
    """Whether the user has set a Param of the evaluator to the name of that column."""
    return param.name.endswith("Col") and evaluator.isSet(param) and evaluator.getOrDefault(param) == name


def _outputs_of(estimator: Any) -> list[str]:
    return [estimator.getOrDefault(name) for name in _OUTPUTS if estimator.hasParam(name)]
