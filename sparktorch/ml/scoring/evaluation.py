"""Evaluates a fitted model: the metrics of Spark's own summaries, under the same names.

The rows are scored once. A classifier's metrics come from its confusion matrix, which one aggregation counts. With many
classes, the metrics come from the sums over the matrix's rows and columns. Spark's evaluators compute the areas under
curves and the metrics of regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pyspark.ml.evaluation import BinaryClassificationEvaluator, RegressionEvaluator
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from sparktorch.errors import ColumnError, counted
from sparktorch.ml.params.mixins import ClassificationModelParams, RegressionModelParams
from sparktorch.ml.scoring import figures
from sparktorch.ml.scoring.column_metadata import class_index
from sparktorch.ml.scoring.comparison import Summary, Transform, compared, described, totals
from sparktorch.spark.column_names import ColumnNames, quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BinaryClassificationSummary",
    "ClassificationSummary",
    "Confusion",
    "RegressionSummary",
    "evaluate_classifier",
    "evaluate_regressor",
    "no_class",
]

_MATRIX_CLASSES = 500  # Up to this many classes, the confusion matrix comes to the driver unasked.
# All labels that are no class count as the class -1: a column of identifiers would have too many for the driver.
_UNKNOWN = -1.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Confusion:
    """The sums of a confusion matrix for each class that occurs as a label.

    Attributes:
        labels: The classes, in ascending order.
        true: For each class, the weight of the rows with this label.
        predicted: For each class, the weight of the rows with this prediction.
        hits: For each class, the weight of the rows with both.
    """

    labels: npt.NDArray[Any]
    true: Floats
    predicted: Floats
    hits: Floats

    @property
    def accuracy(self) -> float:
        """The share of rows that are predicted correctly."""
        return float(self.hits.sum() / self.true.sum())

    @property
    def recall(self) -> Floats:
        """For each class, the share of its rows that are predicted as this class."""
        return _ratio(self.hits, self.true)

    @property
    def precision(self) -> Floats:
        """For each class, the share of its predictions that are correct; 0 if it is never predicted."""
        return np.nan_to_num(_ratio(self.hits, self.predicted), nan=0.0)

    @property
    def false_positives(self) -> Floats:
        """For each class, the share of other rows that are predicted as this class; NaN if there are none."""
        return _ratio(self.predicted - self.hits, self.true.sum() - self.true)

    def f_measure(self, beta: float) -> Floats:
        """For each class: the harmonic mean of precision and recall; `beta` is the weight of recall."""
        precision = self.precision
        recall = self.recall
        measure = _ratio((1 + beta**2) * precision * recall, beta**2 * precision + recall)
        return np.nan_to_num(measure, nan=0.0)

    def mean(self, by_label: Floats) -> float:
        """Returns the mean of a metric by label, weighted by class frequency."""
        return float((by_label * self.true).sum() / self.true.sum())


def _ratio(part: Floats, whole: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(part / whole)


@dataclass(frozen=True, kw_only=True, repr=False)
class ClassificationSummary(Summary):
    """A classifier's metrics. Metrics by label are in the order of `labels`.

    Attributes:
        numClasses: Number of classes of the model.
    """

    numClasses: int
    _names: Sequence[str] = ()  # The classes may have names.
    _confusion: Confusion
    _cells: Callable[[], list[Row]]  # This function returns the cells of the confusion matrix that have rows.

    _main_metrics: ClassVar[tuple[str, ...]] = (
        *Summary._main_metrics,
        "accuracy",
        "weightedPrecision",
        "weightedRecall",
    )

    def plotConfusion(self) -> Figure:
        """Draws `confusionMatrix`, with the names of the classes if they have any.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        return figures.confusion_matrix(self.confusionMatrix, self._names)

    @property
    def labels(self) -> list[float]:
        """The classes that occur as labels, in ascending order."""
        return list(map(float, self._confusion.labels))

    @property
    def confusionMatrix(self) -> list[list[float]]:
        """The weight of the rows of class `i` (row) that are predicted as class `j` (column).

        With more than 500 classes, the matrix is counted when it is asked for, which scores the rows again.
        """
        matrix = np.zeros((self.numClasses, self.numClasses))
        for cell in self._cells():
            matrix[int(cell["class"]), int(cell["prediction"])] = cell["weight"]
        return [list(map(float, row)) for row in matrix]

    @property
    def accuracy(self) -> float:
        """The share of rows that are predicted correctly."""
        return self._confusion.accuracy

    @property
    def truePositiveRateByLabel(self) -> list[float]:
        """For each class, the share of its rows that are predicted as this class."""
        return list(map(float, self._confusion.recall))

    @property
    def falsePositiveRateByLabel(self) -> list[float]:
        """For each class, the share of other rows that are predicted as this class; NaN if there are none."""
        return list(map(float, self._confusion.false_positives))

    @property
    def precisionByLabel(self) -> list[float]:
        """For each class, the share of its predictions that are correct; 0 if it is never predicted."""
        return list(map(float, self._confusion.precision))

    @property
    def recallByLabel(self) -> list[float]:
        """Same as `truePositiveRateByLabel`."""
        return list(map(float, self._confusion.recall))

    def fMeasureByLabel(self, beta: float = 1.0) -> list[float]:
        """For each class: the harmonic mean of precision and recall; `beta` is the weight of recall."""
        return list(map(float, self._confusion.f_measure(beta)))

    @property
    def weightedTruePositiveRate(self) -> float:
        """The mean of the true positive rates, weighted by class frequency."""
        return self._confusion.mean(self._confusion.recall)

    @property
    def weightedFalsePositiveRate(self) -> float:
        """The mean of the false positive rates, weighted by class frequency."""
        return self._confusion.mean(self._confusion.false_positives)

    @property
    def weightedPrecision(self) -> float:
        """The mean of the precisions, weighted by class frequency."""
        return self._confusion.mean(self._confusion.precision)

    @property
    def weightedRecall(self) -> float:
        """The mean of the recalls, weighted by class frequency."""
        return self._confusion.mean(self._confusion.recall)

    def weightedFMeasure(self, beta: float = 1.0) -> float:
        """The mean of the F-measures, weighted by class frequency."""
        return self._confusion.mean(self._confusion.f_measure(beta))


