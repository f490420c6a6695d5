"""Every figure of Spark's evaluators on the columns of our models is scikit-learn's on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sklearn import metrics as sk

from sparktorch import TorchClassifier, TorchCrossValidator, TorchRegressor
from tests.spark.modules import MLP

# Spark's own CrossValidator leaves its thread pool to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


class Shifted(MLP):
    """Adds the same number to both scores of a row, which changes neither probabilities nor the loss."""

    def __init__(self, shift: float) -> None:
        super().__init__(outputs=2)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift * x[:, :1]


@pytest.fixture(scope="module")
def rows(frame: DataFrame) -> Iterator[DataFrame]:
    data = frame.withColumn("two", (F.col("label") > 0).cast("int")).cache()
    yield data
    data.unpersist()


def estimator(kind: Any, **params: Any) -> Any:
    return kind(**{"module": MLP, "epochs": 2, "batchSize": 64, "progress": False, "seed": 3, **params})


def scored(fitted: Any, rows: DataFrame) -> tuple[DataFrame, dict[str, np.ndarray]]:
    data = fitted.transform(rows).cache()
    columns = data.drop("features").toPandas()
    return data, {name: np.stack([np.asarray(v) for v in columns[name]]) for name in columns}


def assert_equal(evaluator: Any, data: DataFrame, expected: dict[str, float]) -> None:
    found = {name: evaluator.setMetricName(name).evaluate(data) for name in expected}
    data.unpersist()
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_figures_of_classes_are_scikit_learns(rows: DataFrame, outputs: int) -> None:
    label, loss = ("label" if outputs == 3 else "two"), ({"loss": "BCEWithLogitsLoss"} if outputs == 1 else {})
    fitted = estimator(TorchClassifier, moduleParams={"outputs": outputs}, labelCol=label, **loss).fit(rows)
    data, columns = scored(fitted, rows)
    true, said, weight = columns[label], columns["prediction"], columns["weight"]
    one, beta = 1, 2.0

    def by_class(function: Any, average: str | None, **more: Any) -> Any:
        return function(true, said, average=average, sample_weight=weight, **more)

    confusion = sk.multilabel_confusion_matrix(true, said, sample_weight=weight)
    false_positives = confusion[:, 0, 1] / confusion[:, 0].sum(1)
    share = np.bincount(true, weight) / weight.sum()
    expected = {
        "f1": by_class(sk.f1_score, "weighted"),
        "accuracy": sk.accuracy_score(true, said, sample_weight=weight),
        "weightedPrecision": by_class(sk.precision_score, "weighted"),
        "weightedRecall": by_class(sk.recall_score, "weighted"),
        "weightedTruePositiveRate": by_class(sk.recall_score, "weighted"),
        "weightedFalsePositiveRate": false_positives @ share,
        "weightedFMeasure": by_class(sk.fbeta_score, "weighted", beta=beta),
        "truePositiveRateByLabel": by_class(sk.recall_score, None)[one],
        "falsePositiveRateByLabel": false_positives[one],
        "precisionByLabel": by_class(sk.precision_score, None)[one],
        "recallByLabel": by_class(sk.recall_score, None)[one],
        "fMeasureByLabel": by_class(sk.fbeta_score, None, beta=beta)[one],
        "logLoss": sk.log_loss(true, columns["probability"], sample_weight=weight),
        "hammingLoss": sk.hamming_loss(true, said, sample_weight=weight),
    }
    figures = MulticlassClassificationEvaluator(labelCol=label, weightCol="weight", metricLabel=float(one), beta=beta)
    assert_equal(figures, data, expected)
    if outputs == 3:
        return
    score = columns["probability"][:, 1]
    precision, recall, _ = sk.precision_recall_curve(true, score, sample_weight=weight)
    precision[-1] = precision[-2]  # where nothing is found, Spark has the precision of the first row
    expected = {
        "areaUnderROC": sk.roc_auc_score(true, score, sample_weight=weight),
        "areaUnderPR": sk.auc(recall, precision),
    }
    assert_equal(BinaryClassificationEvaluator(labelCol=label, weightCol="weight"), data, expected)
    found = fitted.setWeightCol("weight").evaluate(rows)
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-9)


def test_figures_of_a_regression_are_scikit_learns(rows: DataFrame) -> None:
    data, columns = scored(estimator(TorchRegressor, labelCol="target").fit(rows), rows)
    true, said = columns["target"].astype(float), columns["prediction"]
    expected = {  # without weights: Spark's r2 of weighted rows is another one, as in its own summaries
        "rmse": sk.root_mean_squared_error(true, said),
        "mse": sk.mean_squared_error(true, said),
        "mae": sk.mean_absolute_error(true, said),
        "r2": sk.r2_score(true, said),
        "var": np.mean((said - true.mean()) ** 2),
    }
    assert_equal(RegressionEvaluator(labelCol="target"), data, expected)


@pytest.mark.parametrize("kind", [CrossValidator, TorchCrossValidator])
def test_a_search_with_the_default_evaluator_chooses_the_model_that_orders_rows_best(
    rows: DataFrame, kind: type[CrossValidator]
) -> None:
    search = estimator(TorchClassifier, module=Shifted, moduleParams={"shift": 0.0}, labelCol="two")
    maps = [{search.learningRate: 1e-6}, {search.learningRate: 0.05, search.moduleParams: {"shift": 9.0}}]
    evaluator = BinaryClassificationEvaluator(labelCol="two")
    found = kind(estimator=search, estimatorParamMaps=maps, evaluator=evaluator, numFolds=2, seed=7).fit(rows)
    assert found.avgMetrics[1] > 0.9 > found.avgMetrics[0]
