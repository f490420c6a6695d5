"""A cluster that cannot take the ranks: told within seconds, or waited for as long as one has said."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch.errors import ClusterError
from tests.faults.conftest import regressor
from tests.support.faults import Fault
from tests.support.sessions import settings, slots_held
from tests.support.waiting import until


def test_slots_that_another_job_holds_are_waited_for(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    tracker = spark.sparkContext.statusTracker()
    with ThreadPoolExecutor(1) as pool, slots_held(spark, 2, tmp_path / "release"):
        fit = pool.submit(regressor().fit, frame)
        until(lambda: len(tracker.getActiveStageIds()) == 2, seconds=60, what="the fit wants slots, too")
        assert not fit.done()
    assert fit.result().summary.numWorkers == 2


def test_the_wait_for_slots_ends_when_one_has_said(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    with slots_held(spark, 2, tmp_path / "release"):
        begun = time.monotonic()
        with pytest.raises(ClusterError, match="no slots for the 2 ranks for 2 s") as raised:
            regressor(startTimeout=2).fit(frame)
        assert time.monotonic() - begun < 10
    assert raised.value.where["param"] == "startTimeout"


def test_fits_side_by_side_wait_for_each_others_slots(frame: DataFrame, tmp_path: Path) -> None:
    # Each takes longer than the other may wait for slots. Once they are free, Spark looks once a second whether all of
    # a barrier stage's tasks have a place, which on a busy machine has taken more than 3 s.
    slow = Fault("slow", tmp_path, seconds=1.0)
    with ThreadPoolExecutor(2) as pool:
        fits = [pool.submit(regressor(slow, startTimeout=9, validationIndicatorCol=None).fit, frame) for _ in range(2)]
        assert [fit.result().summary.numWorkers for fit in fits] == [2, 2]


@pytest.mark.parametrize("setting", ["spark.dynamicAllocation.enabled", "spark.speculation"])
def test_settings_that_break_barrier_jobs_are_refused(setting: str, frame: DataFrame) -> None:
    with settings(frame.sparkSession, {setting: "true"}), pytest.raises(ClusterError) as caught:
        regressor().fit(frame)
    assert f"{setting}=false" in caught.value.hint


def test_executors_that_the_session_asks_for_are_waited_for_and_no_others(
    frame: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    late = {"spark.master": "yarn", "spark.executor.instances": "3"}  # on a cluster that has two, and gets no more
    with settings(frame.sparkSession, late):
        begun = time.monotonic()
        with pytest.raises(ClusterError, match="numWorkers=3, but the cluster has 2 slots"):
            regressor(numWorkers=3, startTimeout=6).fit(frame)
        assert time.monotonic() - begun > 6
        assert "the cluster has 2 of 3 slots: waiting for more executors" in caplog.text
        begun = time.monotonic()
        with pytest.raises(ClusterError, match="numWorkers=4, but the cluster has 2 slots") as raised:
            regressor(numWorkers=4).fit(frame)
        assert time.monotonic() - begun < 5
        assert "set numWorkers=2 or less" in raised.value.hint
