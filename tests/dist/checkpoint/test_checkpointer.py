"""One rank's saver: who may write and remove what, and that who saves is not taken for one who stands still."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.store import connect
from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.checkpointer import Checkpointer, Position
from sparktorch.train.checkpoint.directory import Directory
from sparktorch.train.checkpoint.store import CheckpointStore, Share
from tests.support.ranks import control_server
from tests.support.saving import LocalFiles, saved_steps, wait_for_saves
from tests.support.waiting import until

SHARE = Share({"module.x": (torch.zeros(3), [0])}, b"")


class Moves(Client):
    """A line that counts how often its rank has moved."""

    count = 0

    def moved(self) -> None:
        self.count += 1
        super().moved()


@pytest.fixture
def line() -> Iterator[Callable[[], Moves]]:
    with ExitStack() as servers:

        def opened() -> Moves:
            meeting = servers.enter_context(control_server()).rendezvous
            return Moves(partial(connect, meeting.host, meeting.port, meeting.prefix), World())

        yield opened


def config(folder: Path | str, **values: Any) -> CheckpointConfig:
    return CheckpointConfig(directory=str(folder), unit="step", **{"owner": "mine", **values})


def save(saver: Checkpointer, *steps: int) -> None:
    for step in steps:
        saver.save(Position(step=step), SHARE, None)
    wait_for_saves()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step-*")}


def test_an_attempt_that_wakes_up_after_a_later_one_has_begun_removes_and_adds_nothing(
    tmp_path: Path, line: Callable[[], Moves]
) -> None:
    with Checkpointer(config(tmp_path, keep=1), {}, World(), line()) as earlier:
        save(earlier, 10)
        with Checkpointer(config(tmp_path, restart=1), {}, World(), line()) as later:
            assert later.start is not None
            save(later, 60, 70)
            there = names(tmp_path)
            save(earlier, 100)
            assert names(tmp_path) == there
            with pytest.raises(PersistenceError, match="a later attempt of this one"):
                earlier.save(Position(step=110), SHARE, None)
            earlier.close(Position(step=110))
            assert names(tmp_path) == there
            assert not later.store.finished
            assert later.store.claimed_by("mine")


def test_another_fit_is_refused_and_one_that_has_lost_its_directory_ends_at_its_next_checkpoint(
    tmp_path: Path, line: Callable[[], Moves]
) -> None:
    with Checkpointer(config(tmp_path), {}, World(), line()) as first:
        with pytest.raises(PersistenceError, match="is being written by another fit") as caught:
            Checkpointer(config(tmp_path, owner="other"), {}, World(), line())
        assert "give each fit a directory of its own" in caught.value.hint
        save(first, 1)
        store = CheckpointStore(str(tmp_path), "b2")
        assert saved_steps(store) == [1]  # it is not disturbed
        store.directory.remove("claim.json")  # as after a host that stood still for half a minute
        store.claim("other")
        save(first, 2)
        with pytest.raises(PersistenceError, match="was taken by another fit"):
            first.save(Position(step=3), SHARE, None)
        first.close(Position(step=3))
    assert store.claimed_by("other")
    assert not store.finished


def test_checkpoints_of_a_newer_version_are_refused_and_stay(tmp_path: Path, line: Callable[[], Moves]) -> None:
    with Checkpointer(config(tmp_path), {}, World(), line()) as earlier:
        save(earlier, 10)
    (manifest,) = tmp_path.glob("step-*/manifest.json")
    content = json.loads(manifest.read_text())
    content["manifest"] |= {"format": 2, "what_this_version_does_not_know": True}
    manifest.write_text(json.dumps(content))
    before = manifest.read_text()
    with pytest.raises(PersistenceError, match="was written by a newer version of sparktorch") as caught:
        Checkpointer(config(tmp_path, restart=1), {}, World(), line())
    assert "update sparktorch" in caught.value.hint
    assert manifest.read_text() == before


def test_a_directory_that_is_not_shared_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with control_server() as server, ThreadPoolExecutor(2) as pool:
        meeting = server.rendezvous
        opened = partial(connect, meeting.host, meeting.port, meeting.prefix)
        savers = []
        for rank in range(2):
            world = World(rank=rank, world_size=2, host=f"host-{rank}")
            own = config(tmp_path / f"disk-of-host-{rank}")
            savers.append(pool.submit(Checkpointer, own, {}, world, Client(opened, world), seen_seconds=0.3))
        says = "is not the same directory here as on rank 0's host host-0"
        with savers[0].result(30), pytest.raises(PersistenceError, match=says) as caught:
            savers[1].result(30)
    assert "set a directory that all workers share" in caught.value.hint


@pytest.mark.parametrize(
    ("losses", "delta", "kept"),
    [((math.nan, 0.5, 0.9, 0.8), 0.0, [2, 4]), ((1.0, 0.875, 0.75, 0.5, 0.375, 0.25), 0.25, [4, 6])],
)
def test_the_best_checkpoint_has_a_loss_that_is_smaller_by_more_than_the_delta(
    losses: tuple[float, ...], delta: float, kept: list[int], tmp_path: Path, line: Callable[[], Moves]
) -> None:
    with Checkpointer(config(tmp_path, keep=1), {}, World(), line(), best_delta=delta) as saver:
        for step, loss in enumerate(losses, start=1):
            saver.save(Position(step=step), SHARE, loss)
            wait_for_saves()
    assert sorted(int(name.split("-")[1]) for name in names(tmp_path)) == kept


def test_only_checkpoints_of_attempts_that_are_named_are_removed(tmp_path: Path) -> None:
    for attempt in ("a1", "b2"):
        CheckpointStore(str(tmp_path), attempt).write_share(5, 0, SHARE)
    store = CheckpointStore(str(tmp_path), "c3")
    assert store.attempts() == {"a1", "b2"}
    store.keep(set(), attempts={"a1", "c3"})
    assert names(tmp_path) == {"step-000000005-b2"}


def test_a_restart_after_the_end_of_the_training_goes_on_from_its_last_checkpoint(
    tmp_path: Path, line: Callable[[], Moves]
) -> None:
    with Checkpointer(config(tmp_path), {}, World(), line()) as first:
        save(first, 1, 2)
        first.close(Position(step=2))
    # The rank is lost before the driver has its result, and so may the next one be.
    for restart in (1, 2):
        with Checkpointer(config(tmp_path, restart=restart), {}, World(), line()) as again:
            assert again.start is not None
            assert again.start.step == 2
            assert not again.store.finished, "for this attempt may be lost, too, and the fit be gone on with by hand"
    again.close(Position(step=2))
    with Checkpointer(config(tmp_path, owner="another fit"), {}, World(), line()) as other:
        assert other.start is None
    assert names(tmp_path) == set()


def test_a_claim_that_an_earlier_attempt_renews_too_late_is_taken_back(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    earlier = CheckpointStore(str(tmp_path), "a1").claim("mine", 0)
    stale = directory.read("claim.json")
    later = CheckpointStore(str(tmp_path), "b2").claim("mine", 1)
    directory.put("claim.json", stale)  # it had looked before the later one came, and writes after
    later.renew()
    assert CheckpointStore(str(tmp_path), "b2").claimed_by("mine")
    with pytest.raises(PersistenceError, match="a later attempt of this one"):
        earlier.renew()
    with pytest.raises(PersistenceError, match="a later attempt of this one"):
        CheckpointStore(str(tmp_path), "c3").claim("mine", 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_one_of_two_fits_gets_a_directory_on_a_file_system_without_hard_links_and_syncs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def unknown(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "fsync", unknown)
    mine = CheckpointStore(str(tmp_path), "a1").claim("mine")
    with pytest.raises(PersistenceError, match="being written by another fit"):
        CheckpointStore(str(tmp_path), "b2").claim("theirs")
    with pytest.raises(FileExistsError):
        Directory(str(tmp_path)).put("claim.json", b"{}", new=True)
    mine.renew()
    assert names(tmp_path) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["claim.json"]


def test_nobody_renews_the_claim_once_the_block_is_left_or_could_not_be_entered(
    tmp_path: Path, line: Callable[[], Moves]
) -> None:
    def claiming() -> bool:
        return any(thread.name == "sparktorch-claim" for thread in threading.enumerate())

    with Checkpointer(config(tmp_path), {}, World(), line()) as first:
        save(first, 1)
        assert claiming()
    assert not claiming()
    with pytest.raises(PersistenceError, match="another configuration"):
        Checkpointer(config(tmp_path), {"other": "job"}, World(), line())
    assert not claiming()


class Slow(LocalFiles):
    """The local files; reading and writing those of ranks takes as long as the test wants."""

    protocol = "slow"
    until: Callable[[], bool] = staticmethod(lambda: True)

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._wait(path)
        return super().open(path, *arguments, **options)

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> None:
        self._wait(path)
        super().pipe_file(path, *arguments, **options)

    def _wait(self, path: str) -> None:
        if "rank-" in path:
            until(Slow.until, seconds=60, what="the test goes on")


fsspec.register_implementation("slow", Slow, clobber=True)


def test_the_claim_is_renewed_while_checkpoints_are_read(
    tmp_path: Path, line: Callable[[], Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(config(tmp_path), {}, World(), line()) as first:
        save(first, 1)
    before = (tmp_path / "claim.json").read_bytes()
    claims = set[bytes]()

    def renewed_twice() -> bool:
        claims.add((tmp_path / "claim.json").read_bytes())
        return len(claims - {before}) > 2

    monkeypatch.setattr(Slow, "until", renewed_twice)
    with Checkpointer(config(f"slow://{tmp_path}", restart=1), {}, World(), line(), claim_seconds=0.05) as second:
        assert second.start is not None


def test_a_rank_moves_with_what_it_reads_and_writes(tmp_path: Path) -> None:
    moves: list[None] = []
    directory = Directory(f"memory://{tmp_path}", lambda: moves.append(None))
    content = bytes(130 << 20)  # in parts of 64 MiB, and read in parts of 4
    directory.put("rank-00000.pt", content)
    assert len(moves) == 3
    assert directory.read("rank-00000.pt") == content
    assert len(moves) > 3
    moves.clear()
    assert directory.measure("rank-00000.pt")["bytes"] == len(content)
    assert len(moves) == 33


def test_a_rank_that_waits_for_the_shares_of_others_does_not_stand_still(tmp_path: Path) -> None:
    with control_server() as server, ThreadPoolExecutor(1) as pool:
        meeting = server.rendezvous
        opened = partial(connect, meeting.host, meeting.port, meeting.prefix)
        line, other = (Moves(opened, World(rank=rank, world_size=2)) for rank in range(2))
        other.post("start", {})
        with Checkpointer(config(tmp_path), {}, World(world_size=2), line) as main:
            main.save(Position(step=1), SHARE, None)
            second = pool.submit(main.save, Position(step=2), SHARE, None)
            before = line.count
            until(lambda: line.count >= before + 2, seconds=60, what="the rank has moved twice")
            assert not second.done()
            for step in (1, 2):
                other.post(f"saved/{step}", {"files": {}})
            second.result(30)
            main.close(Position(step=2))
    assert main.store.finished


class Witness(Client):
    """A line that remembers which threads have said that its rank waits, or waits no more."""

    said: set[int]

    @property
    def _waiting(self) -> bool:
        return self._waits

    @_waiting.setter
    def _waiting(self, waits: bool) -> None:
        self._waits = waits
        self.__dict__.setdefault("said", set()).add(threading.get_ident())


def test_only_the_thread_that_trains_says_that_its_rank_waits() -> None:
    with control_server() as server, ThreadPoolExecutor(1) as pool:
        meeting = server.rendezvous
        client = Witness(partial(connect, meeting.host, meeting.port, meeting.prefix), World())
        saving = pool.submit(client.collect, "saved/1")
        client.agree("start", {})
        client.post("saved/1", {})
        assert saving.result(30) == [{}]
    assert client.said == {threading.get_ident()}
