"""The same fit on every kind of cluster that fits on one machine, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, SPARK_HOME, environment, run_python
from tests.support.waiting import until


def on(master: str, directory: Path, *requests: str, **settings: str) -> dict[str, Any]:
    """Carries out requests in one session on the master, `_` in its settings' names for `.`; returns their results."""
    names = json.dumps({name.replace("_", "."): value for name, value in settings.items()})
    out = run_python(directory, "-m", "tests.spark.programs.on_master", master, str(directory), names, *requests)
    results: dict[str, Any] = json.loads(out.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def on_local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = on("local[2]", tmp_path_factory.mktemp("local"), "fit")["fit"]
    return result


def same_as_on_local(result: dict[str, Any], on_local: dict[str, Any]) -> bool:
    return bool(result["weights"] == on_local["weights"] and result["round_trip"] and result["by_sql"])


def test_local_trains_and_keeps_its_model_bit_for_bit(on_local: dict[str, Any]) -> None:
    assert on_local["accuracy"] > 0.9
    assert on_local["round_trip"]
    assert on_local["by_sql"]


def test_executors_train_the_very_same_weights_and_not_on_gpus_that_they_lack(
    on_local: dict[str, Any], tmp_path: Path
) -> None:
    results = on("local-cluster[2,1,1024]", tmp_path, "fit on GPUs", "fit")
    assert results["fit on GPUs"]["error"] == "ClusterError"
    assert "the executors have no GPU" in results["fit on GPUs"]["message"]
    assert same_as_on_local(results["fit"], on_local)
    assert "connect" not in results["fit"]["session"]


def test_a_connect_server_trains_the_very_same_weights(on_local: dict[str, Any], tmp_path: Path) -> None:
    result = on("connect:local[2]", tmp_path, "fit")["fit"]
    assert same_as_on_local(result, on_local)
    assert "connect" in result["session"]


def test_gpu_addresses_reach_the_ranks_and_what_they_cannot_use_is_found_before(tmp_path: Path) -> None:
    # The executors' GPUs are made up: what Spark assigns is real, and what torch then says is too.
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["5"]}'\n""")
    script.chmod(0o755)
    gpu = {"amount": "1", "discoveryScript": str(script)}
    settings = {
        f"spark_{who}_resource_gpu_{name}": value for who in ("worker", "executor") for name, value in gpu.items()
    }
    results = on("local-cluster[2,1,1024]", tmp_path, "check", "fit on GPUs", **settings)

    fitted = results["fit on GPUs"]
    assert fitted["error"] == "ClusterError"
    assert "this rank was to use CUDA device 5, but torch sees 0" in fitted["message"]
    assert "gpu_addresses=['5']" in fitted["message"]

    findings = results["check"]["findings"]
    failures = [(one["check"], one["where"].get("rank")) for one in findings if one["status"] == "failure"]
    assert failures == [
        ("slots", None),
        *(("gpu-addresses", rank) for rank in (0, 1)),
        *(("checkpoint-dir", rank) for rank in (0, 1)),
    ]
    found = {one["check"]: one for one in findings}
    assert (found["slots"]["setting"], found["slots"]["value"]) == ("spark.executor.instances", "3")
    assert "Spark gives GPU 5, CUDA device 5, but torch sees 0" in found["gpu-addresses"]["found"]
    assert "does not see in relative/path what other tasks have written" in found["checkpoint-dir"]["found"]
    assert found["peers-reachable"]["found"] == "all 2 tasks reach their neighbours"
    assert len({one["where"]["executor"] for one in findings if "executor" in one["where"]}) == 2
    assert all(one["setting"] and one["value"] and one["hint"] for one in findings if one["status"] != "ok")


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers of one core each, from pyspark's own jars; yields the master's URL."""
    directory = tmp_path_factory.mktemp("standalone")
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = directory / f"{name}.log"
        command = [str(SPARK_HOME / "bin" / "spark-class"), *arguments, "--host", "127.0.0.1", "--webui-port", "0"]
        with log.open("wb") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment(), cwd=directory))
        return log

    try:
        log = start("master", "org.apache.spark.deploy.master.Master", "--port", "0")
        url = wait_for(log, r"Starting Spark master at (spark://\S+)")
        worker = ("org.apache.spark.deploy.worker.Worker", url, "--cores", "1", "--memory", "1g")
        logs = [start(f"worker{i}", *worker, "--work-dir", str(directory / f"work{i}")) for i in (0, 1)]
        for log in logs:
            wait_for(log, r"(Successfully registered) with master")
        yield url
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def wait_for(log: Path, pattern: str) -> str:
    """Returns what the first group of a pattern matches, as soon as it shows in a log."""
    found = until(
        lambda: re.search(pattern, log.read_text()),
        seconds=60,
        what=lambda: f"{pattern} in {log}:\n{log.read_text()[-2000:]}",
    )
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def executor_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with torch and pyarrow but without sparktorch, as the executors of a cluster have it."""
    import torch

    site = Path(torch.__file__).parents[1]
    wrapper = tmp_path_factory.mktemp("python") / "python"
    # Without the site module no .pth file is read, the one of the editable install among them.
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} -S "$@"\n')
    wrapper.chmod(0o755)
    plain = {**environment(), "PYTHONPATH": ""}
    for module, found in (("torch", 0), ("pyarrow", 0), ("sparktorch", 1)):
        done = subprocess.run(
            [str(wrapper), "-c", f"import {module}"], env=plain, cwd=wrapper.parent, capture_output=True
        )
        assert (done.returncode != 0) == bool(found), done.stderr
    return str(wrapper)


def test_spark_submit_trains_and_scores_on_a_standalone_cluster(
    standalone: str, executor_python: str, tmp_path: Path
) -> None:
    subprocess.run(["make", "zip"], cwd=ROOT, check=True, capture_output=True)
    py_files = f"{ROOT}/dist/sparktorch.zip,{ROOT}/jobs/models.py"
    env = environment(PYSPARK_PYTHON=executor_python, PYSPARK_DRIVER_PYTHON=sys.executable)
    output = ""
    for job in ("train", "score"):
        done = subprocess.run(
            [
                str(SPARK_HOME / "bin" / "spark-submit"),
                *("--master", standalone, "--properties-file", str(ROOT / "conf" / "spark-defaults-local.conf")),
                *("--conf", f"spark.pyspark.python={executor_python}", "--py-files", py_files),
                *(str(ROOT / "jobs" / f"{job}.py"), "--config", str(ROOT / "conf" / "digits.yaml")),
            ],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        output += done.stdout
    assert "by 2 workers" in output
    accuracy = re.search(r"held-out accuracy: (0\.\d+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.95
    assert list((tmp_path / "out" / "digits-scored").glob("*.parquet"))
