"""What the system says of a process's memory."""

from __future__ import annotations

import math
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sparktorch.base import host_memory
from sparktorch.base.host_memory import available_bytes

MEBIBYTE = 1 << 20


def _left_of_address_space() -> float:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 64 * MEBIBYTE, resource.RLIM_INFINITY))
    return available_bytes()


def test_a_process_may_take_what_its_machine_has_and_its_address_space_holds() -> None:
    assert MEBIBYTE < available_bytes() < math.inf
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert 32 * MEBIBYTE < pool.submit(_left_of_address_space).result() <= 64 * MEBIBYTE


@pytest.mark.parametrize(
    ("version", "files", "stat"),
    [
        ("0::", ("memory.max", "memory.current"), "inactive_file"),
        ("7:memory:", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_the_group_with_the_least_left_counts_without_the_kernels_cache(
    version: str, files: tuple[str, str], stat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(folder: Path, limit: str, taken: int, cached: int) -> None:
        folder.mkdir(exist_ok=True)
        for name, text in ((files[0], limit), (files[1], str(taken)), ("memory.stat", f"anon 1\n{stat} {cached}\n")):
            (folder / name).write_text(text)

    kinds = version.split(":")[1]
    root = tmp_path / "root"
    monkeypatch.setitem(host_memory._GROUPS, kinds, (str(root), *files, stat))
    limited(root, "max" if not kinds else str(2**63 - 4096), 900, 0)
    limited(root / "outer", "1000", 900, 250)
    limited(root / "outer" / "inner", "2000", 600, 0)

    def left(path: str) -> list[float]:
        return [host_memory._left(folder, kinds) for folder in host_memory._folders(path, kinds)]

    assert left("/outer/inner")[:2] == [1400, 350]
    assert left("/outer/inner")[2] > 1e18
    assert left("/not/there")[-1] > 1e18  # a container that sees its own group as the root
    assert not host_memory._folders("/outer", "cpuset")
