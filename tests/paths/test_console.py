"""What a user's console shows of a fit that fails: our error, and none of Spark's log."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support.programs import ROOT
from tests.support.users import Pythons, pythons, shell

LINES = 8
OF_USERS_CODE = 7  # its heading, its frame and its exception
LABEL = "ColumnError: 1 label in column 'label' is not among classes 0 ... 2, for example 7"


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Pythons:
    return pythons(tmp_path_factory.mktemp("pythons"))


@pytest.fixture
def table() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame({"x": draw.normal(size=200), "y": draw.normal(size=200), "label": draw.integers(0, 3, 200)})


def shown(users: Pythons, folder: Path, table: pd.DataFrame, what: str = "", executor: Path | None = None) -> list[str]:
    """Runs the script on the table; returns the lines that are on its console when it ends."""
    table.to_parquet(folder / "rows.parquet")
    script = ROOT / "tests" / "paths" / "programs" / "failing.py"
    env = shell(users.driver, PYSPARK_PYTHON=str(executor or users.driver))
    command = [str(users.driver), str(script), "local[2]", what, str(folder / "rows.parquet")]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=180, check=False)
    assert done.returncode == 1
    _, console = (done.stdout + done.stderr).decode().split("begins\n")
    return [line.rpartition("\r")[2] for line in console.rstrip("\n").split("\n")]


def test_a_bad_label_is_told_in_a_few_lines(users: Pythons, table: pd.DataFrame, tmp_path: Path) -> None:
    table.loc[77, "label"] = 7
    lines = shown(users, tmp_path, table)
    assert len(lines) <= LINES, "\n".join(lines)
    assert LABEL in lines[-2]
    assert "index the labels with StringIndexer" in lines[-1]


def test_executors_without_the_package_are_told_in_a_few_lines(
    users: Pythons, table: pd.DataFrame, tmp_path: Path
) -> None:
    lines = shown(users, tmp_path, table, executor=users.executor)
    assert len(lines) <= LINES, "\n".join(lines)
    assert "ClusterError: the Python of the executors cannot start a rank: No module named 'sparktorch'" in lines[-2]
    assert "--py-files" in lines[-1]


def test_an_exception_of_the_users_is_told_with_the_users_own_frames_alone(
    users: Pythons, table: pd.DataFrame, tmp_path: Path
) -> None:
    lines = shown(users, tmp_path, table, "module")
    assert len(lines) <= LINES + OF_USERS_CODE, "\n".join(lines)
    assert any("RankError: KeyError while training: 'planted' [rank=1" in line for line in lines)
    assert lines[-2:] == ['    raise KeyError("planted")', "KeyError: 'planted'"]
    assert not any("sparktorch/train" in line or "site-packages" in line for line in lines)
