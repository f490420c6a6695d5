"""The notebooks run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, RUNNER, assert_it_answers

# Before a release all run; before a landing what no other ring runs so: a Pipeline with a search, and an own loop.
LANDING = {"own_loop", "quickstart"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in LANDING else pytest.mark.slow, id=path.stem) for path in NOTEBOOKS],
)
# The kernel's client leaves a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in RUNNER["code_of"](notebook):
        cell.outputs = []
    RUNNER["run"](notebook, str(tmp_path))
    assert_it_answers(path, notebook)
