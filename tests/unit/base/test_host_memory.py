"""What the system says of a process's memory."""

from __future__ import annotations

import math
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sparktorch.base import host_memory
from sparktorch.base.host_memory import available_bytes, forget_peaks, peaks

MEBIBYTE = 1 << 20


def _left_of_address_space() -> float:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 64 * MEBIBYTE, hard))
    return available_bytes()


def test_a_process_may_take_what_its_machine_has_and_its_address_space_holds() -> None:
    assert MEBIBYTE < available_bytes() < math.inf
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert 32 * MEBIBYTE < pool.submit(_left_of_address_space).result() <= 64 * MEBIBYTE


def grouped(kinds: str, limits: tuple[str, ...], use: str, cache: str, root: Path) -> None:
    for folder, limit, taken, cached in (
        (root, "max", 900, 0),
        (root / "o", "1000", 900, 250),
        (root / "o/i", "2000", 600, 0),
    ):
        folder.mkdir()
        for name, text in ((limits[0], limit), (use, str(taken)), ("memory.stat", f"anon 1\n\n{cache} {cached}\n")):
            (folder / name).write_text(text.replace("max", "max" if not kinds else str(2**63 - 4096)))


@pytest.mark.parametrize("kinds", ["", "memory", "memory,hugetlb"])
def test_a_group_has_left_what_its_limit_its_use_and_the_kernels_cache_leave(
    kinds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kinds.partition(",")[0]
    _, limits, use, cache = host_memory._GROUPS[kind]
    monkeypatch.setitem(host_memory._GROUPS, kind, (str(tmp_path / "root"), limits, use, cache))
    grouped(kinds, limits, use, cache, tmp_path / "root")

    def left(path: str) -> list[float]:
        return host_memory._groups(path, kinds)

    assert left("/o/i") == [1400, 350, math.inf]
    assert left("/not/there")[-1] == math.inf  # a container that sees its own group as the root
    if not kinds:
        (tmp_path / "root/o/i/memory.high").write_text("700\n")  # from there on, the kernel slows a group down
        assert left("/o/i")[0] == 100
    (tmp_path / "root/o" / use).write_text("unknown\n")
    assert left("/o") == [1000, math.inf]
    assert not host_memory._groups("/o", "cpuset")


def test_what_yarn_counts_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # The groups that this machine has tests in are not YARN's.
    monkeypatch.setattr(host_memory, "_groups", lambda path, kinds: [math.inf])
    monkeypatch.setenv("CONTAINER_ID", "container_1_1_01_000002")
    assert available_bytes() == 0
    # A NodeManager may limit its containers by groups; those of this machine cannot be made here.
    monkeypatch.setattr(host_memory, "_groups", lambda path, kinds: [5 * MEBIBYTE])
    assert available_bytes() == 5 * MEBIBYTE


def test_the_peak_is_that_since_it_was_last_forgotten() -> None:
    hoard = bytearray(b"x" * 300_000_000)
    high = peaks("cpu")
    del hoard
    forget_peaks("cpu")
    low = peaks("cpu")
    assert low.keys() == {"peak_memory"}
    assert high["peak_memory"] - low["peak_memory"] > 250_000_000
