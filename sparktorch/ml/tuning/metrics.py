"""The metrics of a cross-validation: for Spark's evaluators by NumPy, and for other evaluators by Spark jobs."""

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
_PATIENCE = 30.0  # If the evaluator's jobs end no metric in so many seconds, the ranks free their slots.

Floats = npt.NDArray[np.float64]


def metric_of(evaluator: Evaluator, rows: pa.Table) -> float | None:
    """Returns an evaluator's metric over scored rows, up to the rounding of sums; `None` if only a job can compute it.

    Only a job can compute the metrics of other evaluators than Spark's, and metrics over rows that the evaluator may
    refuse. If there are more scores than bins, the areas under curves are as over a DataFrame with one partition.
    """
    compute = _COMPUTED.get(type(evaluator))
    if compute is None:
        return None
    spark_evaluator: Any = evaluator
    weight_column = spark_evaluator.getWeightCol() if spark_evaluator.isDefined("weightCol") else ""
    label = _numbers(rows, spark_evaluator.getLabelCol())
    weight = _numbers(rows, weight_column) if weight_column else np.ones(rows.num_rows)
    if label is None or weight is None or weight.min() < 0 or not weight.sum():
        return None
    return compute(spark_evaluator, rows, label, weight)


def _regression(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    prediction = _numbers(rows, evaluator.getPredictionCol())
    if prediction is None or prediction.ndim > 1:
        return None
    total = weight.sum()
    difference = label - prediction
    squares = (weight * difference**2).sum()
    mean = (weight * label).sum() / total
    name = evaluator.getMetricName()
    if name == "r2":
        if evaluator.getThroughOrigin():
            spread = (weight * label**2).sum()
        elif label.min() < label.max():
            spread = _spread(label - mean, weight)
        else:  # The mean of equal labels differs from them by its rounding, which is no spread.
            spread = 0.0
        return 1 - float(squares / spread) if spread else None
    values = {
        "mse": squares / total,
        "rmse": math.sqrt(squares / total),
        "mae": (weight * abs(difference)).sum() / total,
        "var": (weight * (prediction - mean) ** 2).sum() / total,
    }
    return float(values[name]) if name in values else None


def _spread(differences: Floats, weight: Floats) -> float:
    """Returns the weighted sum of squares as Spark computes it.

    Spark multiplies the unbiased variance, whose weights say how reliable a row is, by the total weight minus one.
    """
    total = weight.sum()
    degrees_of_freedom = total - (weight**2).sum() / total
    if degrees_of_freedom <= 0:
        return 0.0
    return float((weight * differences**2).sum() / degrees_of_freedom * (total - 1))


def _classes(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    name = evaluator.getMetricName()
    beta = evaluator.getBeta()
    if name == "logLoss":
        return _log_loss(evaluator, rows, label, weight)
    prediction = _numbers(rows, evaluator.getPredictionCol())
    if prediction is None or prediction.ndim > 1:
        return None
    classes, class_index = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    true = class_index[: len(label)]
    predicted = class_index[len(label) :]
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
    """Returns the metric whose name has the stem `kind`, for each class; `None` if there is no such metric."""
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
    descending, threshold_index = np.unique(-score, return_inverse=True)
    thresholds = len(descending)
    is_positive = label > 0.5
    # The weight of the rows whose score is the threshold, by threshold from the highest one.
    positives = np.bincount(threshold_index, weight * is_positive, thresholds)
    negatives = np.bincount(threshold_index, weight * ~is_positive, thresholds)
    bins = evaluator.getNumBins()
    thresholds_per_bin = thresholds // bins if bins else 0
    if thresholds_per_bin > 1:
        starts = np.arange(0, thresholds, thresholds_per_bin)
        positives = np.add.reduceat(positives, starts)
        negatives = np.add.reduceat(negatives, starts)
    # Rows at or above a threshold are predicted as positive.
    true_positives = positives.cumsum()
    false_positives = negatives.cumsum()
    if not true_positives[-1] or not false_positives[-1]:
        return None
    name = evaluator.getMetricName()
    if name not in ("areaUnderROC", "areaUnderPR"):
        return None
    start = np.zeros(1)
    recall = np.concatenate([start, true_positives / true_positives[-1]])
    if name == "areaUnderROC":
        return _area(np.concatenate([start, false_positives / false_positives[-1]]), recall)
    predicted = true_positives + false_positives
    precision = np.divide(true_positives, predicted, out=np.ones_like(predicted), where=predicted > 0)
    return _area(recall, np.concatenate([precision[:1], precision]))


def _area(x: Floats, y: Floats) -> float:
    """Returns the area under a curve, by the trapezoidal rule."""
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


def _numbers(rows: pa.Table, name: str) -> Floats | None:
    """Returns a column, of shape `(rows,)` or `(rows, elements)`; `None` if it is missing, no number, or not finite."""
    if name not in rows.column_names or not rows.num_rows:
        return None
    column = rows[name].combine_chunks()
    is_nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    flat = column.flatten() if is_nested else column
    if len(flat) % rows.num_rows or not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        return None
    values = np.asarray(flat, np.float64)
    if not np.isfinite(values).all():
        return None
    return values.reshape(rows.num_rows, -1) if is_nested else values


_COMPUTED: dict[type[Evaluator], Callable[[Any, pa.Table, Floats, Floats], float | None]] = {
    RegressionEvaluator: _regression,
    MulticlassClassificationEvaluator: _classes,
    BinaryClassificationEvaluator: _two_classes,
}


class FoldMetrics:
    """The metrics of each fold and model.

    `metric_of` computes most metrics at once. The evaluator computes the others, in threads, by jobs that may have to
    wait until the ranks free their slots. `add` is called for each fold and model, and `all` at the end.
    """

    def __init__(
        self, evaluator: Evaluator, groups: Sequence[FoldedRows], *, parallelism: int, weight: str | None
    ) -> None:
        """Computes at most `parallelism` metrics at a time; `weight` is the column that `weight_of` returns."""
        self._groups = groups
        self._evaluator = evaluator
        self._spark = groups[0].dataset.sparkSession
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
        """Computes a metric over scored rows, or begins to; raises the error of an earlier metric.

        It waits while the scores of metrics that are still to be computed take too much memory.
        """
        value = metric_of(self._evaluator, table)
        if value is not None:
            self._futures[fold, index] = self._pool.submit(float, value)
            return
        kinds, outputs = model._fields()

        def column(name: str) -> Any:
            scores = F.col(f"`{name}`")
            field = outputs.get(name)
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
        """Returns the metrics by fold and model once all are computed; ranks that hold all slots free their slots."""
        self._settle(-1)
        return [[self._futures[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _evaluate(self, table: pa.Table, columns: Sequence[Any]) -> float:
        return self._evaluator.evaluate(frame_of_rows(self._spark, table).select(*columns))

    def _settle(self, most: int) -> None:
        """Waits until the scores of missing metrics take at most `most` bytes; with -1, until no metric is missing."""
        # If the ranks hold all slots, the evaluator's jobs get a slot only once the ranks free theirs.
        count = slots(self._spark)
        held = sum(group.slots_held for group in self._groups)
        patience: float | None = _PATIENCE if count is None or count > held else 0.0
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
    """Returns the scorer's results that an evaluator reads, each with the name of its column."""
    read = columns_of(evaluator)
    return {field: name for name, field in model._fields()[1].items() if name in read}


def weight_of(evaluator: Evaluator, carried: Sequence[str]) -> str | None:
    """Returns the column for the summed weights of equal rows; `None` if an evaluator does not take them as one row."""
    if not _counts(evaluator):
        return None
    if not evaluator.isDefined("weightCol") or not evaluator.getOrDefault("weightCol"):
        return f"{evaluator.uid}_weight"
    weight: str = evaluator.getOrDefault("weightCol")
    return weight if weight in carried and weight != evaluator.getOrDefault("labelCol") else None


def _counts(evaluator: Evaluator) -> bool:
    """Whether an evaluator reads no more than a confusion matrix."""
    return type(evaluator) is MulticlassClassificationEvaluator and evaluator.getOrDefault("metricName") != "logLoss"
