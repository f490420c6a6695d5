"""Scoring: what `transform` adds, keeps, refuses, and how little it does until it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark import cloudpickle
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassificationModel, TorchClassifier
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.spark import predict
from tests.spark.modules import MLP

VECTORS = [("features", 5), ("another.one", 2)]


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


def test_rows_with_nulls_are_kept_with_null_results_on_request(
    frame: DataFrame, model: TorchClassificationModel
) -> None:
    holes = frame.withColumn(
        "features",
        F.expr(
            "case when target > 4 then null "
            "when target < -4 then transform(features, x -> if(x > 0, null, x)) else features end"
        ),
    )
    kept = model.copy().setHandleInvalid("keep").transform(holes).orderBy("target").collect()
    usual = {row["target"]: row for row in model.transform(frame).collect()}
    results = ["rawPrediction", "probability", "prediction"]
    nulls = 0
    for row in kept:
        whole = row["features"] is not None and None not in row["features"]
        nulls += not whole
        for name in results:
            assert row[name] == (usual[row["target"]][name] if whole else None)
    assert len(kept) == 1001
    assert 20 < nulls < 800


def test_a_row_of_another_shape_is_an_error_in_any_case(frame: DataFrame, model: TorchClassificationModel) -> None:
    short = frame.withColumn("features", F.expr("if(target > 4, slice(features, 1, 3), features)"))
    for policy in ("error", "keep"):
        with pytest.raises(Exception, match=r"rows of column 'features' do not hold 5 values; the first has 3"):
            model.copy().setHandleInvalid(policy).transform(short).toPandas()


@pytest.mark.parametrize("params", [{"handleInvalid": "skip"}, {"predictPrecision": "int8"}, {"device": "tpu"}])
def test_params_out_of_range_are_refused_before_a_job(
    frame: DataFrame, model: TorchClassificationModel, params: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        model.copy()._set(**params).transform(frame)


def test_precision_and_compilation_change_the_scores_by_their_rounding_alone(
    frame: DataFrame, model: TorchClassificationModel
) -> None:
    some = frame.limit(64).repartition(1).cache()

    def scores(scorer: TorchClassificationModel) -> Any:
        return np.stack([row["rawPrediction"].toArray() for row in scorer.transform(some).orderBy("target").collect()])

    exact = scores(model)
    half = scores(model.copy().setPredictPrecision("bf16"))
    assert 1e-5 < np.abs(half - exact).max() < 0.1
    compiled = scores(model.copy().setPredictCompile(True))
    np.testing.assert_allclose(compiled, exact, atol=1e-5)


def test_large_weights_travel_as_a_file_and_score_alike(frame: DataFrame, model: TorchClassificationModel) -> None:
    wide = TorchClassifier(module=MLP, moduleParams={"outputs": 3, "hidden": 40_000}, progress=False).fit(frame)
    assert len(wide.trained.weights) > 1 << 20
    scored = wide.transform(frame.limit(100)).toPandas()
    with torch.inference_mode():
        expected = wide.module(torch.from_numpy(np.stack(scored["features"].tolist()))).numpy()
    np.testing.assert_allclose(np.stack([v.toArray() for v in scored["rawPrediction"]]), expected, atol=1e-5)
    udf = predict.scoring_udf(frame.sparkSession, wide.trained, {"prediction": "double"}, predict.Scoring())
    assert len(cloudpickle.dumps(udf.func)) < 100_000


def test_small_batches_are_joined_and_large_ones_cut_evenly() -> None:
    def lengths(sizes: list[int], limit: int) -> list[int]:
        columns = [(pa.array(range(size), pa.int64()),) * 2 for size in sizes]
        chunks = list(predict.rechunk(columns, limit))
        assert [x for chunk in chunks for x in chunk[1].to_pylist()] == [x for size in sizes for x in range(size)]
        return [len(chunk[0]) for chunk in chunks]

    assert lengths([3, 3, 3, 3], 7) == [6, 6]
    assert lengths([20, 1, 1, 6], 7) == [20, 2, 6]
    assert lengths([0, 5], 7) == [5]
    assert lengths([], 7) == []


def test_sql_calls_the_model_on_whatever_columns_it_could_be_fitted_on(
    spark: SparkSession, frame: DataFrame, model: TorchClassificationModel
) -> None:
    model.registerUDF("score")
    model.registerUDF("chance", "probability")
    sparse = F.udf(lambda row: Vectors.sparse(5, [(i, x) for i, x in enumerate(row) if i % 2]), VectorUDT())
    thin = F.transform("features", lambda x, i: F.when(i % 2 == 1, x).otherwise(0.0))
    data = frame.select(
        "target",
        F.expr("cast(features as array<double>)").alias("doubles"),
        array_to_vector("features").alias("dense"),
        sparse("features").alias("sparse"),
        thin.cast("array<float>").alias("thin"),
    )
    data.createOrReplaceTempView("scored_rows")
    found = spark.sql(
        "select score(doubles) a, score(dense) b, chance(doubles) p, score(sparse) c, score(thin) d "
        "from scored_rows order by target"
    ).collect()
    expected = model.transform(frame).orderBy("target").collect()
    assert [row["a"] for row in found] == [row["prediction"] for row in expected]
    assert [row["b"] for row in found] == [row["prediction"] for row in expected]
    assert [row["c"] for row in found] == [row["d"] for row in found]
    np.testing.assert_allclose([row["p"] for row in found], [row["probability"].toArray() for row in expected])
    with pytest.raises(ConfigError, match="no output column 'probabilty'") as caught:
        model.registerUDF("wrong", "probabilty")
    assert "'probability'" in caught.value.hint


def test_filters_and_pruning_reach_the_source(
    spark: SparkSession, frame: DataFrame, model: TorchClassificationModel, tmp_path: Path
) -> None:
    frame.write.parquet(str(tmp_path / "rows"))
    rows = spark.read.parquet(str(tmp_path / "rows"))
    plan = model.transform(rows).where("label = 1").select("target", "prediction")
    shown = plan._jdf.queryExecution().executedPlan().toString()
    assert "EqualTo(label,1)" in shown
    assert "weight" not in shown.partition("ReadSchema")[2]
    assert shown.count("ArrowEvalPython") == 1
    assert plan.count() > 0


def test_vectors_in_a_columnar_source_are_scored(
    spark: SparkSession, model: TorchClassificationModel, tmp_path: Path
) -> None:
    path = str(tmp_path / "vectors")
    vectors = spark.range(50).select(
        "id", *(array_to_vector(F.array(*[F.lit(float(i)) for i in range(n)])).alias(name) for name, n in VECTORS)
    )
    vectors.write.parquet(path)
    scored = model.transform(spark.read.parquet(path)).where("id < 40 and prediction >= 0")
    assert len(scored.collect()) == 40
    assert set(scored.columns) > {name for name, _ in VECTORS}
    assert "EqualTo(id,3)" in model.transform(spark.read.parquet(path)).where("id = 3")._jdf.queryExecution().toString()


def test_a_stream_is_scored_and_goes_on_where_it_stopped(
    spark: SparkSession, frame: DataFrame, model: TorchClassificationModel, tmp_path: Path
) -> None:
    source, sink = str(tmp_path / "source"), str(tmp_path / "sink")

    def arrive(data: DataFrame) -> None:
        data.coalesce(1).write.mode("append").parquet(source)

    def score() -> list[int]:
        stream = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(source)
        writer = model.transform(stream).writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).format("parquet").start(sink)
        query.awaitTermination(120)
        assert query.exception() is None
        return [int(progress["numInputRows"]) for progress in query.recentProgress if progress["numInputRows"]]

    arrive(frame.where("target < 0"))
    first = score()
    arrive(frame.where("target >= 0 and target < 3"))
    arrive(frame.where("target >= 3"))
    second = score()  # a new query over the checkpoint of the first
    assert (len(first), len(second)) == (1, 2)
    assert sum(first) + sum(second) == 1001
    columns = ["target", "prediction", "probability"]
    found = spark.read.parquet(sink).select(columns).orderBy("target").collect()
    assert found == model.transform(frame).select(columns).orderBy("target").collect()


def test_another_column_can_be_scored(frame: DataFrame, model: TorchClassificationModel) -> None:
    renamed = frame.withColumnRenamed("features", "x")
    expected = model.transform(frame).groupBy("prediction").count().orderBy("prediction").collect()
    found = model.copy().setFeaturesCol("x").transform(renamed)
    assert found.groupBy("prediction").count().orderBy("prediction").collect() == expected


def test_the_pandas_path_of_pyspark_4_0_scores_alike(
    frame: DataFrame, model: TorchClassificationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = model.transform(frame).orderBy("target").collect()
    monkeypatch.delattr(predict.F, "arrow_udf", raising=False)  # what pyspark 4.0 looks like
    assert model.transform(frame).orderBy("target").collect() == usual
