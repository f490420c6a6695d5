"""A driver that is interrupted, stopped or killed leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from sparktorch import TorchRegressor
from tests.support.faults import Fault, gone, pids
from tests.support.nets import Score
from tests.support.programs import environment
from tests.support.waiting import until

GONE_SECONDS = 30


def regressor(*faults: Fault) -> TorchRegressor:
    return TorchRegressor(
        module=Score, batchSize=32, numWorkers=2, progress=False, validationIndicatorCol="held_out", callbacks=[*faults]
    )


def await_hung(marks: Path) -> None:
    until((marks / "hung").exists, seconds=120, what="a rank hangs")


# Where rank 0 hangs as it starts, rank 1 waits for it, and where it hangs as it finishes, rank 1 is done.
@pytest.mark.parametrize("at", ["starting", "rendezvous", "training", "validating", "finishing"])
def test_an_interrupt_ends_the_fit_and_its_ranks(at: Any, frame: DataFrame, tmp_path: Path) -> None:
    marks, over = tmp_path / "marks", threading.Event()

    def interrupt() -> None:
        until(lambda: (marks / "hung").exists() or over.is_set(), seconds=120, what="a rank hangs")
        if not over.is_set():
            signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            regressor(Fault("hang", marks, rank=0, at=at, step=2)).fit(frame)
    finally:
        over.set()
        watcher.join()
    assert time.monotonic() - begun < 60
    hung = int((marks / "hung").read_text())
    until(lambda: gone({hung}), seconds=GONE_SECONDS, what="the rank that hung has ended")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sparktorch")]


PROGRAM = """
import sys, threading, time
from pathlib import Path
import numpy as np, pandas as pd
from tests.faults.test_driver import await_hung, regressor
from tests.support.faults import Fault
from tests.support.sessions import spark_session

marks, how = Path(sys.argv[1]), sys.argv[2]
with spark_session("local-cluster[2,1,1024]", marks) as spark:
    x = np.random.default_rng(0).normal(size=(200, 5))
    frame = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1), "held_out": x[:, 0] > 1}))
    if how == "stop":
        threading.Thread(target=lambda: (await_hung(marks), spark.stop())).start()
    regressor(Fault("hang", marks, rank=0, step=2)).fit(frame)
"""


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_no_rank_outlives_a_driver_that_is_killed_or_stops_its_session(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    with (tmp_path / "errors").open("wb") as log:
        # In a session of its own: nothing of this one's terminal or group ends it.
        driver = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=log, start_new_session=True)
    try:
        await_hung(tmp_path)
        if how == "kill":
            driver.kill()
        assert driver.wait(timeout=60) != 0
        until(lambda: gone(pids(tmp_path)), seconds=GONE_SECONDS, what="the ranks have ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    if how == "stop":
        assert "ClusterError: the Spark session was stopped during the fit" in (tmp_path / "errors").read_text()
