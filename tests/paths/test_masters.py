"""Clusters with what the walks do not have: messages that are too large for Connect, and GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.programs import connect_port, run_python


def on(master: str, directory: Path, *requests: str, **settings: str) -> dict[str, Any]:
    names = json.dumps({name.replace("_", "."): value for name, value in settings.items()})
    out = run_python(directory, "-m", "tests.paths.programs.on_master", master, str(directory), names, *requests)
    results: dict[str, Any] = json.loads(out.splitlines()[-1])
    return results


def test_on_connect_fits_hold_more_than_a_message_streams_get_large_models_loops_run_and_rdds_are_refused(
    tmp_path: Path,
) -> None:
    with connect_port():
        results = on("connect:local[2]", tmp_path, "much to send", "stream", "loop", "rdds")
    assert results["loop"]["ranks"] == [0, 1]
    assert results["loop"]["far"] < 1e-5
    assert results["much to send"]["arrived"] == [str(33 << 20)] * 2
    assert results["stream"]["rows"] == 20
    assert "Spark Connect has no RDDs" in results["rdds"]["message"]
    assert "sparktorch.run(function, df)" in results["rdds"]["message"]


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
    assert "this task was to use cuda device 5, but torch sees 0" in fitted["message"]
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
    assert "Spark gives GPU 5, device 5, but torch sees 0" in found["gpu-addresses"]["found"]
    assert "does not see in relative/path what other tasks have written" in found["checkpoint-dir"]["found"]
    assert found["peers-reachable"]["found"] == "all 2 tasks reach their neighbours"
    assert len({one["where"]["executor"] for one in findings if "executor" in one["where"]}) == 2
    assert all(one["setting"] and one["value"] and one["hint"] for one in findings if one["status"] != "ok")