@dataclass(frozen=True, kw_only=True, repr=False)
class BinaryClassificationSummary(ClassificationSummary):
    """The metrics of a binary classifier.

    Attributes:
        scoreCol: The column of probabilities in `predictions`.
        areaUnderROC: The area under the receiver operating characteristic, as `BinaryClassificationEvaluator`
            computes it.
        areaUnderPR: The area under the curve of precision over recall.
    """

    scoreCol: str
    areaUnderROC: float
    areaUnderPR: float

    _main_metrics: ClassVar[tuple[str, ...]] = (*ClassificationSummary._main_metrics, "areaUnderROC", "areaUnderPR")


@dataclass(frozen=True, kw_only=True, repr=False)
class RegressionSummary(Summary):
    """The metrics of a regressor, as `RegressionEvaluator` computes them.

    Attributes:
        meanSquaredError: The mean of the squared differences.
        meanAbsoluteError: The mean of the absolute differences.
        r2: The coefficient of determination.
        explainedVariance: The variance of the predictions around the mean of the true values.
    """

    meanSquaredError: float
    meanAbsoluteError: float
    r2: float
    explainedVariance: float

    _main_metrics: ClassVar[tuple[str, ...]] = (
        *Summary._main_metrics,
        "rootMeanSquaredError",
        "meanAbsoluteError",
        "r2",
    )

    @property
    def rootMeanSquaredError(self) -> float:
        """The root of the mean of the squared differences."""
        return math.sqrt(self.meanSquaredError)

    @property
    def residuals(self) -> DataFrame:
        """The differences, true value - prediction, as a column `residuals`."""
        label = ColumnNames.of(self.predictions).column(self.labelCol)
        return self.predictions.select((label - quoted(self.predictionCol)).alias("residuals"))


