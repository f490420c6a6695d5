"""When ranks end without raising: once the driver knows the root cause, and not before."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from sparktorch.base.world import World
from sparktorch.distributed.client import Cancelled, Client, PeerFailure
from sparktorch.distributed.process_group import abandon, hang_up
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.errors import ColumnError, RankLostError
from sparktorch.spark.launch import barrier_job
from sparktorch.spark.launch.barrier_job import Launch
from tests.support.ranks import in_group, watch
from tests.support.waiting import until

LOST = PeerFailure("another rank failed")
BAD = ColumnError("column 'a' has 3 null values", column="a")


def test_a_root_cause_is_acknowledged_to_all_ranks(server: ControlServer, clients: list[Client]) -> None:
    assert server.acknowledge() is None
    clients[1].fail(BAD)
    failure = server.acknowledge()
    assert failure is not None
    assert failure.what == BAD.what
    assert clients[1].is_heard(BAD)
    assert clients[0].is_heard(LOST)
    ended = RootCause(watch(server, 2)).explain_ended(None)
    assert ended is not None
    assert ended.to_dict() == failure.to_dict()


def test_a_module_that_ranks_lack_is_told_with_the_file_of_this_process(
    server: ControlServer, clients: list[Client]
) -> None:
    clients[1].fail(ModuleNotFoundError("No module named 'pytest'"))
    ended = RootCause(watch(server, 2)).explain_ended(None)
    assert ended is not None
    assert ended.hint.endswith(f"spark.addArtifacts; this process has it from {pytest.__file__}")
    assert ended.where["rank"] == 1


def test_a_consequence_alone_is_not_and_its_rank_raises(server: ControlServer, clients: list[Client]) -> None:
    clients[0].fail(LOST)
    assert server.acknowledge() is None
    assert not clients[0].is_heard(LOST)
    assert clients[0].is_heard(Cancelled("the fit was cancelled"))


def test_a_rank_whose_driver_does_not_answer_raises(server: ControlServer, clients: list[Client]) -> None:
    clients[0].fail(BAD)
    assert not clients[0].is_heard(BAD)


def test_the_driver_raises_itself_where_a_rank_does_not_end(server: ControlServer, clients: list[Client]) -> None:
    monitor = watch(server, 2)
    monitor.give_time_to_end()
    clients[0].fail(BAD)
    monitor.give_time_to_end()  # from now on, ranks have two seconds
    time.sleep(2.1)
    with pytest.raises(ColumnError, match="3 null values"):
        monitor.give_time_to_end()


def test_a_job_without_errors_has_no_failure(server: ControlServer) -> None:
    assert RootCause(watch(server, 2)).explain_ended(None) is None


@pytest.mark.parametrize(("asked", "paused"), [(True, True), (True, False), (False, True)])
def test_an_executor_that_goes_as_soon_as_its_rank_has_paused_is_no_lost_worker(
    asked: bool, paused: bool, server: ControlServer, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        "barrier task ResultTask(3, 1) finished unsuccessfully.\nExecutorLostFailure (executor 1 exited unrelated to "
    )
    error = RuntimeError(said + "to the running tasks) Reason: Executor decommission.")
    job = SimpleNamespace(rows=[], error=error, start=lambda: None, wait=lambda _: True, is_starved=lambda: False)
    for name, value in (("control_server", server), ("_collector", None), ("Job", job)):
        monkeypatch.setattr(barrier_job, name, lambda *_, value=value: value)
    monkeypatch.setattr(server, "close", lambda: None)  # the fixture closes it
    if asked:
        server.pause()
    for client in clients:
        with client.beating():
            client.enter("training")
            client.pause.paused = paused  # or it has returned what it was to return
    run: Any = partial(barrier_job.run_ranks, SimpleNamespace(sparkSession=None), None, Launch(world_size=2), Mock())
    if asked and paused:
        assert run() == [({"paused": True}, b"")] * 2
    else:
        with pytest.raises(RankLostError, match="rank 1 died while training: its executor 1 was lost"):
            run()


def _one_fails(world: World, mark: Path) -> bool:
    """Rank 1 fails, and lives on; returns whether rank 0, which waits for its part of a sum, got an error by then."""
    if world.is_main:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))
        mark.touch()
        return True
    try:
        _fail()
    except ArithmeticError as error:
        abandon(error, lambda _: None)
        hang_up(error)
    with suppress(AssertionError):
        until(mark.exists, seconds=10, what="the other rank has got an error")
    return mark.exists()


def _fail() -> None:
    held = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    assert held
    raise ArithmeticError


def test_peers_in_a_collective_learn_of_a_rank_that_fails_and_lives_on(tmp_path: Path) -> None:
    assert in_group(2, _one_fails, tmp_path / "mark", seconds=60) == [True, True]
