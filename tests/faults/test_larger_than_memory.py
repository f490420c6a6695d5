"""A model that is larger than the memory of the driver, and of each worker, is trained, saved, loaded and scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import limited_memory
from tests.support.programs import run_python

MEBIBYTES, PROCESSES = 230, 12


@pytest.fixture
def groups() -> Iterator[str]:
    """Control groups for a process each."""
    with ExitStack() as stack:
        try:
            made = [str(stack.enter_context(limited_memory(MEBIBYTES))) for _ in range(PROCESSES)]
        except OSError as error:
            pytest.skip(f"needs memory control groups that may be written: {error}")
        yield ",".join(made)


def ran(folder: Path, groups: str, how: str) -> dict[str, Any]:
    program = "tests.faults.programs.larger_than_memory"
    out = run_python(folder, "-m", program, str(folder), groups, how, seconds=280)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.parametrize("strategy", ["zero3", "mesh"])
def test_no_process_has_memory_for_the_model(strategy: str, groups: str, tmp_path: Path) -> None:
    found = ran(tmp_path, groups, strategy)
    assert "error" not in found, found
    assert found["parameters"] > MEBIBYTES << 20
    assert found["losses"][1] < found["losses"][0]
    assert (found["finite"], found["scored"]) == (True, 64)
    assert found["apart"] < 1e-5
    assert found["processes"] >= 5  # the driver and four ranks; those that score may be the ranks'


def test_without_a_folder_for_the_model_its_ranks_are_killed(groups: str, tmp_path: Path) -> None:
    assert "killed for want of memory" in ran(tmp_path, groups, "whole")["error"]
