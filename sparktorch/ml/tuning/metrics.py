"""The metrics of a cross-validation: those of Spark's evaluators of scored rows without a Spark job, and of others."""

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

__all__ = ["Metrics", "columns_of", "metric_of", "results_for", "weight_of"]

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds without a metric, after which the ranks free their slots

Floats = npt.NDArray[np.float64]


def metric_of(evaluator: Evaluator, rows: pa.Table) -> float | None:
    """Returns what an evaluator finds in scored rows, to the rounding of sums; `None` if it has to say that itself.

    So it is for evaluators of other classes, and for rows that it may refuse. Of more scores than bins, the areas under
    curves are those of a DataFrame with one partition.
    """
    compute = _COMPUTED.get(type(evaluator))
    if compute is None:
        return None
    given: Any = evaluator
    weighs = given.isDefined("weightCol") and given.getWeightCol()
    label = _numbers(rows, given.getLabelCol())
    weight = _numbers(rows, weighs) if weighs else np.ones(rows.num_rows)
    if label is None or weight is None or weight.min() < 0 or not weight.sum():
        return None
    return compute(given, rows, label, weight)


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
        else:  # of equal labels, no more than what their mean is rounded by
            around = _spread(label - mean, weight) if label.min() < label.max() else 0.0
        return 1 - float(squares / around) if around else None
    found = {
        "mse": squares / total,
        "rmse": math.sqrt(squares / total),
        "mae": (weight * abs(difference)).sum() / total,
        "var": (weight * (prediction - mean) ** 2).sum() / total,
    }
    return float(found[name]) if name in found else None


def _spread(differences: Floats, weight: Floats) -> float:
    """Returns Spark's sum of squares: the variance for weights that say how reliable a row is, times all but one."""
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
    classes, place = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    true, predicted = place[: len(label)], place[len(label) :]
    counted = ((true, weight), (predicted, weight), (true, weight * (true == predicted)))
    occur = np.isin(classes, label)
    sums = [np.asarray(np.bincount(of, by, len(classes)), np.float64)[occur] for of, by in counted]
    found = Confusion(classes[occur], *sums)
    if not found.true.all():
        return None
    if name.endswith("ByLabel"):
        kind, own = name.removesuffix("ByLabel"), found.labels == evaluator.getMetricLabel()
        values = _by_label(found, kind[:1].upper() + kind[1:], beta)
        return float(values[own][0]) if values is not None and own.any() else None
    if name in ("accuracy", "hammingLoss"):
        return found.accuracy if name == "accuracy" else 1 - found.accuracy
    values = found.f_measure(1.0) if name == "f1" else _by_label(found, name.removeprefix("weighted"), beta)
    return None if values is None else found.mean(values)


def _by_label(confusion: Confusion, metric: str, beta: float) -> Floats | None:
    """Returns a metric of each label, `None` if it is not one of those that Spark has by label."""
    if metric in ("Recall", "TruePositiveRate"):
        return confusion.recall
    if metric == "FalsePositiveRate":
        return confusion.false_positives
    if metric == "Precision":
        return confusion.precision
    return confusion.f_measure(beta) if metric == "FMeasure" else None


