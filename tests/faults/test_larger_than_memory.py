"""A model that is larger than the memory of the driver, and of each worker, is trained, saved, loaded and scored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.cgroups import limited_memory
from tests.support.programs import run_python

MEBIBYTES, PROCESSES = 180, 16
STRATEGIES = ["zero3", "mesh"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("larger")
    with ExitStack() as stack:
        try:
            groups = [str(stack.enter_context(limited_memory(MEBIBYTES))) for _ in range(PROCESSES)]
        except OSError as error:
            pytest.skip(f"needs memory control groups that may be written: {error}")
        # At last what kills ranks.
        arguments = (str(folder), ",".join(groups), *STRATEGIES, "whole")
        out = run_python(folder, "-m", "tests.faults.programs.larger_than_memory", *arguments, seconds=280)
        yield json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_process_has_memory_for_the_model(strategy: str, found: dict[str, Any]) -> None:
    one = found[strategy]
    assert "error" not in one, one
    assert one["parameters"] > MEBIBYTES << 20
    assert one["losses"][1] < one["losses"][0]
    assert (one["finite"], one["scored"]) == (True, 64)
    assert one["apart"] < 1e-5
    assert one["processes"] >= 5  # the driver and four ranks; those that score may be the ranks'


def test_without_a_folder_for_the_model_its_ranks_are_killed(found: dict[str, Any]) -> None:
    assert "killed for want of memory" in found["whole"]["error"]
