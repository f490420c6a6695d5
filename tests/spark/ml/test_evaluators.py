"""Figures that need scores, by Spark's evaluators and by `evaluate`, are scikit-learn's on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sklearn import metrics as sk

from sparktorch import TorchClassifier, TorchCrossValidator
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


@pytest.mark.parametrize("outputs", [1, 2])
def test_figures_of_two_classes_are_scikit_learns(rows: DataFrame, outputs: int) -> None:
    loss = {"loss": "BCEWithLogitsLoss"} if outputs == 1 else {}
    fitted = estimator(TorchClassifier, moduleParams={"outputs": outputs}, labelCol="two", **loss).fit(rows)
    data = fitted.transform(rows)
    columns = data.select("two", "weight", "probability").toPandas()
    true, weight, score = columns["two"], columns["weight"], np.stack([row[1] for row in columns["probability"]])
    precision, recall, _ = sk.precision_recall_curve(true, score, sample_weight=weight)
    precision[-1] = precision[-2]  # where nothing is found, Spark has the precision of the first row
    areas = {
        "areaUnderROC": sk.roc_auc_score(true, score, sample_weight=weight),
        "areaUnderPR": sk.auc(recall, precision),
    }
    evaluators: dict[str, Any] = dict.fromkeys(areas, BinaryClassificationEvaluator)
    expected = {**areas, "logLoss": sk.log_loss(true, score, sample_weight=weight)}
    for name, value in expected.items():
        kind = evaluators.get(name, MulticlassClassificationEvaluator)
        found = kind(labelCol="two", weightCol="weight", metricName=name).evaluate(data)
        assert found == pytest.approx(value, rel=1e-9), name
    summary = fitted.setWeightCol("weight").evaluate(rows)
    assert {name: getattr(summary, name) for name in areas} == pytest.approx(areas, rel=1e-9)


@pytest.mark.parametrize("kind", [CrossValidator, TorchCrossValidator])
def test_a_search_with_the_default_evaluator_chooses_the_model_that_orders_rows_best(
    rows: DataFrame, kind: type[CrossValidator]
) -> None:
    search = estimator(TorchClassifier, module=Shifted, moduleParams={"shift": 0.0}, labelCol="two")
    maps = [{search.learningRate: 1e-6}, {search.learningRate: 0.05, search.moduleParams: {"shift": 9.0}}]
    evaluator = BinaryClassificationEvaluator(labelCol="two")
    found = kind(estimator=search, estimatorParamMaps=maps, evaluator=evaluator, numFolds=2, seed=7).fit(rows)
    assert found.avgMetrics[1] > 0.9 > found.avgMetrics[0]