def _log_loss(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    scores = _numbers(rows, evaluator.getProbabilityCol())
    if scores is None or scores.ndim != 2 or label.min() < 0 or label.max() >= scores.shape[1]:
        return None
    if (label % 1).any():  # which are no classes
        return None
    least = evaluator.getEps()
    own = scores[np.arange(len(label)), label.astype(np.int64)]
    losses = np.where(own > 1 - least, -np.log1p(-least), -np.log(np.maximum(own, least)))
    return float((weight * losses).sum() / weight.sum())


def _two_classes(evaluator: Any, rows: pa.Table, label: Floats, weight: Floats) -> float | None:
    score = _numbers(rows, evaluator.getRawPredictionCol())
    if score is None or (score.ndim > 1 and score.shape[1] != 2):
        return None
    score = score if score.ndim == 1 else score[:, 1]
    if len(np.unique(np.signbit(score[score == 0]))) == 2:  # Spark orders -0.0 before 0.0
        return None
    falling, place = np.unique(-score, return_inverse=True)
    positive = label > 0.5
    right, wrong = (np.bincount(place, weight * of, len(falling)) for of in (positive, ~positive))
    bins = evaluator.getNumBins()
    together = len(falling) // bins if bins else 0
    if together > 1:
        starts = np.arange(0, len(falling), together)
        right, wrong = np.add.reduceat(right, starts), np.add.reduceat(wrong, starts)
    right, wrong = right.cumsum(), wrong.cumsum()
    if not right[-1] or not wrong[-1]:
        return None
    start, found = np.zeros(1), right / right[-1]
    name = evaluator.getMetricName()
    if name not in ("areaUnderROC", "areaUnderPR"):
        return None
    if name == "areaUnderROC":
        return _area(np.concatenate([start, wrong / wrong[-1]]), np.concatenate([start, found]))
    both = right + wrong
    precision = np.divide(right, both, out=np.ones_like(both), where=both > 0)
    return _area(np.concatenate([start, found]), np.concatenate([precision[:1], precision]))


def _area(x: Floats, y: Floats) -> float:
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


def _numbers(rows: pa.Table, name: str) -> Floats | None:
    """Returns a column, of shape `(rows,)` or `(rows, elements)`; `None` if it is not there, or not finite."""
    if name not in rows.column_names or not rows.num_rows:
        return None
    column = rows[name].combine_chunks()
    nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    flat = column.flatten() if nested else column
    if len(flat) % rows.num_rows or not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        return None
    found = np.asarray(flat, np.float64)
    if not np.isfinite(found).all():
        return None
    return found.reshape(rows.num_rows, -1) if nested else found


_COMPUTED: dict[type[Evaluator], Callable[[Any, pa.Table, Floats, Floats], float | None]] = {
    RegressionEvaluator: _regression,
    MulticlassClassificationEvaluator: _classes,
    BinaryClassificationEvaluator: _two_classes,
}


class Metrics:
    """Metrics: computed at once, or by the evaluator, in threads, whose jobs may have to wait for the ranks' slots."""

    def __init__(
        self, evaluator: Evaluator, groups: Sequence[FoldedRows], *, parallelism: int, weight: str | None
    ) -> None:
        """Takes at most `parallelism` metrics at a time; `weight` is what `weight_of` says."""
        self._groups, self._evaluator, self._spark = groups, evaluator, groups[0].dataset.sparkSession
        if weight is not None:
            self._evaluator = evaluator.copy({evaluator.getParam("weightCol"): weight})
        self._pool = ThreadPoolExecutor(parallelism, "sparktorch-metrics")
        self._found: dict[tuple[int, int], Future[float]] = {}
        self._bytes: dict[Future[float], int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, fold: int, index: int, model: TorchModelBase, table: pa.Table) -> None:
        """Begins to compute a metric of scored rows, if it is not known at once; raises the error of an earlier one.

        Waits if many are left.
        """
        value = metric_of(self._evaluator, table)
        if value is not None:
            self._found[fold, index] = self._pool.submit(float, value)
            return
        kinds, outputs = model._fields()

        def column(name: str) -> Any:
            found, field = F.col(f"`{name}`"), outputs.get(name)
            if field is None:
                return found
            shown = to_vector(found) if kinds[field] == "vector" else found
            return shown.alias(name, metadata=model._attribute(field, kinds[field]))

        columns = [column(name) for name in table.column_names]
        compute = partial(self._evaluate, table, columns)
        with self._lock:
            future = self._found[fold, index] = self._pool.submit(inheriting(self._spark, compute))
            self._bytes[future] = table.nbytes
            self._settle(MOST_BYTES)

    def all(self, folds: int, models: int) -> list[list[float]]:
        """Waits for the metrics, by fold and model; frees the slots of the ranks if there are no others."""
        self._settle(-1)
        return [[self._found[fold, index].result() for index in range(models)] for fold in range(folds)]

    def _evaluate(self, table: pa.Table, columns: Sequence[Any]) -> float:
        return self._evaluator.evaluate(frame_of_rows(self._spark, table).select(*columns))

    def _settle(self, most: int) -> None:
        """Waits until the scores of missing metrics take at most that many bytes, or, below 0, until there are none."""
        count, held = slots(self._spark), sum(group.slots_held for group in self._groups)
        patience: float | None = _PATIENCE if count is None or count > held else 0.0
        while True:
            for done in [future for future in self._bytes if future.done()]:
                del self._bytes[done]
                done.result()
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
    named = [param for param in evaluator.params if param.name.endswith("Col") and param.name != unread]
    return [name for param in named if evaluator.isDefined(param) and (name := evaluator.getOrDefault(param))]


def results_for(evaluator: Evaluator, model: TorchModelBase) -> dict[str, str]:
    """Returns the results of the scorer that an evaluator reads, with the name of the column of each."""
    read = columns_of(evaluator)
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
