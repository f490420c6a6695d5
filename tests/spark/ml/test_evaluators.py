"""Figures that need scores, by Spark's evaluators and by `evaluate`, are scikit-learn's on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sklearn import metrics as sk

from sparktorch import TorchClassifier, TorchCrossValidator
from sparktorch.ml.tuning.metrics import metric_of
from sparktorch.spark.compat import to_vector
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


def test_a_search_with_the_default_evaluator_chooses_the_model_that_orders_rows_best(rows: DataFrame) -> None:
    search = estimator(TorchClassifier, module=Shifted, moduleParams={"shift": 0.0}, labelCol="two")
    maps = [{search.learningRate: 1e-6}, {search.learningRate: 0.05, search.moduleParams: {"shift": 9.0}}]
    evaluator = BinaryClassificationEvaluator(labelCol="two")
    given = {"estimator": search, "estimatorParamMaps": maps, "evaluator": evaluator, "numFolds": 2, "seed": 7}
    found = TorchCrossValidator(**given).fit(rows)
    assert found.avgMetrics[1] > 0.9 > found.avgMetrics[0]


BY_LABEL = ("truePositiveRate", "falsePositiveRate", "precision", "recall", "fMeasure")
WEIGHTED = ("Precision", "Recall", "TruePositiveRate", "FalsePositiveRate", "FMeasure")
METRICS: list[tuple[Any, dict[str, Any]]] = [
    *((RegressionEvaluator, {"metricName": name}) for name in ("rmse", "mse", "r2", "mae", "var")),
    (RegressionEvaluator, {"metricName": "r2", "throughOrigin": True}),
    *(
        (BinaryClassificationEvaluator, {"metricName": name, "numBins": bins})
        for bins in (0, 7)
        for name in ("areaUnderROC", "areaUnderPR")
    ),
    *(
        (MulticlassClassificationEvaluator, {"metricName": name, "metricLabel": 1.0, "beta": 0.5})
        for name in (
            *("f1", "accuracy", "hammingLoss", "logLoss"),
            *(f"{name}ByLabel" for name in BY_LABEL),
            *(f"weighted{name}" for name in WEIGHTED),
        )
    ),
]


@pytest.mark.parametrize("weighs", [False, True])
def test_a_metric_without_a_job_is_that_of_spark(rows: DataFrame, weighs: bool) -> None:
    random = np.random.default_rng(5)
    label = random.integers(0, 2, 400)
    score = np.round(random.normal(label, 1.0), 2)
    own = 1 / (1 + np.exp(-score))
    table = pa.table(
        {
            "label": label.astype(float),
            "weight": random.integers(0, 4, 400) / 2,
            "prediction": np.where(score > 1.5, 2.0, score > 0.5),
            "rawPrediction": list(np.stack([-score, score], 1)),
            "probability": list(np.stack([1 - own, own, 0 * own], 1)),
        }
    )
    one_partition = rows.sparkSession.createDataFrame(table.to_pandas()).coalesce(1)
    for name in ("rawPrediction", "probability"):
        one_partition = one_partition.withColumn(name, to_vector(F.col(name)))
    data = one_partition.cache()
    for kind, params in METRICS:
        evaluator = kind(**params, **({"weightCol": "weight"} if weighs else {}))
        assert metric_of(evaluator, table) == pytest.approx(evaluator.evaluate(data), rel=1e-9), params
    data.unpersist()


@pytest.mark.parametrize("damage", ["label", "weight", "prediction"])
def test_rows_that_an_evaluator_may_refuse_are_left_to_it(damage: str) -> None:
    columns = {"label": [0.0, 1.0, 1.0], "weight": [1.0, 2.0, 1.0], "prediction": [0.0, 1.0, 0.0]}
    evaluator = MulticlassClassificationEvaluator(weightCol="weight")
    assert metric_of(evaluator, pa.table(columns)) is not None
    columns[damage] = [-1.0 if damage == "weight" else np.nan, 1.0, 1.0]
    assert metric_of(evaluator, pa.table(columns)) is None


@pytest.mark.parametrize("case", ["equal labels", "two zeros", "labels between classes", "a name of no metric"])
@pytest.mark.usefixtures("rows")
def test_figures_in_which_spark_differs_are_left_to_it(case: str) -> None:
    label, score = [0.1] * 3 if case == "equal labels" else [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]
    probability = [[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]]
    evaluator: Any = RegressionEvaluator(metricName="r2")
    if case == "two zeros":
        evaluator, score = BinaryClassificationEvaluator(), [-0.0, 0.0, 1.0]
    elif case == "labels between classes":
        evaluator, label = MulticlassClassificationEvaluator(metricName="logLoss"), [0.0, 0.5, 1.0]
    elif case == "a name of no metric":
        evaluator = BinaryClassificationEvaluator(metricName="areaUnderRoc")  # type: ignore[arg-type]
    columns = {"label": label, "prediction": score, "rawPrediction": score, "probability": probability}
    assert metric_of(evaluator, pa.table(columns)) is None


def test_the_loss_of_certain_rows_is_that_of_spark(rows: DataFrame) -> None:
    table = pa.table({"label": [0.0, 1.0], "probability": [[1.0, 0.0], [0.0, 1.0]]})
    probability = to_vector(F.col("probability")).alias("probability")
    frame = rows.sparkSession.createDataFrame(table.to_pandas())
    data = frame.select("label", F.col("label").alias("prediction"), probability)
    evaluator = MulticlassClassificationEvaluator(metricName="logLoss")
    assert metric_of(evaluator, table) == pytest.approx(evaluator.evaluate(data), rel=1e-9, abs=0)
