"""What happens to one rank is told of that rank within seconds, and a fit that can be finished is finished."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import DataFrame

from sparktorch import TorchRegressionModel, TorchRegressor
from sparktorch.errors import RankError, RankLostError, RankStalledError
from tests.faults.conftest import regressor
from tests.support.cgroups import limited_memory
from tests.support.faults import Fault, gone, pids
from tests.support.waiting import until

# What is demanded of the product; a machine that has other work besides meets it, too.
DETECTED_SECONDS = 3.0
GONE_SECONDS = 30
STALL_SECONDS = 10.0  # ranks that begin anew import all they need, on a machine that may be busy


def keeping(folder: Path, *faults: Fault, **params: Any) -> TorchRegressor:
    checkpoints = {"checkpointDir": str(folder / "checkpoints"), "checkpointInterval": 2, "checkpointUnit": "step"}
    return regressor(*faults, **{"epochs": 3, **checkpoints, **params})


def weights(model: TorchRegressionModel) -> dict[str, torch.Tensor]:
    return model.module.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def calm(frame: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights(keeping(tmp_path_factory.mktemp("calm")).fit(frame))


def failure(estimator: TorchRegressor, frame: DataFrame, marks: Path) -> tuple[RankError, float]:
    with pytest.raises(RankError) as raised:
        estimator.fit(frame)
    return raised.value, time.time() - happened(marks)


def happened(marks: Path) -> float:
    return float((marks / "done").read_text())


def restarted(caplog: pytest.LogCaptureFixture) -> tuple[RankError, float]:
    (warning,) = [record for record in caplog.records if "restart 1 of 1" in record.getMessage()]
    assert isinstance(warning.args, tuple)
    error = warning.args[0]
    assert isinstance(error, RankError)
    return error, warning.created


@pytest.mark.parametrize("at", ["starting", "rendezvous", "training", "validating", "saving"])
def test_a_killed_rank_is_named_at_once_and_a_restart_ends_with_the_same_bits(
    at: Any, frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = tmp_path / "marks"
    with caplog.at_level(logging.WARNING, "sparktorch"):
        model = keeping(tmp_path, Fault("kill", marks, at=at, step=13), maxRestarts=1).fit(frame)
    error, told = restarted(caplog)
    assert type(error) is RankLostError
    assert error.where["rank"] == 1
    assert error.where["pid"] in pids(marks)
    assert "rank 1 died" in error.what
    if at == "training":
        assert (error.where["epoch"], error.where["step"]) in {(2, 3), (2, 4)}
    assert told - happened(marks) < DETECTED_SECONDS
    assert same(weights(model), calm)


def test_the_next_fit_is_not_disturbed_by_ranks_of_the_failed_one(
    frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    # Rank 0 survives rank 1's exception, and hangs in user code: it lives on when the next fit begins.
    marks = tmp_path / "marks"
    faults = Fault("hang", marks, rank=0, step=4), Fault("raise", tmp_path / "raised", rank=1, step=4)
    with pytest.raises(RankError, match="planted"):
        keeping(tmp_path / "one", *faults).fit(frame)
    assert same(weights(keeping(tmp_path / "two").fit(frame)), calm)
    hung = int((marks / "hung").read_text())
    until(lambda: gone({hung}), seconds=GONE_SECONDS, what="the rank that hung has ended")


@pytest.mark.parametrize(("deed", "words"), [("stop", "rank 1 does not answer"), ("hang", "rank 1 stands still")])
def test_a_rank_that_stands_still_is_named_with_its_place(
    deed: Any,
    words: str,
    frame: DataFrame,
    calm: dict[str, torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    marks = tmp_path / "marks"
    estimator = keeping(tmp_path, Fault(deed, marks, step=13), stallTimeout=STALL_SECONDS, maxRestarts=1)
    with caplog.at_level(logging.WARNING, "sparktorch"):
        model = estimator.fit(frame)
    error, _ = restarted(caplog)
    assert type(error) is RankStalledError
    assert error.what.startswith(words)
    assert error.where["pid"] in pids(marks)
    assert error.where["epoch"] == 2
    if deed == "hang":
        assert "time.sleep(1000)" in error.trace
        assert "faults.py" in error.trace
        assert "about to fail" in error.trace, "the last lines of the rank"
        assert "daemon.py" not in error.trace, "what Spark called before it"
    assert same(weights(model), calm)
    until(lambda: gone({error.where["pid"]}), seconds=GONE_SECONDS, what="the rank that stood still has ended")


def test_a_slow_rank_is_no_dead_one(frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path) -> None:
    # A step takes well below a millisecond. All 30 of them take longer than the timeout, and none by itself.
    slow = Fault("slow", tmp_path / "marks", seconds=1.2 * STALL_SECONDS / 30)
    assert same(weights(keeping(tmp_path, slow, stallTimeout=STALL_SECONDS).fit(frame)), calm)


def test_a_killed_executor_is_told_as_such_and_comes_back(
    frame: DataFrame, calm: dict[str, torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = tmp_path / "marks"
    with caplog.at_level(logging.WARNING, "sparktorch"):
        model = keeping(tmp_path, Fault("kill executor", marks, step=13), maxRestarts=1).fit(frame)
    error, told = restarted(caplog)
    assert type(error) is RankLostError
    assert error.where["rank"] == 1
    assert "was lost" in error.what
    assert told - happened(marks) < 2 * DETECTED_SECONDS
    assert same(weights(model), calm)


@pytest.fixture
def little_memory() -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            group = stack.enter_context(limited_memory(64))
        except OSError as error:
            pytest.skip(f"needs a memory control group that may be written: {error}")
        yield group


def test_a_rank_that_the_out_of_memory_killer_ended_is_told_as_such(
    frame: DataFrame, little_memory: Path, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    fault = Fault("fill memory", marks, step=2, group=little_memory)
    error, seconds = failure(keeping(tmp_path, fault), frame, marks)
    assert type(error) is RankLostError
    assert error.where["rank"] == 1
    assert error.what == "rank 1 was killed for want of memory while training"
    assert "spark.executor.memoryOverhead" in error.hint
    assert seconds < 2 * DETECTED_SECONDS


@pytest.mark.parametrize(("level", "shown"), [("WARNING", 1), ("INFO", 2)])
def test_what_a_rank_logs_and_prints_reaches_the_driver(
    level: str, shown: int, frame: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping(tmp_path, Fault("say", tmp_path / "marks", step=2), logLevel=level).fit(frame)
    said = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "sparktorch.ranks"]
    lines = [(logging.WARNING, "rank 1: WARNING mine: careful, 1"), (logging.INFO, "rank 1: about to fail")]
    assert sorted(said, reverse=True) == lines[:shown]


def test_an_exit_of_the_users_is_a_death_too(frame: DataFrame, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    error, seconds = failure(keeping(tmp_path, Fault("exit", marks, step=2)), frame, marks)
    assert type(error) is RankLostError
    assert error.where["rank"] == 1
    assert seconds < DETECTED_SECONDS


def test_an_exception_in_one_rank_is_the_drivers_with_the_last_lines_of_that_rank(
    frame: DataFrame, tmp_path: Path
) -> None:
    marks, rank = tmp_path / "marks", 0
    error, seconds = failure(keeping(tmp_path, Fault("raise", marks, rank=rank, step=2), maxRestarts=2), frame, marks)
    assert type(error) is RankError
    assert (error.where["rank"], error.where["epoch"], error.where["step"]) == (rank, 1, 2)
    assert 'raise ArithmeticError("planted")' in error.trace
    assert f"The last lines of rank {rank}:\nabout to fail\n" in error.trace
    assert seconds < DETECTED_SECONDS
    assert len(pids(marks)) == 2, "it was not tried again"