def evaluate_classifier(
    model: ClassificationModelParams,
    transform: Transform,
    dataset: DataFrame,
    *,
    classes: int,
    names: Sequence[str] = (),
) -> ClassificationSummary:
    """Scores the rows and compares the predictions with the labels.

    All output columns of the model must have names. `names` are the names of the classes, if they have any.

    A `ColumnError` refuses columns that are missing or not numeric, and rows without weight or prediction, or with a
    label that is not a class of the model.
    """
    column = model.getLabelCol()
    index = class_index(dataset, column, names)
    original_label = ColumnNames.of(dataset).column(column).alias("original_label")
    binary = classes == 2
    many = classes > _MATRIX_CLASSES
    score = [quoted(model.getProbabilityCol()).alias("score")] if binary else []
    label = F.col("label")
    is_class = label.isNull() | ((label >= 0) & (label < classes) & (label == F.rint(label)))
    class_of = F.when(is_class, label).otherwise(_UNKNOWN).alias("class")
    hits = F.sum(F.when(label == F.col("prediction"), F.col("weight")).otherwise(0.0)).alias("hits")
    sums = [*totals(), hits, F.min("original_label").alias("least")]
    more = [original_label, *score]
    with compared(model, transform, dataset, *more, persisted=binary or many, label=index) as (predictions, rows):
        cells = rows.groupBy(class_of, "prediction").agg(*sums)
        # Many classes have too many cells for the driver, which then gets sums by label and by prediction.
        groups = (rows.groupBy(class_of).agg(*sums) if many else cells).collect()
        fields = described(model, predictions, groups)
        unknown = [group for group in groups if group["class"] == _UNKNOWN]
        if unknown:
            least = min(group["least"] for group in unknown)
            count = sum(group["rows"] for group in unknown)
            raise no_class(least, count, classes, column, names)
        by_prediction = rows.groupBy("prediction").agg(*totals()).collect() if many else groups
        labels = np.unique(_values(groups, "class").astype(np.int64))
        fields["_confusion"] = Confusion(
            labels=labels,
            true=_sums_by_class(groups, "class", "weight", classes)[labels],
            predicted=_sums_by_class(by_prediction, "prediction", "weight", classes)[labels],
            hits=_sums_by_class(groups, "class", "hits", classes)[labels],
        )
        fields |= {"numClasses": classes, "_names": names, "_cells": cells.collect if many else partial(list, groups)}
        if not binary:
            return ClassificationSummary(**fields)
        areas = BinaryClassificationEvaluator(rawPredictionCol="score", weightCol="weight")
        return BinaryClassificationSummary(
            **fields,
            scoreCol=model.getProbabilityCol(),
            areaUnderROC=areas.setMetricName("areaUnderROC").evaluate(rows),
            areaUnderPR=areas.setMetricName("areaUnderPR").evaluate(rows),
        )


def evaluate_regressor(model: RegressionModelParams, transform: Transform, dataset: DataFrame) -> RegressionSummary:
    """Scores the rows and compares the predictions with the labels; the output column has a name, and holds numbers."""
    with compared(model, transform, dataset, persisted=True) as (predictions, rows):
        fields = described(model, predictions, rows.agg(*totals()).collect())
        evaluator = RegressionEvaluator(weightCol="weight")
        return RegressionSummary(
            **fields,
            meanSquaredError=evaluator.setMetricName("mse").evaluate(rows),
            meanAbsoluteError=evaluator.setMetricName("mae").evaluate(rows),
            r2=evaluator.setMetricName("r2").evaluate(rows),
            explainedVariance=evaluator.setMetricName("var").evaluate(rows),
        )


def _values(groups: list[Row], name: str) -> Floats:
    return np.array([group[name] for group in groups], np.float64)


def _sums_by_class(groups: list[Row], key: str, name: str, classes: int) -> Floats:
    """Returns, for each class, the sum of the column `name` over the groups whose column `key` has the class."""
    index = _values(groups, key).astype(np.int64)
    return np.asarray(np.bincount(index, _values(groups, name), classes), np.float64)


def no_class(label: Any, rows: int, classes: int, column: str, labels: Sequence[str]) -> ColumnError:
    """Returns the error for rows whose label is not a class of the model; `labels` are the names of the classes.

    `label` is the label in one of these rows, or `None` for a string that is not at hand.
    """
    if isinstance(label, int | float):
        value = f"{label:g}"
        hint = "index the labels as they were for fit"
    else:
        value = "another label" if label is None else repr(label)
        hint = "leave out rows with labels that fit did not see"
    names = f" ({', '.join(labels)})" if labels else ""
    return ColumnError(
        f"column {column!r} holds {value}, and the model knows the classes "
        f"0 ... {classes - 1}{names}: {counted(rows, 'row has', 'rows have')} no label of its",
        hint=hint,
        column=column,
        code="ST-LABEL-RANGE",
    )
