"""What the executors' answers mean, one planted fact at a time, and what becomes of findings."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import FLOORS, ExecutorReport, Expected, Finding, diagnose, refuse
from tests.support.programs import ROOT

PACKAGES = {
    "torch": {"version": "2.13.0+cpu"},
    "numpy": {"version": "2.4.6"},
    "pyarrow": {"version": "25.0.1"},
    "safetensors": {"version": "0.8.0"},
    "sparktorch": {"version": "0.1.0", "code": "abc"},
    "pandas": {"version": "2.3.3"},
}
GIB = 1 << 30


def answer(rank: int = 0, **facts: Any) -> ExecutorReport:
    well: dict[str, Any] = {
        "host": f"10.0.0.{rank}",
        "executor": f"10.0.0.{rank}:4040",
        "python": "3.11.7",
        "executable": "/opt/python",
        "packages": PACKAGES,
        "driver": None,
        "shared_memory": 8 * GIB,
        "disks": {"/data": 90 * GIB},
        "gpus": [],
        "cuda_visible_devices": None,
        "cuda": 0,
        "gpu_uuids": [],
        "checkpoint": None,
        "peers": {},
        "files": None,
    }
    return ExecutorReport(rank=rank, **{**well, **facts})


def with_package(name: str, **found: str) -> dict[str, dict[str, str]]:
    return {**PACKAGES, name: found}


def problems(*answers: ExecutorReport, **expected: Any) -> list[Finding]:
    measure = Expected(**{"packages": PACKAGES, "driver": "10.0.1.1", "world_size": len(answers), **expected})
    return [finding for finding in diagnose(answers, measure) if finding.status != "ok"]


def test_where_all_is_well_each_check_says_so_once() -> None:
    answers = [answer(rank, files=[0, 1]) for rank in range(2)]
    measure = Expected(packages=PACKAGES, driver="10.0.1.1", checkpoint_dir="s3://b/c", world_size=2)
    found = diagnose(answers, measure)
    assert {finding.status for finding in found} == {"ok"}
    checks = [finding.check for finding in found]
    assert len(set(checks)) == len(checks)
    assert set(checks) == {
        *("packages", "driver-reachable", "peers-reachable", "gpu-addresses"),
        *("shared-memory", "local-disk", "checkpoint-dir"),
    }


@pytest.mark.parametrize(
    ("check", "status", "facts", "says"),
    [
        (
            "packages",
            "failure",
            {"packages": with_package("torch", error="ModuleNotFoundError: No module named 'torch'")},
            "torch cannot be imported by /opt/python: ModuleNotFoundError",
        ),
        ("packages", "failure", {"packages": with_package("torch", version="2.9.1")}, "torch is 2.9.1, and a rank"),
        ("packages", "warning", {"packages": with_package("torch", version="2.12.0")}, "on the driver 2.13.0"),
        ("packages", "failure", {"packages": with_package("sparktorch", version="0.0.9", code="abc")}, "is 0.0.9"),
        ("packages", "warning", {"packages": with_package("sparktorch", version="0.1.0", code="d")}, "driver's code"),
        ("driver-reachable", "failure", {"driver": "timed out"}, "the driver at 10.0.1.1: timed out"),
        ("peers-reachable", "failure", {"peers": {"rank 1 at 10.0.0.1": "refused"}}, "rank 1 at 10.0.0.1: refused"),
        ("shared-memory", "warning", {"shared_memory": 64 << 20}, "/dev/shm has 64 MiB free"),
        ("local-disk", "failure", {"disks": {"/data": 1 << 20}}, "/data has 1 MiB free"),
        ("gpu-addresses", "failure", {"gpus": ["5"], "cuda": 0}, "GPU 5, device 5, but torch sees 0"),
        (
            "gpu-addresses",
            "failure",
            {"gpus": ["2"], "cuda": 2, "cuda_visible_devices": "0,1"},
            "GPU 2, which CUDA_VISIBLE_DEVICES=0,1 hides",
        ),
    ],
)
def test_one_executor_with_one_fault(check: str, status: str, facts: dict[str, Any], says: str) -> None:
    (found,) = problems(answer(0, **facts), answer(1))
    assert (found.check, found.status) == (check, status)
    assert says in found.found
    assert found.where["host"] == "10.0.0.0"
    assert found.setting
    assert found.value
    assert found.advice


def test_a_patch_release_or_another_build_is_no_difference() -> None:
    assert not problems(answer(packages=with_package("torch", version="2.13.1+cu128")))


def test_pandas_is_missed_where_spark_needs_it() -> None:
    lean = answer(packages={name: found for name, found in PACKAGES.items() if name != "pandas"})
    assert not problems(lean)
    (found,) = problems(lean, pandas=True)
    assert "pandas cannot be imported by /opt/python: it is not installed" in found.found


def test_what_the_tasks_of_an_executor_share_is_told_once() -> None:
    place = {"host": "10.0.0.0", "executor": "10.0.0.0:4040"}
    (found,) = problems(*(answer(rank, driver="timed out", **place) for rank in range(4)))
    assert found.where == place


def test_the_address_on_the_way_to_the_executor_is_what_to_set() -> None:
    (found,) = problems(answer(driver="refused"), towards=lambda host: f"towards-{host}")
    assert (found.setting, found.value) == ("spark.driver.host", "towards-10.0.0.0")
    assert "such as towards-10.0.0.0" in found.advice


def test_one_gpu_in_two_hands_is_found_by_its_uuid() -> None:
    same = {"host": "a", "gpus": ["0"], "cuda": 1, "gpu_uuids": ["GPU-1"]}
    (found,) = problems(answer(0, **same), answer(1, **same))
    assert "the GPU GPU-1 was given to tasks 0, 1" in found.found
    isolated = {**same, "gpu_uuids": ["GPU-2"]}  # in containers every device is number 0
    assert not problems(answer(0, **same), answer(1, **isolated))


def test_idle_gpus_are_worth_a_warning() -> None:
    (found,) = problems(*(answer(rank, host="a", cuda=2) for rank in range(3)))
    assert (found.status, found.setting) == ("warning", "numWorkers")
    assert "3 ranks share 2 GPUs" in found.found
    assert not problems(*(answer(rank, host="a", cuda=2) for rank in range(3)), device="cpu")


def test_checkpoints_need_a_directory_that_all_can_write_and_see() -> None:
    here = {"checkpoint_dir": "/data"}
    (found,) = problems(answer(0, checkpoint="OSError: read-only"), answer(1, files=[1]), **here)
    assert found.where["rank"] == 0
    assert "cannot keep a file in /data: OSError: read-only" in found.found
    alone = problems(answer(0, files=[0]), answer(1, files=[1]), **here)
    assert [finding.where["rank"] for finding in alone] == [0, 1]
    assert alone[0].found == "does not see in /data what other tasks have written there"
    assert not problems(answer(0, checkpoint="not asked about"))


def test_a_relative_directory_of_checkpoints_is_said_to_be_another_one_in_each_process() -> None:
    here, why = (
        {"checkpoint_dir": "run/7"},
        "the path is relative, and each process takes it from its own working folder",
    )
    (alone,) = problems(answer(0, files=[0]), **here)
    assert (alone.status, alone.found) == ("warning", f"run/7: {why}")
    assert "an absolute path" in alone.advice
    apart = problems(answer(0, files=[0]), answer(1, files=[1]), **here)
    assert {finding.found for finding in apart} == {f"does not see in run/7 what other tasks have written there: {why}"}
    assert not problems(answer(0, files=[0]), checkpoint_dir="s3://bucket/run")


def test_the_floors_are_those_of_the_distribution() -> None:
    lines = re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {name: floor for name, floor in lines if name in FLOORS} == FLOORS


FINE = Finding(check="slots", status="ok", found="4 slots")
DOUBTFUL = Finding(
    check="shared-memory", status="warning", found="/dev/shm has 64 MiB free", where={"host": "a"}, hint="give it more"
)
FATAL = Finding(
    check="speculation", status="failure", found="speculation is on", setting="spark.speculation", value="false"
)


def test_a_finding_has_the_same_keys_whatever_it_says() -> None:
    for finding in (FINE, DOUBTFUL, FATAL):
        form = json.loads(json.dumps(asdict(finding)))
        assert list(form) == ["check", "status", "found", "where", "setting", "value", "hint"]
        assert Finding(**form) == finding


def test_warnings_are_logged_and_the_first_failure_raised(caplog: pytest.LogCaptureFixture) -> None:
    later = Finding(check="slots", status="failure", found="no slots")
    with caplog.at_level(logging.WARNING, "sparktorch"), pytest.raises(ClusterError) as caught:
        refuse([FINE, DOUBTFUL, FATAL, later])
    assert str(caught.value) == "speculation is on\n  -> set spark.speculation=false [ST-SPECULATION]"
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/shm has 64 MiB free [host=a]\n  -> give it more [ST-SHARED-MEMORY]"
    ]


def test_a_warning_of_many_places_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    there = [replace(DOUBTFUL, where={"host": f"host-{number}"}) for number in range(1000)]
    with caplog.at_level(logging.WARNING, "sparktorch"):
        refuse([*there, replace(DOUBTFUL, found="another")])
    first, second = (record.getMessage() for record in caplog.records)
    assert "[host=host-0]" in first
    assert first.endswith("... and in 999 other places")
    assert second.startswith("another")
