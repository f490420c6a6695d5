"""Scoring: what `transform` adds, keeps, refuses, and how little it does until it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassificationModel, TorchClassifier, TorchRegressionModel
from sparktorch.base.config import Device
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark import scoring_udf as predict
from sparktorch.spark.session import setting
from sparktorch.train.recipe.dry_run import describe_outputs
from tests.spark.modules import MLP
from tests.spark.scored import same_weights, sorted_rows

VECTORS = [("features", 5), ("another.one", 2)]
COLUMNAR = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


@pytest.fixture(autouse=True)
def columnar(spark: SparkSession) -> None:
    spark.conf.unset(COLUMNAR)


@pytest.fixture(scope="module")
def model(frame: DataFrame) -> TorchClassificationModel:
    return TorchClassifier(module=MLP, moduleParams={"outputs": 3}, progress=False).fit(frame)


def test_columns_are_kept_named_and_left_out_as_asked(frame: DataFrame, model: TorchClassificationModel) -> None:
    odd = frame.withColumn("a.b `c`", F.lit(1))
    scored = model.copy().setPredictionCol("class").setProbabilityCol("").setRawPredictionCol("").transform(odd)
    assert scored.columns == [*odd.columns, "class"]
    assert len(scored.collect()) == 1001
    with pytest.raises(ColumnError, match="already has a column 'rawPrediction'"):
        model.transform(model.transform(frame))


def test_rows_of_which_duplicates_were_dropped_are_fitted_and_scored_as_those_without_any(
    frame: DataFrame, model: TorchClassificationModel
) -> None:
    once = frame.unionByName(frame).dropDuplicates()
    again = TorchClassifier(module=MLP, moduleParams={"outputs": 3}, progress=False).fit(once)
    assert same_weights(again, model)
    scored = (again.transform(rows).select("prediction").collect() for rows in (once, frame))
    assert len(set(map(str, map(sorted, scored)))) == 1


def test_transform_is_lazy_and_runs_the_udf_once(frame: DataFrame, model: TorchClassificationModel) -> None:
    plan = model.transform(frame)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") + plan.count("BatchEvalPython") == 1
    pruned = model.transform(frame).select("label")._jdf.queryExecution().optimizedPlan().toString()
    assert "EvalPython" not in pruned


def test_rows_that_cannot_be_scored_name_their_column(frame: DataFrame, model: TorchClassificationModel) -> None:
    null = frame.withColumn("features", F.expr("if(target > 4, null, features)"))
    with pytest.raises(Exception, match=r"column 'features' has \d+ rows? with null values"):
        model.transform(null).toPandas()
    with pytest.raises(ColumnError, match=r"there is no column 'features' \[param=featuresCol, column=features\]"):
        model.transform(frame.drop("features"))
    with pytest.raises(ColumnError, match="is float, but the model was fitted on"):
        model.transform(frame.withColumn("features", F.lit(1.0).cast("float")))
    with pytest.raises(ColumnError, match=r"cast\(`features` as array<double>\)"):
        model.transform(frame.withColumn("features", F.col("features").cast("array<string>")))


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
    kept = model.copy().setHandleInvalid("keep").transform(holes).collect()
    usual = {row["target"]: row for row in model.transform(frame).collect()}
    vectors = holes.where("forall(features, x -> x is not null)").withColumn("features", array_to_vector("features"))
    scored = model.copy().setHandleInvalid("keep").transform(vectors).collect()
    assert len(scored) > 200
    assert all(row["prediction"] == usual[row["target"]]["prediction"] for row in scored)
    results = ["rawPrediction", "probability", "prediction"]
    nulls = 0
    for row in kept:
        whole = row["features"] is not None and None not in row["features"]
        nulls += not whole
        for name in results:
            assert row[name] == (usual[row["target"]][name] if whole else None)
    assert len(kept) == 1001
    assert 20 < nulls < 800


def test_bytes_of_numbers_that_are_nan_or_infinite_are_skipped_and_not_scored(spark: SparkSession) -> None:
    module = torch.nn.Linear(2, 1)
    trained = TrainedModule(
        source=torch.nn.Linear,
        params={"in_features": 2, "out_features": 1},
        weights=pack_state(module.state_dict()),
        inputs=(TensorSpec(name="x0", column="x", dtype="float32", shape=(2,), kind="binary", layout="raw"),),
        outputs=describe_outputs(module(torch.zeros(1, 2))),
        task="regression",
    )
    model = TorchRegressionModel()._with(trained, None)._set(featuresCol="x", handleInvalid="skip")
    numbers = np.array([[1, 2], [np.nan, 2], [1, -np.inf], [3, 4]], np.float32)
    rows = [*((i, row.tobytes()) for i, row in enumerate(numbers)), (4, None)]
    data = spark.createDataFrame(rows, "id int, x binary")
    scored = {row["id"]: row["prediction"] for row in model.transform(data).collect()}
    plan = model.transform(data)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("ArrowEvalPython") + plan.count("BatchEvalPython") == 1, "the filter scores no row again"
    assert scored == pytest.approx({i: module(torch.from_numpy(numbers[i])).item() for i in (0, 3)}, rel=1e-5)


@pytest.mark.newest
def test_precision_and_compilation_change_the_scores_by_their_rounding_alone(
    frame: DataFrame, model: TorchClassificationModel
) -> None:
    some = frame.limit(64).repartition(1).cache()

    def scores(scorer: TorchClassificationModel) -> Any:
        return np.stack([row["rawPrediction"].toArray() for row in sorted_rows(scorer.transform(some))])

    exact = scores(model)
    half = scores(model.copy().setPredictPrecision("bf16"))
    assert 1e-5 < np.abs(half - exact).max() < 0.1
    np.testing.assert_allclose(scores(model.copy().setPredictCompile(True)), exact, atol=1e-5)


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


def test_no_chunk_holds_more_bytes_than_allowed_but_a_row_that_is_larger() -> None:
    def lengths(sizes: list[list[int]], rows: int = 100) -> list[int]:
        batches = [(pa.array([b"x" * size for size in batch], pa.binary()),) for batch in sizes]
        chunks = [chunk[0] for chunk in predict.rechunk(batches, rows, 1100)]
        assert [len(x) for chunk in chunks for x in chunk.to_pylist()] == [size for batch in sizes for size in batch]
        assert all(len(chunk) == 1 or chunk.nbytes <= 1100 for chunk in chunks)
        return [len(chunk) for chunk in chunks]

    assert lengths([[500], [500], [500]]) == [2, 1]
    assert lengths([[500] * 4]) == [2, 2]
    assert lengths([[10, 10, 10, 5000], [10, 10]]) == [3, 1, 2]
    assert lengths([[100] * 3, [100] * 3], rows=4) == [3, 3]


@pytest.mark.parametrize(
    ("device", "local", "seen", "chosen"),
    [("auto", False, 2, "cpu"), ("auto", True, 1, "cuda:0"), ("auto", True, 0, "cpu"), ("cuda", False, 1, "cuda:0")],
)
def test_a_gpu_that_spark_has_not_assigned_is_taken_in_local_mode_or_on_demand_alone(
    monkeypatch: pytest.MonkeyPatch, device: Device, local: bool, seen: int, chosen: str
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert predict.device_of(None, device, local) == chosen


def test_frames_with_columns_of_equal_names_are_scored(frame: DataFrame, model: TorchClassificationModel) -> None:
    joined = frame.select("target", "features").limit(5).select("target", "features", F.col("target").alias("target"))
    scored = model.transform(joined)
    assert scored.columns == ["target", "features", "target", "rawPrediction", "probability", "prediction"]
    assert [row[0] for row in scored.collect()] == [row[2] for row in scored.collect()]
    with pytest.raises(ColumnError, match="2 columns are called 'features'"):
        model.transform(joined.select("*", F.col("features").alias("features")))


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
    query = "select target, score(doubles) a, score(dense) b, chance(doubles) p, score(sparse) c, score(thin) d"
    found = sorted_rows(spark.sql(f"{query} from scored_rows"))
    expected = sorted_rows(model.transform(frame))
    assert [row["a"] for row in found] == [row["prediction"] for row in expected]
    assert [row["b"] for row in found] == [row["prediction"] for row in expected]
    assert [row["c"] for row in found] == [row["d"] for row in found]
    np.testing.assert_allclose([row["p"] for row in found], [row["probability"].toArray() for row in expected])
    with pytest.raises(ConfigError, match="outputCol 'probabilty' is unknown") as caught:
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
    assert plan.collect()


@pytest.fixture(scope="module")
def vectors(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("vectors") / "rows")
    rows = spark.range(50).select(
        "id",
        (F.col("id") % 2).alias("half"),
        F.transform(F.sequence(F.lit(0), F.lit(4)), lambda i: i.cast("float")).alias("array"),
        *(array_to_vector(F.array(*[F.lit(float(i)) for i in range(n)])).alias(name) for name, n in VECTORS),
    )
    rows.withColumn("nested", F.struct("features")).write.partitionBy("half").parquet(path)
    return spark.read.parquet(path)


def test_what_has_no_arrow_type_may_stand_beside_the_columns_that_are_scored(
    spark: SparkSession, model: TorchClassificationModel, vectors: DataFrame
) -> None:
    rows = vectors.drop("features")
    by_array = model.copy().setFeaturesCol("array")
    for beside in (rows.drop("nested"), rows.drop("another.one")):
        assert by_array.transform(beside).agg(F.count("prediction"), F.sum("id")).collect() == [(50, 1225)]
        assert len(by_array.transform(beside).collect()) == 50
    plus = F.pandas_udf(lambda half, id: half + id, "bigint")
    taken = [F.col("half"), F.col("id")]  # of which one says in which folder a row lies
    scored = predict.rows_for_udf(rows, taken).withColumn("sum", plus(*taken))
    assert len(scored.where("half = 1").collect()) == 25
    assert len(scored.where("sum > 0").collect()) == 49


def test_a_setting_of_the_users_stays_when_the_model_becomes_an_sql_function(
    spark: SparkSession, model: TorchClassificationModel, caplog: pytest.LogCaptureFixture
) -> None:
    other = spark.newSession()
    other.conf.set(COLUMNAR, "true")
    model.registerUDF("score_here", spark=other)
    assert other.conf.get(COLUMNAR) == "true"
    assert not caplog.records
    third, default = spark.newSession(), setting(spark, COLUMNAR)
    model.registerUDF("score_there", spark=third)
    assert (setting(third, COLUMNAR), setting(spark, COLUMNAR)) == (default and "false", default)
    assert [COLUMNAR in record.getMessage() for record in caplog.records] == ([True] if default else [])


@pytest.mark.newest
def test_the_pandas_path_of_pyspark_4_0_scores_alike(
    frame: DataFrame, model: TorchClassificationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = sorted_rows(model.transform(frame))
    monkeypatch.delattr(predict.F, "arrow_udf", raising=False)  # what pyspark 4.0 looks like
    assert sorted_rows(model.transform(frame)) == usual
