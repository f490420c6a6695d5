"""Checkpoints behave the same wherever they lie: in a folder, in memory, in an object store, which cannot rename."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch
from fsspec.implementations.memory import MemoryFileSystem

from sparktorch.errors import ClusterError, PersistenceError
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, read_tensors, snapshot
from tests.support.ranks import control_server, run_ranks, train_on
from tests.support.resume import STEPS, Counts, check_same_bits, job_for, killed, parts
from tests.support.s3 import object_store
from tests.support.saving import saved_steps
from tests.support.waiting import until

pytestmark = pytest.mark.landing

BUCKET = "runs"


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with object_store(BUCKET) as variables:
        yield variables


@pytest.fixture
def bucket(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "run")
    if request.param == "memory":
        return f"memory://{tmp_path}/run"
    found: str = request.getfixturevalue("bucket")
    return found


def write(store: CheckpointStore, step: int, numbers: int = 1000) -> None:
    share = snapshot({"module.x": torch.full((numbers,), float(step))}, {"step": step}, lambda _: True)
    files = store.write_share(step, 0, share)
    store.write_manifest(Manifest(step=step, epoch=0, step_in_epoch=step, world_size=1, job={}, files=files))


def assert_whole(store: CheckpointStore, manifest: Manifest) -> None:
    with store.local(manifest, lambda *_: True) as folder:
        assert store.read_rest(manifest, 0) == {"step": manifest.step}
        assert torch.equal(read_tensors(folder, 0, "module.")["x"], torch.full((1000,), float(manifest.step)))


def test_what_was_written_is_read_and_the_last_is_the_one_to_go_on_from(url: str) -> None:
    store = CheckpointStore(url)
    assert saved_steps(store) == []
    assert store.usable() == (None, [])
    for step in (9, 10, 11):
        write(store, step)
    manifest, problems = CheckpointStore(url).usable()
    assert manifest is not None
    assert (manifest.step, problems) == (11, [])
    assert_whole(store, manifest)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rank-00000.safetensors", lambda old: old[:-5] + b"\xff" + old[-4:]),
        ("rank-00000.pt", lambda old: old[:-9]),
        ("rank-00000.pt", None),
        ("manifest.json", lambda _: b""),
        ("manifest.json", None),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_used(
    name: str, damage: Callable[[bytes], bytes] | None, url: str
) -> None:
    store = CheckpointStore(url)
    for step in (1, 2):
        write(store, step)
    path = f"step-000000002/{name}"
    if damage:
        store.directory.put(path, damage(store.directory.read(path)))
    else:
        store.directory.remove(path)
    manifest, (problem,) = store.usable()
    assert manifest is not None
    assert manifest.step == 1
    assert name in str(problem)
    assert_whole(store, manifest)


def test_what_is_not_kept_is_removed_and_so_is_what_was_never_finished(url: str) -> None:
    for step in (1, 2, 3):
        write(CheckpointStore(url, "a1"), step)
    store = CheckpointStore(url, "b2")
    for step in (3, 4, 6):
        store.write_share(step, 0, snapshot({}, {}, lambda _: True))
    store.keep({2, 3}, before=5)
    assert saved_steps(store) == [6, 3, 2]
    assert sorted(store.directory.names()) == ["step-000000002-a1", "step-000000003-a1", "step-000000006-b2"]
    store.clear()
    assert saved_steps(store) == []


def test_an_earlier_attempt_that_still_writes_spoils_nothing(url: str) -> None:
    earlier, later = CheckpointStore(url, "a1"), CheckpointStore(url, "b2")
    earlier.write_share(7, 0, snapshot({"module.x": torch.zeros(9)}, {}, lambda _: True))
    write(later, 7)
    earlier.write_share(7, 0, snapshot({"module.x": torch.zeros(9)}, {}, lambda _: True))
    manifest, _ = later.usable()
    assert manifest is not None
    assert_whole(later, manifest)


def test_one_fit_has_a_directory_until_it_gives_it_back(url: str) -> None:
    store = CheckpointStore(url, "a1")
    claim = store.claim("mine")
    with pytest.raises(PersistenceError, match="is being written by another fit, 0 s ago"):
        CheckpointStore(url, "b2").claim("other")
    claim.renew()
    again = CheckpointStore(url, "c3").claim("mine")  # the next attempt does not wait for the one before
    with pytest.raises(PersistenceError, match="was taken by another fit"):
        claim.renew()
    store.release("other")
    again.renew()
    store.release("mine")
    CheckpointStore(url, "b2").claim("other")


@pytest.mark.parametrize("content", [b"", b'{"owner": "x", "attempt": "", "host": "", "time": []}'])
def test_a_claim_that_cannot_be_read_has_no_force(content: bytes, url: str) -> None:
    store = CheckpointStore(url)
    store.directory.put("claim.json", content)
    store.claim("mine").renew()
    assert store.claimed_by("mine")


def test_of_fits_that_begin_at_the_same_moment_one_has_the_directory(url: str) -> None:
    for round_ in range(5):
        ready, got = threading.Barrier(4), []

        def begin(name: str, folder: str, ready: threading.Barrier = ready, got: list[str] = got) -> None:
            store = CheckpointStore(folder, "a1")
            ready.wait()
            try:
                store.claim(name)
            except PersistenceError:
                return
            got.append(name)

        threads = [threading.Thread(target=begin, args=(f"fit-{n}", f"{url}/{round_}")) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1


class Unreachable(MemoryFileSystem):
    """Cannot be reached while a flag is set."""

    protocol = "unreachable"
    away = False

    def cat_file(self, path: str, **options: Any) -> bytes:
        self._reach()
        return bytes(super().cat_file(path, **options))

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._reach()
        return super()._open(path, *arguments, **options)

    def _reach(self) -> None:
        if Unreachable.away:
            raise TimeoutError("no answer from the name server")


def test_a_directory_that_cannot_be_reached_costs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    store = CheckpointStore("unreachable://run")
    for step in (1, 2):
        write(store, step)
    monkeypatch.setattr(Unreachable, "away", True)
    with pytest.raises(ClusterError, match="checkpointDir unreachable://run cannot be reached: TimeoutError: no ans"):
        store.usable()
    monkeypatch.setattr(Unreachable, "away", False)
    assert saved_steps(store) == [2, 1]


# Real ranks, and an object store


def test_a_training_that_was_killed_goes_on_to_the_same_bits_from_an_object_store(
    bucket: str, environment: dict[str, str], tmp_path: Path
) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    expected = train_on(parts(2), job_for(calm, Counts(calm)))
    killed(job_for(bucket, Counts(rough, rank=1, step=STEPS + 5), interval=3), 2, environment=environment)
    store = CheckpointStore(f"{bucket}/checkpoints")
    assert store.usable()[0] is not None
    found = train_on(parts(2), job_for(bucket, Counts(rough), interval=3), environment=environment)
    check_same_bits(found, expected)
    assert (rough / "steps-1").read_text() == (calm / "steps-1").read_text()
    assert saved_steps(store) == [3 * STEPS, 3 * STEPS - 3]  # the last two are kept, and nothing else is left
    assert len(store.directory.names()) == 3
    assert store.finished


def upload(url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    write(CheckpointStore(url), 2, numbers=10_000_000)


def test_killed_while_it_uploads_it_leaves_the_one_before(bucket: str, environment: dict[str, str]) -> None:
    store = CheckpointStore(bucket)
    write(store, 1)
    process = multiprocessing.get_context("forkserver").Process(target=upload, args=(bucket, environment))
    process.start()
    until(lambda: "step-000000002" in store.directory.names(), seconds=60, what="an upload begins")
    process.kill()
    process.join()
    assert not store.directory.exists("step-000000002/manifest.json")
    manifest, (problem,) = store.usable()
    assert manifest is not None
    assert manifest.step == 1
    assert "step-000000002/manifest.json was never finished" in str(problem)
    assert_whole(store, manifest)


def test_a_bucket_that_is_not_there_is_an_error_that_says_so(bucket: str, environment: dict[str, str]) -> None:
    with control_server() as server:
        run_ranks(server, parts(1), job_for("s3://nosuch"), environment=environment)
        failure, _ = server.first_failure()
    assert isinstance(failure, PersistenceError)
    assert "s3://nosuch/checkpoints cannot be written" in failure.what
    assert "bucket does not exist" in failure.what
