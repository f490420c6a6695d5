"""A driver that is interrupted, stopped or killed leaves no rank behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from tests.faults.conftest import regressor
from tests.support.faults import Fault, gone, pids
from tests.support.programs import environment
from tests.support.waiting import until

GONE_SECONDS = 40  # a rank waits for its driver for 30


def await_hung(marks: Path, over: Callable[[], object] = lambda: False) -> None:
    until(lambda: (marks / "hung").exists() or over(), seconds=120, what="a rank hangs")


# Where rank 0 hangs as it starts, rank 1 waits for it, and where it hangs as it finishes, rank 1 is done.
@pytest.mark.parametrize("at", ["starting", "rendezvous", "training", "validating", "finishing"])
def test_an_interrupt_ends_the_fit_and_its_ranks(at: Any, frame: DataFrame, tmp_path: Path) -> None:
    marks, over = tmp_path / "marks", threading.Event()
    interrupted: list[float] = []

    def interrupt() -> None:
        await_hung(marks, over.is_set)
        if not over.is_set():
            interrupted.append(time.monotonic())
            signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            regressor(Fault("hang", marks, rank=0, at=at, step=2)).fit(frame)
    finally:
        over.set()
        watcher.join()
    assert time.monotonic() - interrupted[0] < 60
    hung = int((marks / "hung").read_text())
    until(lambda: gone({hung}), seconds=GONE_SECONDS, what="the rank that hung has ended")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sparktorch")]


PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np, pandas as pd
from sparktorch.errors import ClusterError
from tests.faults.conftest import regressor
from tests.faults.test_driver import await_hung
from tests.support.faults import Fault
from tests.support.sessions import spark_session

def fit(marks, stopper=None):
    with spark_session("local-cluster[1,2,1024]", marks) as spark:
        x = np.random.default_rng(0).normal(size=(200, 5))
        frame = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1), "held_out": x[:, 0] > 1}))
        if stopper is not None:
            stopper.submit(lambda: (await_hung(marks), spark.stop()))
        regressor(Fault("hang", marks, rank=0, step=2)).fit(frame)

stopped, killed = map(Path, sys.argv[1:])
try:
    with ThreadPoolExecutor(1) as stopper:  # a session is still being stopped when the fit has ended
        fit(stopped, stopper)
except ClusterError as error:
    (stopped / "error").write_text(str(error))
    fit(killed)
"""


def test_no_rank_outlives_a_driver_that_stops_its_session_or_is_killed(tmp_path: Path) -> None:
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    with (tmp_path / "log").open("wb") as log:
        # In a session of its own: nothing of this one's terminal or group ends it.
        driver = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(stopped), str(killed)],
            env=environment(),
            cwd=tmp_path,
            stderr=log,
            start_new_session=True,
        )
    try:
        for marks in (stopped, killed):
            await_hung(marks, lambda: driver.poll() is not None)
            assert driver.poll() is None, (tmp_path / "log").read_text()[-4000:]
            if marks is killed:
                driver.kill()
            until(partial(gone, pids(marks)), seconds=GONE_SECONDS, what="the ranks have ended")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert "the Spark session was stopped during the fit" in (stopped / "error").read_text()
