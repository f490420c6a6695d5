"""A driver that is interrupted, stopped or killed leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame

from sparktorch import TorchRegressor
from tests.support.faults import Fault, gone, pids
from tests.support.nets import Score
from tests.support.programs import environment

GONE_SECONDS = 30


def regressor(*faults: Fault) -> TorchRegressor:
    return TorchRegressor(
        module=Score, batchSize=32, numWorkers=2, progress=False, validationIndicatorCol="held_out", callbacks=[*faults]
    )


def await_mark(marks: Path, *, seconds: float = 120) -> None:
    """Waits until the fault has happened."""
    deadline = time.monotonic() + seconds
    while not (marks / "done").exists():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.05)


@pytest.mark.parametrize("at", ["loading", "waiting", "rendezvous", "", "validating", "finishing"])
def test_an_interrupt_ends_the_fit_and_its_ranks(at: str, frame: DataFrame, tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def interrupt() -> None:
        await_mark(marks)
        signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        regressor(Fault("hang", marks, rank=0, at=at, step=2)).fit(frame)
    watcher.join()
    assert time.monotonic() - begun < 60
    hung = int((marks / "hung").read_text())
    assert gone({hung}, seconds=GONE_SECONDS)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sparktorch")]


PROGRAM = """
import sys, threading, time
from pathlib import Path
import numpy as np, pandas as pd
from tests.faults.test_driver import await_mark, regressor
from tests.support.faults import Fault
from tests.support.sessions import spark_session

marks, how = Path(sys.argv[1]), sys.argv[2]
with spark_session("local-cluster[2,1,1024]", marks) as spark:
    x = np.random.default_rng(0).normal(size=(200, 5))
    frame = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1), "held_out": x[:, 0] > 1}))
    if how == "stop":
        threading.Thread(target=lambda: (await_mark(marks), spark.stop())).start()
    regressor(Fault("hang", marks, rank=0, step=2)).fit(frame)
"""


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_no_rank_outlives_a_driver_that_is_killed_or_stops_its_session(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    # In a session of its own: nothing of this one's terminal or group ends it.
    with subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        await_mark(tmp_path)
        if how == "kill":
            os.kill(driver.pid, signal.SIGKILL)
            errors = ""
        else:
            _, errors = driver.communicate(timeout=60)
        assert gone(pids(tmp_path), seconds=GONE_SECONDS)
        if how == "stop":
            assert "ClusterError: the Spark session was stopped during the fit" in errors
        assert driver.wait(timeout=60) != 0
