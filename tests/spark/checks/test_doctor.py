"""Planted faults are found, where they are, with what to set; a cluster without any is let be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressor
from sparktorch.errors import ClusterError
from sparktorch.spark.checks.doctor import check_all, check_executors
from sparktorch.spark.checks.findings import Finding
from sparktorch.spark.launch.barrier_job import Launch
from tests.support.nets import Score
from tests.support.sessions import settings, slots_held
from tests.support.waiting import until

pytestmark = pytest.mark.landing


def regressor(**params: Any) -> TorchRegressor:
    given: dict[str, Any] = {"module": Score, "numWorkers": 2, "progress": False, "preflight": "full"}
    return TorchRegressor(**{**given, **params})


def bad(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings if finding.status != "ok"}


def test_where_all_is_well_it_says_so_and_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    threads = threading.active_count()
    found = check_all(spark, Launch(world_size=2), str(tmp_path / "checkpoints"))
    assert bad(found) == {}
    said = {finding.check: finding.found for finding in found}
    assert said["slots"] == "3, of which 2 are needed"
    assert "3 tasks wrote, read and deleted a file" in said["checkpoint-dir"], "one for every slot"
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() <= threads


def test_a_fit_with_full_preflight_trains(frame: DataFrame, tmp_path: Path) -> None:
    fitted = regressor(labelCol="target", checkpointDir=str(tmp_path)).fit(frame)
    assert fitted.summary.rows == 1001


def python_with(folder: Path, *packages: str) -> str:
    """A Python that has some of this environment's packages, and what lies in the folder already."""
    site = Path(pa.__file__).parents[1]
    for name in ("pyspark", "py4j", *packages):
        for path in (site / name, site / f"{name}.libs"):
            if path.exists():
                (folder / path.name).symlink_to(path)
    python = folder / "python"
    run = f'shift 2\nPYTHONPATH={folder} exec {sys.executable} -S -m pyspark.daemon "$@"'  # not these tests' daemon
    python.write_text(f"#!/bin/sh\ncd {folder}\n{run}\n")
    python.chmod(0o755)
    return str(python)


def python_of_another_version(folder: Path) -> str:
    """A Python that tells everybody it is 3.9."""
    lie = (
        "import sys\nclass V(tuple):\n    major, minor, micro = 3, 9, 1\nsys.version_info = V((3, 9, 1, 'final', 0))\n"
    )
    (folder / "sitecustomize.py").write_text(lie)
    python = folder / "python"
    run = f'shift 2\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} -m pyspark.daemon "$@"'
    python.write_text(f"#!/bin/sh\n{run}\n")
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def executors_run(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes executors run another Python, as `PYSPARK_PYTHON` would."""
    return lambda python: monkeypatch.setattr(spark.sparkContext, "pythonExec", python)


def test_packages_that_executors_lack_are_named_and_a_fit_is_refused(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, executors_run: Callable[[str], None]
) -> None:
    python = python_with(tmp_path, "numpy", "pyarrow", "safetensors")
    executors_run(python)
    found = [finding for finding in check_executors(spark, Launch(world_size=1)) if finding.status == "failure"]
    assert [finding.check for finding in found] == ["packages", "packages"]
    assert f"torch cannot be imported by {sys.executable}: ModuleNotFoundError" in found[0].found
    assert found[0].setting == "spark.pyspark.python"
    assert "sparktorch cannot be imported" in found[1].found
    assert "--py-files" in found[1].advice
    with pytest.raises(ClusterError, match=r"torch cannot be imported.*\[host=\S+, executor=\S+\]"):
        regressor(labelCol="target").fit(frame)


def test_tasks_that_cannot_even_start_say_why(
    spark: SparkSession, tmp_path: Path, executors_run: Callable[[str], None]
) -> None:
    for name in ("bare", "old"):
        (tmp_path / name).mkdir()
    here = ".".join(map(str, sys.version_info[:2]))
    for python, check, says in (
        (python_with(tmp_path / "bare", "numpy"), "packages", "tasks cannot start: No module named 'pyarrow'"),
        (python_of_another_version(tmp_path / "old"), "python", f"Python is 3.9, on the driver {here}"),
        ("/no/such/python", "python", "the executors have no /no/such/python"),
    ):
        executors_run(python)
        (found,) = check_executors(spark, Launch(world_size=1))
        assert (found.check, found.status, found.found) == (check, "failure", says)
        assert found.setting == "spark.pyspark.python"
        assert f"a Python {here}" in found.value
        assert f"the driver's is {sys.executable}" in found.hint


@pytest.fixture
def lost_driver(spark: SparkSession) -> Iterator[None]:
    """The executors are given an address where nobody listens: the driver binds to 127.0.0.1."""
    with settings(spark, {"spark.driver.host": "127.0.0.9"}):
        yield


@pytest.mark.usefixtures("lost_driver")
def test_a_driver_out_of_reach_is_found_by_a_real_connection(spark: SparkSession, frame: DataFrame) -> None:
    (found,) = bad(check_executors(spark, Launch(world_size=2))).values()
    assert (found.check, found.status, found.setting) == ("driver-reachable", "failure", "spark.driver.host")
    assert "does not reach the driver at 127.0.0.9: " in found.found
    assert "refused" in found.found
    assert found.value == "127.0.0.1"
    assert bad(check_executors(spark, Launch(world_size=2, rendezvous="rank0"))) == {}
    with pytest.raises(ClusterError, match=r"does not reach the driver(.|\n)*spark\.driver\.bindAddress"):
        regressor(labelCol="target").fit(frame)


def test_slots_that_other_jobs_hold_keep_nobody_waiting(spark: SparkSession, tmp_path: Path) -> None:
    with slots_held(spark, 1, tmp_path / "release"):
        found = check_executors(spark, Launch(world_size=2), str(tmp_path))
        assert "2 tasks wrote" in {finding.check: finding.found for finding in found}["checkpoint-dir"]
        (late,) = check_executors(spark, Launch(world_size=3), seconds=1)
        assert (late.check, late.status) == ("executors", "warning")
        assert "no answer within 1 s" in late.found
    tracker = spark.sparkContext.statusTracker()
    until(lambda: not tracker.getActiveStageIds(), seconds=60, what="the check that was late is cancelled")
