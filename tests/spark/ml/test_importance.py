"""How much a column matters: the drop of a metric when its values are shuffled among rows, as scikit-learn has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.inspection import permutation_importance
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score, root_mean_squared_error
from torch import nn

from sparktorch import TabularClassifier, TorchClassificationModel, TorchRegressionModel
from sparktorch.errors import ColumnError, ConfigError
from tests.support.sessions import settings

ROWS, REPEATS = 2000, 8


def table() -> pd.DataFrame:
    """Rows in the order of `distance`, as files often are in some order."""
    draw = np.random.default_rng(4)
    distance, seats = np.sort(draw.normal(size=ROWS)), draw.normal(size=ROWS)
    carrier = draw.choice(["AA", "DL"], ROWS)
    late = distance + 0.5 * seats + (carrier == "DL") + 0.5 * draw.normal(size=ROWS) > 0.8
    return pd.DataFrame(
        {
            "distance": distance,
            "seats": np.where(draw.random(ROWS) < 0.1, np.nan, seats),
            "carrier": carrier,
            "arrival": np.where(late, "late", "on time"),
            "share": draw.uniform(0.1, 2.0, ROWS),
        }
    )


@pytest.fixture(scope="module")
def flights(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataFrame]:
    path = str(tmp_path_factory.mktemp("flights") / "rows.parquet")
    table().to_parquet(path)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "250")
    yield spark.read.parquet(path)
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def counting(rows: DataFrame) -> tuple[DataFrame, Any]:
    """Returns rows that are counted when they are read, and the count."""
    count = rows.sparkSession.sparkContext.accumulator(0)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            count.add(batch.num_rows)
            yield batch

    return rows.mapInArrow(read, rows.schema), count


def test_a_classifiers_importance_is_scikit_learns_within_noise_and_reads_the_rows_once(flights: DataFrame) -> None:
    chosen: dict[str, Any] = {"batchSize": 50, "learningRate": 0.01, "seed": 1, "progress": False}
    model = TabularClassifier(labelCol="arrival", weightCol="share", epochs=2, **chosen).fit(flights)
    rows, prepare, module = table(), model.trained.preprocess, model.module
    assert prepare is not None

    class Fitted:
        def fit(self) -> None: ...

        def scores(self, inputs: pd.DataFrame) -> Any:
            columns = {name: pa.array(inputs[name], from_pandas=True) for name in inputs}
            with torch.no_grad():
                return module(**prepare(columns, epoch=None, generator=None)).diff(dim=1).squeeze(1).numpy()

    def auc(fitted: Any, inputs: pd.DataFrame, labels: Any, sample_weight: Any) -> float:
        return float(roc_auc_score(labels, fitted.scores(inputs), sample_weight=sample_weight))

    def accuracy(fitted: Any, inputs: pd.DataFrame, labels: Any, sample_weight: Any) -> float:
        return float(accuracy_score(labels, fitted.scores(inputs) > 0, sample_weight=sample_weight))

    inputs, labels = rows[["distance", "seats", "carrier"]], rows["arrival"] == "on time"
    read, count = counting(flights)
    for metric, scoring in ((None, auc), ("accuracy", accuracy)):
        found = model.importance(read, metric, repeats=REPEATS)
        by_sklearn = permutation_importance(
            Fitted(), inputs, labels, scoring=scoring, n_repeats=REPEATS, random_state=0, sample_weight=rows["share"]
        )
        expected = pd.Series(by_sklearn.importances_mean, inputs.columns).sort_values(ascending=False)
        noise = by_sklearn.importances_std.max()
        assert list(found["column"]) == list(expected.index)
        np.testing.assert_allclose(found["importance"], expected, atol=3 * noise)
        assert 0 < found["deviation"].max() < 4 * noise
    assert count.value == 2 * ROWS
    assert model.importance(flights, repeats=2, seed=5).equals(model.importance(flights, repeats=2, seed=5))
    with pytest.raises(ConfigError, match="accuracy, areaUnderROC"):
        model.importance(flights, "areaUnder")
    with pytest.raises(ColumnError, match="no column 'seats'"):
        model.importance(flights.drop("seats"))


def test_a_regressors_errors_grow_as_the_weights_of_its_columns_say(spark: SparkSession, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    inputs = pd.DataFrame(draw.normal(size=(ROWS, 3)), columns=["a", "b.c", "unused"])
    label = inputs["a"] * 2 - inputs["b.c"] + draw.normal(size=ROWS)
    inputs.assign(label=label).to_parquet(str(tmp_path / "rows.parquet"))
    rows = spark.read.parquet(str(tmp_path / "rows.parquet"))
    net = nn.Linear(3, 1)
    net.weight.data, net.bias.data = torch.tensor([[2.0, -1.0, 0.0]]), torch.zeros(1)
    named = {"inputCols": ["a", "`b.c`", "unused"], "assembleInputs": True, "predictionCol": ""}
    model = TorchRegressionModel.fromModule(net, rows, **named)

    found = model.importance(rows, "meanSquaredError", repeats=REPEATS).set_index("column")
    assert list(found.index) == ["a", "`b.c`", "unused"]
    # The difference of two independent draws has twice the variance.
    np.testing.assert_allclose(found["importance"], [8.0, 2.0, 0.0], rtol=0.1)
    assert tuple(found.loc["unused"]) == (0.0, 0.0)

    class Fitted:
        def fit(self) -> None: ...

        def predict(self, given: pd.DataFrame) -> Any:
            return given["a"] * 2 - given["b.c"]

    scorers = {
        "r2": lambda fitted, x, y: r2_score(y, fitted.predict(x)),
        "rootMeanSquaredError": lambda fitted, x, y: -root_mean_squared_error(y, fitted.predict(x)),
        "meanAbsoluteError": lambda fitted, x, y: -np.abs(y - fitted.predict(x)).mean(),
    }
    for metric, scoring in scorers.items():
        shuffled = permutation_importance(Fitted(), inputs, label, scoring=scoring, n_repeats=REPEATS, random_state=0)
        importance = model.importance(rows, metric, repeats=REPEATS)["importance"]
        np.testing.assert_allclose(importance, shuffled.importances_mean, atol=3 * shuffled.importances_std.max())


class Double(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double())


def linear(weights: list[list[float]], bias: list[float]) -> nn.Module:
    """A layer of two columns, in double."""
    net = Double(2, len(weights), dtype=torch.float64)
    net.weight.data, net.bias.data = torch.tensor(weights).double(), torch.tensor(bias).double()
    return net


def two_columns(spark: SparkSession, path: Path) -> DataFrame:
    draw = np.random.default_rng(1)
    rows = pd.DataFrame(draw.normal(size=(400, 2)), columns=["a", "b"])
    noisy = rows["a"] + draw.normal(size=400)
    rows.assign(label=(noisy > 0) * 1.0, time=1.7e9 + noisy, same=1.0, none=0.0).to_parquet(str(path / "rows.parquet"))
    return spark.read.parquet(str(path / "rows.parquet"))


NAMED: dict[str, Any] = {"inputCols": ["a", "b"], "assembleInputs": True}


def test_scores_that_are_close_or_large_are_ordered_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    rows = two_columns(spark, tmp_path)
    found = []
    for scale, bias in ((1.0, 0.0), (1e-4, 0.0), (1.0, 60.0)):
        net = linear([[-scale, 0.0], [scale, 0.0]], [-bias, bias])
        model = TorchClassificationModel.fromModule(net, rows, **NAMED)
        found.append(model.importance(rows, repeats=2).set_index("column")["importance"])
    assert found[0]["a"] > 0.15
    for others in found[1:]:
        np.testing.assert_allclose(others, found[0], atol=1e-9)


def test_r2_of_labels_far_from_zero_is_scikit_learns(spark: SparkSession, tmp_path: Path) -> None:
    rows = two_columns(spark, tmp_path)
    model = TorchRegressionModel.fromModule(linear([[1.0, 0.0]], [1.7e9]), rows, labelCol="time", **NAMED)
    table = rows.toPandas()
    deviation = table["time"].var(ddof=0)
    for metric in ("r2", "meanSquaredError"):
        found = model.importance(rows, metric, repeats=2, seed=1).set_index("column")["importance"]
        expected = 2 * table["a"].var() / (deviation if metric == "r2" else 1.0)
        np.testing.assert_allclose(found["a"], expected, rtol=0.2)


def test_labels_without_a_metric_and_those_that_are_no_class_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    rows = two_columns(spark, tmp_path)
    net = linear([[-1.0, 0.0], [1.0, 0.0]], [0.0, 0.0])
    model = TorchClassificationModel.fromModule(net, rows, **NAMED)
    unseen = rows.selectExpr("a", "b", "if(b > 1, -1.0, label) as label")
    for metric in ("areaUnderROC", "accuracy"):
        with pytest.raises(ColumnError, match=r"'label' holds -1, and the model knows the classes 0 \.\.\. 1"):
            model.importance(unseen, metric)
    with pytest.raises(ColumnError, match="all rows have the same label"):
        model.importance(rows.where("label = 1"))
    with pytest.raises(ColumnError, match="all rows have the weight 0"):
        model.copy({model.weightCol: "none"}).importance(rows)
    regressor = TorchRegressionModel.fromModule(linear([[1.0, 0.0]], [0.0]), rows, labelCol="same", **NAMED)
    with pytest.raises(ColumnError, match="all rows have the same label"):
        regressor.importance(rows)


def test_few_rows_are_shuffled_among_all_where_spark_joins_no_partitions(spark: SparkSession, tmp_path: Path) -> None:
    rows = two_columns(spark, tmp_path)
    model = TorchRegressionModel.fromModule(linear([[1.0, 0.0]], [0.0]), rows, labelCol="a", **NAMED)
    with settings(spark, {"spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "300"}):
        found = model.importance(rows, "meanSquaredError", repeats=2).set_index("column")["importance"]
    np.testing.assert_allclose(found["a"], 2.0, rtol=0.25)
