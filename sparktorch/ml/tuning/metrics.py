"""The metrics of a cross-validation: those of Spark's evaluators without a Spark job, and those of others by jobs."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    Evaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.sql import functions as F

from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.scoring.evaluation import Confusion
from sparktorch.ml.tuning.folded_rows import MOST_BYTES, FoldedRows
from sparktorch.spark.compat import frame_of_rows, inheriting, to_vector
from sparktorch.spark.session import slots

__all__ = ["FoldMetrics", "columns_of", "metric_of", "results_for", "weight_of"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0  # After so many seconds without a metric, the ranks free their slots.

Floats = npt.NDArray[np.float64]


def metric_of(evaluator: Evaluator, rows: pa.Table) -> float | None:
    """Returns an evaluator's metric of scored rows, up to the rounding of sums; `None` if only a job can compute it.

    That is so for evaluators of other classes, and for rows that the evaluator may refuse. Of more scores than bins,
    the areas under curves are those of a DataFrame with one partition.
    """
    compute = _COMPUTED.get(type(evaluator))
    if compute is None:
        return None
    spark_evaluator: Any = evaluator
    weight_column = spark_evaluator.isDefined("weightCol") and spark_evaluator.getWeightCol()
    label = _numbers(rows, spark_evaluator.getLabelCol())
    weight = _numbers(rows, weight_column) if weight_column else np.ones(rows.num_rows)
    if label is None or weight is None or weight.min() < 0 or not weight.sum():
        return None
    return compute(spark_evaluator, rows, label, weight)


def _regression(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    prediction = _numbers(rows, evaluator.getPredictionCol())
    if prediction is None or prediction.ndim > 1:
        return None
    total, difference = weight.sum(), label - prediction
    squares = (weight * difference**2).sum()
    mean = (weight * label).sum() / total
    name = evaluator.getMetricName()
    if name == "r2":
        if evaluator.getThroughOrigin():
            around = (weight * label**2).sum()
        elif label.min() < label.max():
            around = _spread(label - mean, weight)
        else:  # The mean of equal labels differs from them by its rounding, which is no spread.
            around = 0.0
        return 1 - float(squares / around) if around else None
    values = {
        "mse": squares / total,
        "rmse": math.sqrt(squares / total),
        "mae": (weight * abs(difference)).sum() / total,
        "var": (weight * (prediction - mean) ** 2).sum() / total,
    }
    return float(values[name]) if name in values else None


def _spread(differences: Floats, weight: Floats) -> float:
    """Returns the sum of squares as Spark computes it.

    That is the unbiased variance, whose weights say how reliable a row is, times the total weight minus one.
    """
    total = weight.sum()
    freedom = total - (weight**2).sum() / total
    return float((weight * differences**2).sum() / freedom * (total - 1)) if freedom > 0 else 0.0


def _classes(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    name, beta = evaluator.getMetricName(), evaluator.getBeta()
    if name == "logLoss":
        return _log_loss(evaluator, rows, label, weight)
    prediction = _numbers(rows, evaluator.getPredictionCol())
    if prediction is None or prediction.ndim > 1:
        return None
    classes, class_index = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    true, predicted = class_index[: len(label)], class_index[len(label) :]
    occurs = np.isin(classes, label)

    def weights_of(index: npt.NDArray[Any], weights: Floats) -> Floats:
        """Returns the sum of weights for each class that occurs as a label."""
        return np.asarray(np.bincount(index, weights, len(classes)), np.float64)[occurs]

    confusion = Confusion(
        labels=classes[occurs],
        true=weights_of(true, weight),
        predicted=weights_of(predicted, weight),
        hits=weights_of(true, weight * (true == predicted)),
    )
    if not confusion.true.all():
        return None
    if name == "accuracy":
        return confusion.accuracy
    if name == "hammingLoss":
        return 1 - confusion.accuracy
    if name.endswith("ByLabel"):
        kind = name.removesuffix("ByLabel")
        by_label = _metric_by_label(confusion, kind[:1].upper() + kind[1:], beta)
        is_label = confusion.labels == evaluator.getMetricLabel()
        return float(by_label[is_label][0]) if by_label is not None and is_label.any() else None
    if name == "f1":
        return confusion.mean(confusion.f_measure(1.0))
    by_label = _metric_by_label(confusion, name.removeprefix("weighted"), beta)
    return None if by_label is None else confusion.mean(by_label)


def _metric_by_label(confusion: Confusion, kind: str, beta: float) -> Floats | None:
    """Returns a metric of each class by the stem of its name; `None` if there is no such metric."""
    if kind in ("TruePositiveRate", "Recall"):
        return confusion.recall
    if kind == "FalsePositiveRate":
        return confusion.false_positives
    if kind == "Precision":
        return confusion.precision
    if kind == "FMeasure":
        return confusion.f_measure(beta)
    return None


def _log_loss(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    scores = _numbers(rows, evaluator.getProbabilityCol())
    if scores is None or scores.ndim != 2 or label.min() < 0 or label.max() >= scores.shape[1]:
        return None
    if (label % 1).any():  # Fractions are no classes.
        return None
    least = evaluator.getEps()
    probability = scores[np.arange(len(label)), label.astype(np.int64)]
    losses = np.where(probability > 1 - least, -np.log1p(-least), -np.log(np.maximum(probability, least)))
    return float((weight * losses).sum() / weight.sum())


def _two_classes(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    score = _numbers(rows, evaluator.getRawPredictionCol())
    if score is None or (score.ndim > 1 and score.shape[1] != 2):
        return None
    score = score if score.ndim == 1 else score[:, 1]
    if len(np.unique(np.signbit(score[score == 0]))) == 2:  # Spark orders -0.0 before 0.0, and NumPy takes them as one.
        return None
    falling, threshold_index = np.unique(-score, return_inverse=True)
    positive = label > 0.5
    true_positives = np.bincount(threshold_index, weight * positive, len(falling))
    false_positives = np.bincount(threshold_index, weight * ~positive, len(falling))
    bins = evaluator.getNumBins()
    thresholds_per_bin = len(falling) // bins if bins else 0
    if thresholds_per_bin > 1:
        starts = np.arange(0, len(falling), thresholds_per_bin)
        true_positives = np.add.reduceat(true_positives, starts)
        false_positives = np.add.reduceat(false_positives, starts)
    true_positives, false_positives = true_positives.cumsum(), false_positives.cumsum()
    if not true_positives[-1] or not false_positives[-1]:
        return None
    start, recall = np.zeros(1), true_positives / true_positives[-1]
    name = evaluator.getMetricName()
    if name not in ("areaUnderROC", "areaUnderPR"):
        return None
    if name == "areaUnderROC":
        return _area(np.concatenate([start, false_positives / false_positives[-1]]), np.concatenate([start, recall]))
    positives = true_positives + false_positives
    precision = np.divide(true_positives, positives, out=np.ones_like(positives), where=positives > 0)
    return _area(np.concatenate([start, recall]), np.concatenate([precision[:1], precision]))


def _area(x: Floats, y: Floats) -> float:
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


def _numbers(rows: pa.Table, name: str) -> Floats | None:
    """Returns a column, of shape `(rows,)` or `(rows, elements)`; `None` if it is missing, no number, or not finite."""
    if name not in rows.column_names or not rows.num_rows:
        return None
    column = rows[name].combine_chunks()
    nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    flat = column.flatten() if nested else column
    if len(flat) % rows.num_rows or not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        return None
    values = np.asarray(flat, np.float64)
    if not np.isfinite(values).all():
        return None
    return values.reshape(rows.num_rows, -1) if nested else values


_COMPUTED: dict[type[Evaluator], Callable[[Any, pa.Table, Floats, Floats], float | None]] = {
    RegressionEvaluator: _regression,
    MulticlassClassificationEvaluator: _classes,
    BinaryClassificationEvaluator: _two_classes,
}


class FoldMetrics:
    """The metrics of each fold and model.

    `metric_of` computes them at once. Where it does not, the evaluator does, in threads; its jobs may have to wait for
    the slots of the ranks.
    """

    def __init__(
        self, evaluator: Evaluator, groups: Sequence[FoldedRows], *, parallelism: int, weight: str | None
    ) -> None:
        """Computes at most `parallelism` metrics at a time; `weight` is the column that `weight_of` returns."""
        self._groups, self._evaluator, self._spark = groups, evaluator, groups[0].dataset.sparkSession
        if weight is not None:
            self._evaluator = evaluator.copy({evaluator.getParam("weightCol"): weight})
        self._pool = ThreadPoolExecutor(parallelism, "sparktorch-metrics")
        self._futures: dict[tuple[int, int], Future[float]] = {}
        self._bytes: dict[Future[float], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> FoldMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Computes a metric of scored rows, or begins to; raises the error of an earlier one.

        It waits while the scores of metrics that are not computed take too much memory.
        """
        value = metric_of(self._evaluator, table)
        if value is not None:
            self._futures[fold, index] = self._pool.submit(float, value)
            return
        kinds, outputs = model._fields()

        def column(name: str) -> Any:
            scores, field = F.col(f"`{name}`"), outputs.get(name)
            if field is None:
                return scores
            typed = to_vector(scores) if kinds[field] == "vector" else scores
            return typed.alias(name, metadata=model._attribute(field, kinds[field]))

        columns = [column(name) for name in table.column_names]
        compute = partial(self._evaluate, table, columns)
        with self._lock:
            future = self._futures[fold, index] = self._pool.submit(inheriting(self._spark, compute))
            self._bytes[future] = table.nbytes
            self._settle(MOST_BYTES)

    def all(self, folds: int, models: int) -> list[list[float]]:
        """Returns the metrics by fold and model once all are there; frees the ranks' slots if there are no others."""
        self._settle(-1)
        return [[self._futures[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _evaluate(self, table: pa.Table, columns: Sequence[Any]) -> float:
        return self._evaluator.evaluate(frame_of_rows(self._spark, table).select(*columns))

    def _settle(self, most: int) -> None:
        """Waits until the scores of missing metrics take at most that many bytes, or, below 0, until there are none."""
        # If the ranks hold all slots, the evaluator's jobs get one only once the ranks free theirs.
        count, slots_held = slots(self._spark), sum(group.slots_held for group in self._groups)
        patience: float | None = _PATIENCE if count is None or count > slots_held else 0.0
        while True:
            for finished in [future for future in self._bytes if future.done()]:
                del self._bytes[finished]
                finished.result()
            if sum(self._bytes.values()) <= most or not self._bytes:
                return
            if not wait(self._bytes, timeout=patience, return_when=FIRST_COMPLETED).done:
                _LOG.info("the evaluator's jobs find no slot: the ranks free theirs, and read the rows again later")
                for group in self._groups:
                    group.let_go()
                patience = None


def columns_of(evaluator: Evaluator) -> list[str]:
    """Returns the columns that an evaluator's Params name."""
    unread = "probabilityCol" if _counts(evaluator) else ""
    params = [param for param in evaluator.params if param.name.endswith("Col") and param.name != unread]
    names = [evaluator.getOrDefault(param) for param in params if evaluator.isDefined(param)]
    return [name for name in names if name]


def results_for(evaluator: Evaluator, model: TorchModelBase) -> dict[str, str]:
    """Returns the results of the scorer that an evaluator reads, with the name of the column of each."""
    read_columns = columns_of(evaluator)
    return {field: name for name, field in model._fields()[1].items() if name in read_columns}


def weight_of(evaluator: Evaluator, carried: Sequence[str]) -> str | None:
    """Returns the column that sums the weights of equal rows, if an evaluator takes them as one row; else `None`."""
    if not _counts(evaluator):
        return None
    if not evaluator.isDefined("weightCol") or not evaluator.getOrDefault("weightCol"):
        return f"{evaluator.uid}_weight"
    weight: str = evaluator.getOrDefault("weightCol")
    return weight if weight in carried and weight != evaluator.getOrDefault("labelCol") else None


def _counts(evaluator: Evaluator) -> bool:
    """Whether an evaluator reads no more than a confusion matrix."""
    return type(evaluator) is MulticlassClassificationEvaluator and evaluator.getOrDefault("metricName") != "logLoss"
