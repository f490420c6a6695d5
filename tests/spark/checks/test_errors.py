"""Bad input is refused before training starts, by an error that says what, where and what to do."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ClusterError, ColumnError, ConfigError, ModuleError, SparkTorchError
from sparktorch.ml.fit.checks import naming_params
from tests.spark.modules import MLP
from tests.support.sessions import settings


def classifier(**params: Any) -> TorchClassifier:
    given = {"module": MLP, "moduleParams": {"outputs": 3}, "batchSize": 64, "numWorkers": 2, "progress": False}
    return TorchClassifier(**{**given, **params})


class Locked(MLP):
    """Holds a lock, which cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(outputs=3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("params", "kind", "says"),
    [
        (
            {"featuresCol": "feature"},
            ColumnError,
            ["no column 'feature'", "features, label", "did you mean 'features'", "param=featuresCol"],
        ),
        (
            {"moduleParams": {"inputs": 7, "outputs": 3}},
            ModuleError,
            ["forward of MLP failed", "argument 0 of forward <- column 'features': float32 of shape (rows, 5)"],
        ),
        (
            {"numWorkers": 4},
            ClusterError,
            ["numWorkers=4, but the cluster has 3 slots", "with more: master 'local[4]'"],
        ),
        ({"numWorkers": (4, 8)}, ClusterError, ["numWorkers=(4, 8), but", "set numWorkers=(3, 8), or start"]),
        ({"device": "cuda"}, ClusterError, ["device='cuda'", "torch sees 0 such devices"]),
        ({"module": Locked(), "moduleParams": {}}, ModuleError, ["the module instance cannot be copied", "lock"]),
    ],
)
def test_it_is_refused_before_a_job_starts(
    frame: DataFrame, params: dict[str, Any], kind: type[SparkTorchError], says: list[str]
) -> None:
    data = frame.withColumn("name", F.lit("x"))
    context = frame.sparkSession.sparkContext
    group = uuid.uuid4().hex
    context.setJobGroup(group, "what a refused fit runs")
    try:
        with pytest.raises(kind) as caught:
            classifier(**params).fit(data)
        jobs = context.statusTracker().getJobIdsForGroup(group)
    finally:
        context.setJobGroup("", "")
    assert len(jobs) <= 1, "more than the reading of the first row"
    for text in says:
        assert text in str(caught.value)


def test_an_error_says_which_param_names_its_column_unless_two_do(frame: DataFrame) -> None:
    data = frame.withColumn("name", F.lit("x"))
    missing = classifier(featuresCol="none")
    for estimator, says in (
        (classifier(featuresCol="name", labelCol="name"), "[column=name]"),
        (classifier(inputCols=["features", "none"]), "[param=inputCols, column=none]"),
        (missing.copy({missing.weightCol: None}), "[param=featuresCol, column=none]"),
    ):
        for action in (estimator.fit, estimator.plan):
            with pytest.raises(ColumnError) as caught:
                action(data)
            assert says in str(caught.value)
    model = classifier(labelCol="features")  # what only a fit reads is not named by a model
    with pytest.raises(ColumnError) as caught, naming_params(model, fits=False):
        raise ColumnError("there is none", column="features")
    assert caught.value.where == {"param": "featuresCol", "column": "features"}


def test_a_path_and_a_stream_are_no_rows_to_fit_on(frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match=r"(?s)got builtins's str.*spark\.read"):
        classifier().fit("rows.parquet")
    stream = frame.sparkSession.readStream.format("rate").load()
    with pytest.raises(
        ConfigError, match=r"(?s)fit takes all rows at once, and the DataFrame is a stream.*spark\.read"
    ):
        classifier().fit(stream)


def test_settings_that_train_next_to_nothing_are_told(frame: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    data = frame.withColumn("held_out", F.lit(False))
    classifier(validationIndicatorCol="held_out", epochs=1, batchSize=10_000).fit(data)
    assert "column 'held_out' marks no row for validation" in caplog.text
    assert "fewer than batchSize: each epoch is one step" in caplog.text


def test_validation_rows_in_a_dataframe_of_their_own_are_refused_with_what_to_do(frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match="validationIndicatorCol"):
        classifier().fit(frame, frame)  # type: ignore[call-overload]


def test_an_empty_frame_is_refused(frame: DataFrame) -> None:
    with pytest.raises(ColumnError, match="has no rows"):
        classifier().fit(frame.where("label > 99"))


def test_rows_that_spark_cannot_compute_in_a_ranks_task_are_told_as_spark_tells_them(spark: SparkSession) -> None:
    # The rows of rank 1 alone: its stream ends before it has begun.
    rows = spark.range(0, 64, numPartitions=2).select(
        F.array(F.col("id").cast("float")).alias("features"),
        F.expr("if(id < 32, 0.0D, raise_error('no number'))").alias("label"),
    )
    with pytest.raises(ClusterError, match="no number"):
        TorchRegressor(module=MLP, moduleParams={"inputs": 1}, numWorkers=2, split="keep", progress=False).fit(rows)


def test_what_spark_leaves_out_in_local_mode_is_not_refused_there(frame: DataFrame) -> None:
    with settings(frame.sparkSession, {"spark.dynamicAllocation.enabled": "true", "spark.speculation": "true"}):
        assert classifier().fit(frame).summary.numWorkers == 2


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("spark.driver.host", "nosuch.invalid", "set spark.driver.host to an address they reach"),
        ("spark.driver.bindAddress", "192.0.2.77", "set spark.driver.bindAddress to an address of this machine"),
    ],
)
def test_an_address_of_the_driver_that_cannot_work_is_told_within_seconds(
    setting: str, value: str, message: str, frame: DataFrame
) -> None:
    started = time.monotonic()
    with settings(frame.sparkSession, {setting: value}), pytest.raises(ClusterError, match=message):
        classifier().fit(frame)
    assert time.monotonic() - started < 40, "torch itself tries for a minute"


def test_a_module_of_several_outputs_needs_names_for_them(frame: DataFrame) -> None:
    from tests.spark.ml.test_fit import named_loss
    from tests.spark.modules import TwoInputs

    pairs = frame.selectExpr("cast(label as int) item", "target value", "target")
    model = TorchEstimator(
        module=TwoInputs,
        moduleParams={"named": True},
        inputCols=["item", "value"],
        labelCol="target",
        loss=named_loss,
        progress=False,
    ).fit(pairs)
    with pytest.raises(ConfigError, match=r"returns 2 tensors \(total, base\), outputCols names 0"):
        model.transform(pairs)
