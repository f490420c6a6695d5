"""Bad input is refused before training starts, by an error that says what, where and what to do."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ClusterError, ColumnError, ConfigError, ModuleError, RankError, SparkTorchError
from sparktorch.ml.fit.checks import naming_params
from tests.spark.modules import MLP, Faulty
from tests.support.sessions import settings
from tests.support.waiting import until


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
        ({"weightCol": "name"}, ColumnError, ["'name' must be a number, but is string", "param=weightCol"]),
        ({"labelCol": "features"}, ColumnError, ["'features' must be a number, but is array", "TorchEstimator"]),
        ({"validationIndicatorCol": "label"}, ColumnError, ["'label' must be boolean"]),
        ({"moduleParams": {"width": 3}}, ModuleError, ["MLP cannot be built", "width", "its parameters are (inputs"]),
        (
            {"moduleParams": {"inputs": 7, "outputs": 3}},
            ModuleError,
            ["forward of MLP failed", "argument 0 of forward <- column 'features': float32 of shape (rows, 5)"],
        ),
        ({"predictionCol": "label"}, ColumnError, ["the DataFrame already has a column 'label'", "output columns"]),
        ({"numWorkers": 4}, ClusterError, ["numWorkers=4, but the cluster has 3 slots", "spark.executor.instances"]),
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


def test_bad_values_name_their_column_and_nothing_hangs(frame: DataFrame) -> None:
    bad = frame.withColumn("label", F.expr("if(target > 4, 3.0D, label)"))  # about every tenth row, not the first
    with pytest.raises(ColumnError) as caught:
        classifier(weightCol="weight").fit(bad)
    for text in ("labels in column 'label' are not among classes 0 ... 2", "for example 3", "3 scores a row"):
        assert text in str(caught.value)
    assert caught.value.where["column"] == "label"


def test_rows_that_spark_cannot_compute_in_a_ranks_task_are_told_as_spark_tells_them(spark: SparkSession) -> None:
    # The rows of rank 1 alone: its stream ends before it has begun.
    rows = spark.range(0, 64, numPartitions=2).select(
        F.array(F.col("id").cast("float")).alias("features"),
        F.expr("if(id < 32, 0.0D, raise_error('no number'))").alias("label"),
    )
    with pytest.raises(ClusterError, match="no number"):
        TorchRegressor(module=MLP, moduleParams={"inputs": 1}, numWorkers=2, split="keep", progress=False).fit(rows)


def test_a_loss_that_cannot_be_shipped_is_refused(frame: DataFrame) -> None:
    lock = threading.Lock()

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with lock:
            return ((output - label) ** 2).mean()

    with pytest.raises(ModuleError, match="cannot be shipped to the ranks") as caught:
        TorchEstimator(module=MLP, labelCol="target", loss=loss, progress=False).fit(frame)
    assert "lock" in str(caught.value)


@pytest.fixture
def planted(frame: DataFrame) -> DataFrame:
    """One row is marked for `Faulty`; it is not the first."""
    highest = frame.agg(F.max("target")).first()[0]
    mark = f"if(target = float({highest!r}), transform(features, x -> 2e6f), features)"
    return frame.withColumn("features", F.expr(mark))


def regressor(**params: Any) -> TorchRegressor:
    given = {"labelCol": "target", "batchSize": 64, "numWorkers": 2, "progress": False}
    return TorchRegressor(module=Faulty, **{**given, **params})


def test_an_exception_in_one_rank_arrives_with_its_place_and_traceback_and_the_next_fit_works(
    planted: DataFrame, frame: DataFrame
) -> None:
    with pytest.raises(RankError) as caught:
        regressor(moduleParams={"fault": "raise"}).fit(planted)
    where = caught.value.where
    assert "ArithmeticError while training: the planted row has come" in str(caught.value)
    assert "in forward" in caught.value.trace
    assert where["rank"] in (0, 1)
    assert where["epoch"] == 1
    assert where["step"] >= 1
    assert where["host"]
    assert regressor().fit(frame).summary.rows == 1001


def test_an_interrupt_cancels_the_job_and_ends_the_ranks(frame: DataFrame, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    estimator = regressor(moduleParams={"fault": "hang", "pid_file": str(pids)})

    interrupted: list[float] = []

    def interrupt() -> None:
        with suppress(AssertionError):  # an interrupt ends the wait for a fit that never began, too
            until(lambda: pids.exists() and len(set(pids.read_text().split())) >= 2, seconds=60, what="both ranks hang")
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(frame)
    finally:
        thread.join()
    assert time.monotonic() - interrupted[0] < 10
    ranks = {int(pid) for pid in pids.read_text().split()}
    assert len(ranks) == 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), seconds=60, what="both ranks have ended")


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
