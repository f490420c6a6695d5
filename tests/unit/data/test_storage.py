"""Spools: what goes in piece by piece comes out, wherever it was kept, and nothing is left of it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparktorch.data.storage import RowStorage, Runs, local_directory
from sparktorch.errors import ClusterError
from tests.support.programs import run_python

KINDS: dict[str, Callable[[Path], RowStorage]] = {
    "memory": lambda folder: RowStorage(),
    "disk": lambda folder: RowStorage(folder, budget=0),
    "within the budget": lambda folder: RowStorage(folder, budget=10**6),
    "beyond the budget": lambda folder: RowStorage(folder, budget=100),
}


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowStorage]:
    made = KINDS[request.param](tmp_path)
    yield made
    assert not list(tmp_path.iterdir()), "files on disk have no names"
    made.close()
    made.close()


class Unmovable(mmap.mmap):
    """Memory of a system that cannot move pages, macOS for one."""

    def resize(self, newsize: int) -> None:
        raise SystemError("mmap: resizing not available--no mremap()")


@pytest.mark.parametrize(("budget", "memory"), [(10**9, mmap.mmap), (10**9, Unmovable), (50 * 10**6, mmap.mmap)])
def test_rows_keep_their_order_in_memory_that_grows(
    tmp_path: Path, budget: int, memory: type[mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "mmap", memory)  # stands for another system; the spool is as it is
    draw = np.random.default_rng(0)
    parts = [draw.integers(0, 255, (rows, 1 << 20), np.uint8) for rows in (20, 0, 31, 1, 20)]
    whole = np.concatenate(parts)
    for found in ("finished", "read"):
        storage = RowStorage(tmp_path, budget=budget)
        spool = storage.spool(np.uint8, (1 << 20,))
        for part in parts:
            spool.append(part)
        assert storage.on_disk == (budget < whole.nbytes)
        if found == "finished":
            assert (spool.finish() == whole).all()
        else:
            runs = Runs(np.array([60, 30, 0]), np.array([72, 35, 1]))
            assert (spool.read(runs) == whole[[*range(60, 72), *range(30, 35), 0]]).all()
        storage.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_shard_that_reads_its_rows_never_holds_them_twice(tmp_path: Path) -> None:
    assert float(run_python(tmp_path, "-m", "tests.support.growth")) < 1.4


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (2, 3)), ("bool", ()), ("int64", (0,))])
@pytest.mark.parametrize("sizes", [(3, 0, 1, 50), (0, 10)], ids=["in pieces", "at once"])
def test_rows_come_back_as_one_array_of_ones_own(
    storage: RowStorage, dtype: str, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    spool, other, draw = storage.spool(dtype, shape), storage.spool(np.int64), np.random.default_rng(0)
    parts = [np.asfortranarray(draw.integers(0, 2, (rows, *shape)).astype(dtype)) for rows in sizes]
    whole = np.concatenate(parts)
    for number, part in enumerate(parts):
        part.setflags(write=False)
        spool.append(part)
        other.append(np.array([number]))
    assert spool.nbytes == whole.nbytes
    if shape != (0,):  # of rows without bytes, none come back from disk
        assert (spool.read(Runs.of(np.array([7, 8, 2]))) == whole[[7, 8, 2]]).all()
        found = spool.finish()
        assert (found.dtype, found.shape, found.flags.c_contiguous) == (whole.dtype, whole.shape, True)
        assert (found == whole).all()
        found[:] = 0
        assert (np.concatenate(parts) == whole).all()
    assert other.finish().tolist() == list(range(len(parts)))


def test_runs_of_rows_come_back_in_their_order(storage: RowStorage) -> None:
    spool = storage.spool(np.float32, (3,))
    values = np.arange(600, dtype=np.float32).reshape(200, 3)
    for start in range(0, 200, 7):
        spool.append(values[start : start + 7])
    for rows in ([], [5], [0, 1, 2, 199], [8, 9, 3, 3, 4], list(range(200))):
        index = np.array(rows, np.int64)
        found = spool.read(Runs.of(index))
        assert found.dtype == np.float32
        assert found.tolist() == values[index].tolist()
        found[:] = 0  # a copy
    assert (spool.read(Runs.of(np.arange(200))) == values).all()


@given(rows=st.lists(st.integers(0, 20)))
def test_runs_hold_the_rows_they_are_of(rows: list[int]) -> None:
    runs = Runs.of(np.array(rows, np.int64))
    assert [row for start, stop in zip(runs.starts, runs.stops, strict=True) for row in range(start, stop)] == rows
    assert runs.count == len(rows)
    assert len(runs.starts) == (1 + sum(b != a + 1 for a, b in pairwise(rows)) if rows else 0)


def test_a_budget_is_for_all_spools_together(tmp_path: Path) -> None:
    storage = RowStorage(tmp_path, budget=100)
    first, second = storage.spool(np.uint8), storage.spool(np.uint8)
    first.append(np.zeros(60, np.uint8))
    second.append(np.ones(40, np.uint8))
    assert not storage.on_disk
    second.append(np.ones(1, np.uint8))
    assert storage.on_disk
    assert (first.finish().sum(), second.finish().sum()) == (0, 41)
    storage.close()


def test_spools_that_grow_by_turns_beyond_their_extents_share_one_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    before = len(os.listdir("/proc/self/fd"))
    storage = RowStorage(tmp_path, budget=0)
    spools = [storage.spool(np.uint8, (7,)) for _ in range(3)]
    parts = [[draw.integers(0, 255, (rows, 7), np.uint8) for rows in (1, 149_796, 9, 700_000, 0, 5)] for _ in spools]
    for turn in zip(*parts, strict=True):
        for spool, part in zip(spools, turn, strict=True):
            spool.append(part)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    index = np.array([*range(149_700, 149_900), 3, *range(449_000, 450_000), 849_810], np.int64)
    for spool, rows in zip(spools, parts, strict=True):
        whole = np.concatenate(rows)
        assert (spool.read(Runs.of(index)) == whole[index]).all()
        assert (spool.finish() == whole).all()
    disk: Any = storage._disk
    assert os.fstat(disk.file.fileno()).st_blocks * 512 < 1.1 * disk.written
    storage.close()


def test_a_full_disk_is_named_with_what_was_to_go_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RowStorage(tmp_path, budget=0)
    storage.spool(np.float32).append(np.zeros(500_000, np.float32))
    disk: Any = storage._disk
    with open("/dev/full", "wb", buffering=0) as full, disk.file:
        monkeypatch.setattr(disk, "file", full)
        with pytest.raises(ClusterError, match=r"do not fit into '.*': 2\.0 MB are there, 4\.0 MB come next") as caught:
            storage.spool(np.uint8).append(np.zeros(4_000_000, np.uint8))
    assert str(tmp_path) in str(caught.value)
    assert "spark.local.dir" in str(caught.value)
    storage.close()


def test_a_file_that_was_cut_off_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    storage = RowStorage(tmp_path, budget=0)
    spool = storage.spool(np.int64)
    spool.append(np.arange(10))
    disk: Any = storage._disk
    os.ftruncate(disk.file.fileno(), 72)
    assert spool.read(Runs.of(np.arange(9))).tolist() == list(range(9))
    with pytest.raises(ClusterError, match=r"cannot read the rows of this worker back from .*8 bytes"):
        spool.read(Runs.of(np.arange(10)))
    storage.close()


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, numpy as np\n"
        "from sparktorch.data.storage import RowStorage\n"
        "spool = RowStorage(sys.argv[1], budget=0).spool(np.uint8)\n"
        "spool.append(np.zeros(1 << 20, np.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_of_a_host_spread_over_sparks_local_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b")]
    monkeypatch.setenv("SPARK_LOCAL_DIRS", ",".join([*folders, "/no/such/directory"]))
    with pytest.raises(ClusterError, match=r"cannot write to '.*/b'"):
        RowStorage(local_directory(1), budget=0)
    for folder in folders:
        Path(folder).mkdir()
    assert [local_directory(rank) for rank in range(3)] == [*folders, folders[0]]
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert local_directory(1) == str(tmp_path)
