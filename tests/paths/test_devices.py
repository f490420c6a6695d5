"""Spark gives tasks their accelerators: a fit trains on them, and a model scores on them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.device.jobs import DEVICE
from tests.support.programs import run_python


def test_a_fit_and_its_model_use_the_devices_that_spark_assigns(tmp_path: Path) -> None:
    out = run_python(tmp_path, "-m", "tests.device.programs.on_cluster", str(tmp_path), DEVICE)
    found = json.loads(out.splitlines()[-1])
    workers = found["workers"]
    assert found["fit"]["devices"] == [f"{DEVICE}:{index}" for index in range(workers)]
    assert found["fit"]["cpus"] == ["cpu"] * workers
    assert found["fit"]["storage"] == ["device"] * workers
    assert found["fit"]["difference"] < (1e-6 if DEVICE == "sim" else 1e-4)
    assert "no kernel for the CPU" in found["refused"]
    assert "dryRun='worker'" in found["refused"]
    assert found["kernels"]["rows"] == 200
    assert found["kernels"]["finite"]
