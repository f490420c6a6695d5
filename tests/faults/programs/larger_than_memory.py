"""Fits, saves, loads and scores models in processes that each have less memory than the model takes.

Arguments: a folder, control groups separated by commas, and strategies, or "whole" for ranks that return the model.
Each process enters a group of its own where it builds a module first: the driver, the ranks, and those that score.
What libraries take is not counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch._dynamo
import torch.distributed.fsdp
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TorchRegressionModel, TorchRegressor
from sparktorch.errors import SparkTorchError

RANKS, WIDTH, DEPTH = 4, 1024, 48  # 202 MB


class Deep(nn.Module):
    """Square layers that change little."""

    def __init__(self, groups: str, folder: str, how: str) -> None:
        super().__init__()
        _enter(groups.split(","), Path(folder))
        (Path(folder) / how / str(os.getpid())).touch()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        found: torch.Tensor = self.last(x).squeeze(-1)
        return found

    def stages(self) -> list[nn.Module]:
        return [self.first, *map(Added, self.layers), nn.Sequential(self.last, nn.Flatten(0))]


class Added(nn.Module):
    """Adds a little of what a layer returns to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.tanh(self.layer(x))


def _enter(groups: list[str], folder: Path) -> None:
    """Enters the first control group that no process has entered, unless this one is in a group."""
    if "sparktorch-" in Path("/proc/self/cgroup").read_text():
        return
    for number, group in enumerate(groups):
        try:
            (folder / f"taken-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        return
    raise RuntimeError("more processes than control groups")


def tried(frame: DataFrame, folder: Path, groups: str, how: str) -> dict[str, Any]:
    """Fits, saves, loads and scores a model; returns what came out, ready for JSON."""
    (folder / how).mkdir()
    params = {"modelDir": str(folder / f"models-{how}")} if how != "whole" else {"dryRun": "worker"}
    estimator = TorchRegressor(
        module="tests.faults.programs.larger_than_memory:Deep",
        moduleParams={"groups": groups, "folder": str(folder), "how": how},
        numWorkers=RANKS,
        strategy="zero3" if how == "whole" else how,
        strategyParams={"pipeline": RANKS, "micro_batches": 4} if how == "mesh" else None,
        optimizer="SGD",
        learningRate=1e-3,
        batchSize=64,
        epochs=2,
        progress=False,
        **params,  # type: ignore[arg-type]
    )
    try:
        model = estimator.fit(frame)
    except SparkTorchError as error:
        return {"error": str(error)}
    model.save(str(folder / f"saved-{how}"))
    loaded = TorchRegressionModel.load(str(folder / f"saved-{how}"))
    rows = loaded.transform(frame).collect()
    return {
        "losses": model.summary.objectiveHistory,
        "finite": bool(np.isfinite([row.prediction for row in rows]).all()),
        "scored": len(rows),
        "apart": abs(loaded.predict(rows[0].features) - rows[0].prediction),
        "parameters": sum(tensor.nbytes for tensor in loaded.trained.weights.values()),
        "processes": len(list((folder / how).iterdir())),
    }


def main(folder: Path, groups: str, *hows: str) -> dict[str, dict[str, Any]]:
    builder = SparkSession.builder.master(f"local[{RANKS}]").config("spark.driver.maxResultSize", "4g")
    builder = builder.config("spark.python.daemon.module", "tests.support.daemon")
    spark = builder.config("spark.driver.memory", "4g").getOrCreate()
    x = np.random.default_rng(0).normal(size=(64, 5))
    frame = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1)}))
    return {how: tried(frame, folder, groups, how) for how in hows}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
