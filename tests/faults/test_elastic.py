"""A fit whose workers come and go: it shrinks, grows, and makes way for a decommissioned executor, and stays exact."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressor
from sparktorch.spark.session import slots
from sparktorch.train.callbacks import FitContext
from tests.faults.conftest import regressor
from tests.support.faults import executor
from tests.support.sessions import slots_held
from tests.support.waiting import until

EPOCHS, STEPS = 30, 10
SLOW = 0.5  # seconds of a step, while a test waits for an executor


class Signals(Callback):
    """Sends a signal to the executor of rank 1 after its fifth step in an attempt, in one attempt or in several."""

    ranks = "all"

    def __init__(self, marks: Path, number: signal.Signals, *, times: int) -> None:
        self._marks, self._number, self._times = marks, number, times
        self._own, self._before = 0, 0
        marks.mkdir(parents=True)

    def on_fit_start(self, context: FitContext) -> None:
        self._before = self._sent()

    def on_step_end(self, context: FitContext) -> None:
        self._own, sent = self._own + 1, self._sent()
        if context.world.world_size == 1:
            self._marks.with_name("alone").touch()
        if context.world.rank == 1 and self._own == 5 and sent < self._times:
            (self._marks / str(sent)).touch()
            os.kill(executor(), self._number)
        elif 0 < sent < self._times or sent > self._before:  # until there is another executor, or another attempt
            time.sleep(SLOW)

    def _sent(self) -> int:
        return len(list(self._marks.iterdir()))


class Lingers(Callback):
    """Takes long steps while its rank is alone, and leaves a mark there."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def on_step_end(self, context: FitContext) -> None:
        if context.world.world_size == 1:
            self._mark.touch()
            time.sleep(SLOW)


def keeping(folder: Path, *callbacks: Callback, **params: Any) -> TorchRegressor:
    return regressor(*callbacks, **{"epochs": EPOCHS, "checkpointDir": str(folder / "checkpoints"), **params})


@pytest.fixture(scope="module")
def calm(frame: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return keeping(tmp_path_factory.mktemp("calm")).fit(frame).module.state_dict()


@contextmanager
def executors(spark: SparkSession) -> Iterator[Any]:
    """Yields what sets the number of executors that Spark starts; in the end there are two again."""
    context, maps = spark.sparkContext._jsc.sc(), spark._jvm.scala.collection.immutable
    nowhere = getattr(getattr(maps, "Map$"), "MODULE$").empty()
    try:
        yield lambda number: context.requestTotalExecutors(number, 0, nowhere)
    finally:
        context.requestTotalExecutors(2, 0, nowhere)
        until(lambda: slots(spark) == 2, seconds=60, what="two executors are there")


def test_a_fit_that_shrinks_grows_and_shrinks_ends_as_the_undisturbed_one(
    frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    spark, marks = frame.sparkSession, tmp_path / "marks"
    kills = Signals(marks, signal.SIGKILL, times=2)
    with executors(spark) as wanted, ThreadPoolExecutor(1) as pool:
        wanted(1)  # those that are there stay

        def gives_one_back() -> None:
            until(lambda: any(marks.iterdir()), seconds=120, what="an executor is killed")
            until((tmp_path / "alone").exists, seconds=60, what="the other rank goes on")
            wanted(2)
            until(lambda: slots(spark) == 2, seconds=120, what="another one is there")
            wanted(1)

        given = pool.submit(gives_one_back)
        model = keeping(tmp_path, kills, numWorkers=(1, 2), maxRestarts=2, growAfter=1.0).fit(frame)
        given.result()
    attempts = model.summary.attempts
    assert [attempt["workers"] for attempt in attempts] == [2, 1, 2, 1]
    assert "there are slots for 2 workers instead of 1" in attempts[1]["why"]
    assert attempts[1]["redone"] == 0
    assert sum(attempt["steps"] for attempt in attempts) == EPOCHS * STEPS
    assert 0 < model.summary.goodput < 1
    torch.testing.assert_close(model.module.state_dict(), calm, atol=1e-5, rtol=0)


def test_a_fit_that_begins_with_the_slots_that_are_free_takes_the_others_once_they_are(
    frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    spark, mark = frame.sparkSession, tmp_path / "trains"
    with slots_held(spark, 1, mark):
        model = keeping(tmp_path, Lingers(mark), numWorkers=(1, 2), growAfter=1.0).fit(frame)
    assert [attempt["workers"] for attempt in model.summary.attempts] == [1, 2]
    assert sum(attempt["steps"] for attempt in model.summary.attempts) == EPOCHS * STEPS
    torch.testing.assert_close(model.module.state_dict(), calm, atol=1e-5, rtol=0)


def test_a_fit_saves_and_moves_before_a_decommissioned_executor_goes(
    frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    notice = Signals(tmp_path / "marks", signal.SIGPWR, times=1)
    model = keeping(tmp_path, notice, checkpointInterval=EPOCHS).fit(frame)  # no checkpoint is due before the end
    until(lambda: slots(frame.sparkSession) == 2, seconds=60, what="another executor is there")
    first, second = model.summary.attempts
    assert first["why"] == "an executor is being decommissioned"
    assert first["redone"] == 0
    assert first["steps"] + second["steps"] == EPOCHS * STEPS
    assert all(torch.equal(model.module.state_dict()[name], calm[name]) for name in calm)


def test_the_daemon_forks_workers_of_a_process_that_has_torch_and_what_users_modules_import(
    spark: SparkSession,
) -> None:
    def found(_: int) -> tuple[bool, bool]:
        import sys

        return "libtorch" in Path(f"/proc/{os.getppid()}/maps").read_text(), "sparktorch.ml.regression" in sys.modules

    assert spark.sparkContext.range(2, numSlices=2).map(found).collect() == [(True, True)] * 2
