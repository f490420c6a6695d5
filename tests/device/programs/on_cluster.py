"""Fits and scores where Spark gives each task an accelerator of its own; prints what came of it as JSON.

Two simulated ones, of two machines; or, with "cuda", all of this machine, as conf/gpu_discovery.sh finds them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TorchRegressor
from sparktorch.errors import SparkTorchError

DISCOVERY = Path(__file__).parents[3] / "conf" / "gpu_discovery.sh"


class Ordinary(nn.Module):
    """A number for each row of four."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).squeeze(-1)
        return out


class Kernels(Ordinary):
    """Has kernels for the accelerator alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cpu:
            raise RuntimeError("no kernel for the CPU")
        return super().forward(x)


def main(directory: str, kind: str) -> dict[str, Any]:
    if kind == "sim":
        from tests.support import simulated  # noqa: F401 - the driver has one, too

        spark, workers = simulated_cluster(Path(directory)), 2
    else:
        workers = torch.cuda.device_count()
        spark = cluster(f"local-cluster[1,{workers},4096]", DISCOVERY, workers)
    numbers = "array(sin(id), cos(id), sin(2 * id), cos(3 * id)) AS features"
    path = f"{directory}/rows"
    spark.range(200).selectExpr(f"transform({numbers.split(' AS ')[0]}, x -> float(x)) AS features").selectExpr(
        "features", "features[0] + features[1] * features[2] AS label"
    ).write.parquet(path)
    rows = spark.read.parquet(path)
    return {
        "workers": workers,
        "fit": fit(rows, workers),
        "refused": refused(rows, workers),
        "kernels": kernels(rows, workers),
    }


def simulated_cluster(directory: Path) -> SparkSession:
    script = directory / "gpus.sh"  # the first worker has device 0, the second one device 1
    found = f"""if mkdir {directory}/first 2>/dev/null; then a=0; else a=1; fi"""
    script.write_text(f"""#!/bin/sh\n{found}\necho '{{"name": "gpu", "addresses": ["'$a'"]}}'\n""")
    script.chmod(0o755)
    daemon = {"spark.python.daemon.module": "tests.support.simulated_daemon"}
    return cluster("local-cluster[2,1,1024]", script, 1, **daemon)


def cluster(master: str, script: Path, amount: int, **settings: str) -> SparkSession:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return (
        builder.config("spark.worker.resource.gpu.amount", amount)
        .config("spark.worker.resource.gpu.discoveryScript", str(script))
        .config("spark.executor.resource.gpu.amount", amount)
        .config("spark.task.resource.gpu.amount", 1)
        .config("spark.sql.shuffle.partitions", 2)
        .getOrCreate()
    )


def estimator(module: type[nn.Module], workers: int, **params: Any) -> TorchRegressor:
    return TorchRegressor(module=module, numWorkers=workers, epochs=3, batchSize=20, seed=4, progress=False, **params)


def fit(rows: DataFrame, workers: int) -> dict[str, Any]:
    """Fits on the devices and on CPUs."""
    devices, cpus = (estimator(Ordinary, workers, device=device).fit(rows) for device in ("auto", "cpu"))
    weights = [nn.utils.parameters_to_vector(model.module.parameters()) for model in (devices, cpus)]
    return {
        "devices": sorted(rank["device"] for rank in devices.summary.ranks),
        "cpus": sorted(rank["device"] for rank in cpus.summary.ranks),
        "storage": sorted(rank["storage"] for rank in devices.summary.ranks),
        "difference": float((weights[0] - weights[1]).abs().max()),
    }


def refused(rows: DataFrame, workers: int) -> str:
    """Fits a module that the driver cannot try."""
    try:
        estimator(Kernels, workers).fit(rows)
    except SparkTorchError as error:
        return str(error)
    return ""


def kernels(rows: DataFrame, workers: int) -> dict[str, Any]:
    """Fits it where a worker tries it, and scores with it on the tasks' devices."""
    model = estimator(Kernels, workers, dryRun="worker").fit(rows)
    scored = model.transform(rows).select("prediction").toPandas()["prediction"]
    return {"rows": len(scored), "finite": bool(scored.notna().all()), "loss": model.summary.history[-1]["loss"]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
