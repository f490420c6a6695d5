"""Scoring: what `transform` adds, keeps, refuses, and how little it does until it is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassificationModel, TorchClassifier
from sparktorch.errors import ColumnError
from sparktorch.spark import predict
from tests.spark.modules import MLP


@pytest.fixture(scope="module")
def model(frame: DataFrame) -> TorchClassificationModel:
    return TorchClassifier(module=MLP, moduleParams={"outputs": 3}, progress=False).fit(frame)


def test_columns_are_kept_named_and_left_out_as_asked(frame: DataFrame, model: TorchClassificationModel) -> None:
    odd = frame.withColumn("a.b `c`", F.lit(1))
    scored = model.copy().setPredictionCol("class").setProbabilityCol("").setRawPredictionCol("").transform(odd)
    assert scored.columns == [*odd.columns, "class"]
    assert scored.count() == 1001
    with pytest.raises(ColumnError, match="already has a column 'rawPrediction'"):
        model.transform(model.transform(frame))


def test_transform_is_lazy_and_runs_the_udf_once(frame: DataFrame, model: TorchClassificationModel) -> None:
    plan = model.transform(frame)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") + plan.count("BatchEvalPython") == 1
    pruned = model.transform(frame).select("label")._jdf.queryExecution().optimizedPlan().toString()
    assert "EvalPython" not in pruned


def test_scores_do_not_depend_on_batches_or_partitions(frame: DataFrame, model: TorchClassificationModel) -> None:
    def scores(data: DataFrame, batch: int) -> Any:
        scored = model.copy().setPredictBatchSize(batch).transform(data).orderBy("target").toPandas()
        return np.stack([vector.toArray() for vector in scored["rawPrediction"]])

    np.testing.assert_allclose(scores(frame, 7), scores(frame.repartition(9), 8192), atol=1e-6)


def test_empty_frames_and_partitions_score_to_nothing(
    spark: SparkSession, frame: DataFrame, model: TorchClassificationModel
) -> None:
    assert model.transform(frame.where("label > 9")).count() == 0
    assert model.transform(frame.limit(2).repartition(5)).count() == 2


def test_rows_that_cannot_be_scored_name_their_column(frame: DataFrame, model: TorchClassificationModel) -> None:
    null = frame.withColumn("features", F.expr("if(target > 4, null, features)"))
    with pytest.raises(Exception, match=r"column 'features' has \d+ null values"):
        model.transform(null).toPandas()
    with pytest.raises(ColumnError, match="there is no column 'features'"):
        model.transform(frame.drop("features"))
    with pytest.raises(ColumnError, match="is float, but the model was fitted on"):
        model.transform(frame.withColumn("features", F.lit(1.0).cast("float")))


def test_another_column_can_be_scored(frame: DataFrame, model: TorchClassificationModel) -> None:
    renamed = frame.withColumnRenamed("features", "x")
    expected = model.transform(frame).groupBy("prediction").count().orderBy("prediction").collect()
    found = model.copy().setFeaturesCol("x").transform(renamed)
    assert found.groupBy("prediction").count().orderBy("prediction").collect() == expected


def test_the_pandas_path_of_pyspark_4_0_scores_alike(
    frame: DataFrame, model: TorchClassificationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = model.transform(frame).orderBy("target").collect()
    monkeypatch.delattr(predict.F, "arrow_udf")  # what pyspark 4.0 looks like
    assert model.transform(frame).orderBy("target").collect() == usual
