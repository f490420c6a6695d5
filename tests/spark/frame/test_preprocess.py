"""Text and other columns through a callable: in the ranks, in scoring, in SQL and from MLflow."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchRegressor
from sparktorch.errors import ConfigError, ModuleError, SparkTorchError
from tests.spark.columns import Flat, fails, letters, widened
from tests.spark.scored import same_weights, sorted_rows
from tests.support.mlflow import QUIET

pytestmark = QUIET


@pytest.fixture(scope="module")
def texts(spark: SparkSession) -> DataFrame:
    rows = [(i, ["ab", "", "bab", "aabb"][i % 4], float(i % 3)) for i in range(40)]
    data = spark.createDataFrame(rows, "id int, text string, extra float")
    counts = [F.length("text") - F.length(F.replace("text", F.lit(letter))) for letter in "ab"]
    numbers = F.array(*[F.col(name).cast("float") for name in ("a", "b", "extra")])
    data = data.withColumns({"a": counts[0], "b": counts[1]}).withColumn("by_hand", numbers)
    return data.withColumn("target", F.col("a") - F.col("b") + F.col("extra")).repartition(2).cache()


def fit(data: DataFrame, *inputs: str, **params: Any) -> Any:
    given = {"labelCol": "target", "idCol": "id", "batchSize": 8, "seed": 2, "learningRate": 0.1, "progress": False}
    module = {"module": Flat, "moduleParams": {"width": 3}}
    return TorchRegressor(inputCols=list(inputs), **{**module, **given, **params}).fit(data)


def test_text_trains_and_scores_as_what_is_made_of_it(texts: DataFrame) -> None:
    model = fit(texts, "text", "extra", preprocess=letters, numWorkers=2)
    expected = fit(texts, "by_hand", numWorkers=2)
    assert same_weights(model, expected)
    found, wanted = (
        [row["prediction"] for row in sorted_rows(one.transform(texts), "id")] for one in (model, expected)
    )
    assert found == pytest.approx(wanted)


def test_columns_of_which_something_is_said_come_as_tensors(texts: DataFrame) -> None:
    data = texts.withColumn("words", F.expr("if(id % 2 = 0, array(1, 2), array(3))"))
    model = fit(data, "words", preprocess="tests.spark.columns:widened", inputLayouts={"words": "padded"})
    assert model.trained.preprocess is widened
    assert len(model.transform(data).collect()) == 40


@pytest.mark.parametrize(
    ("inputs", "params", "kind", "says"),
    [
        (["text"], {"preprocess": len}, ConfigError, ["preprocess len does not take", "*, epoch, generator"]),
        (["text"], {"preprocess": fails}, ModuleError, ["preprocess failed on the first row: KeyError", "StringArray"]),
    ],
)
def test_it_is_refused_before_a_job_starts(
    texts: DataFrame, inputs: list[str], params: dict[str, Any], kind: type[SparkTorchError], says: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        fit(texts, *inputs, **params)
    for text in says:
        assert text in str(caught.value)
