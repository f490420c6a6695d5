"""One directory for all ranks of a fit, and for one fit at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.store import connect
from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.checkpointer import Checkpointer, Position
from sparktorch.train.checkpoint.store import CheckpointStore, Share
from tests.support.nets import Watched
from tests.support.ranks import control_server, train_on
from tests.support.resume import job_for, parts
from tests.support.waiting import until

SHARE = Share([{"module.x": (torch.zeros(3), [0])}], b"")


def test_a_directory_that_is_not_shared_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with control_server() as server, ThreadPoolExecutor(2) as pool:
        meeting = server.rendezvous
        opened = partial(connect, meeting.host, meeting.port, meeting.prefix)
        savers = []
        for rank in range(2):
            world = World(rank=rank, world_size=2, host=f"host-{rank}")
            config = CheckpointConfig(directory=str(tmp_path / f"disk-of-host-{rank}"), owner="me")
            savers.append(pool.submit(Checkpointer, config, {}, world, Client(opened, world), seen_seconds=0.3))
        with savers[0].result(30) as first:
            assert first.start is None
            with pytest.raises(
                PersistenceError, match="is not the same directory here as on rank 0's host host-0"
            ) as caught:
                savers[1].result(30)
    assert "set a directory that all workers share" in caught.value.hint


def test_of_two_jobs_on_a_directory_the_second_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    options = {"module": partial(Watched, str(tmp_path), slow=0, seconds=0.1)}
    expected, _ = train_on(parts(2), job_for(tmp_path / "calm", **options))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(train_on, parts(2), job_for(tmp_path, owner="first", **options))
        until((tmp_path / "checkpoints" / "claim.json").exists, seconds=60, what="the first has begun")
        with pytest.raises(PersistenceError, match="is being written by another fit") as caught:
            train_on(parts(2), job_for(tmp_path, owner="second", **options))
        assert not first.done()
        found, _ = first.result(60)
    assert "give each fit a directory of its own" in caught.value.hint
    assert caught.value.where["rank"] == 0
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_fit_that_has_lost_its_directory_ends_at_its_next_checkpoint(tmp_path: Path) -> None:
    with control_server() as server:
        meeting = server.rendezvous
        client = Client(partial(connect, meeting.host, meeting.port, meeting.prefix), World())
        store = CheckpointStore(str(tmp_path), "b2")
        config = CheckpointConfig(directory=str(tmp_path), owner="mine")
        with Checkpointer(config, {}, World(), client, claim_seconds=0.5) as saver:  # not before it is the other's
            saver.save(Position(step=1), SHARE, None)
            store.directory.remove("claim.json")  # as after a host that stood still for half a minute
            store.claim("other")
            for thread in threading.enumerate():
                if thread.name == "sparktorch-claim":
                    thread.join(30)
            with pytest.raises(PersistenceError, match="was taken by another fit"):
                saver.save(Position(step=2), SHARE, None)
            saver.close(Position(step=2))
    assert store.claimed_by("other"), "and leaves it to that one"
    assert not store.finished
