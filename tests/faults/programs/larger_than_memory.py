"""Fits, saves, loads and scores a model in processes that each have less memory than the model takes.

Arguments: a folder, control groups separated by commas, and a strategy, or "whole" for ranks that return the model.
Each process enters a group of its own where it builds the module first: the driver, the ranks, and those that score.
What libraries take is not counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch._dynamo
import torch.distributed.fsdp
from pyspark.sql import SparkSession
from torch import nn

from sparktorch import TorchRegressionModel, TorchRegressor
from sparktorch.errors import SparkTorchError

RANKS, WIDTH, DEPTH = 4, 2048, 16  # 269 MB


class Deep(nn.Module):
    """Square layers that change little."""

    def __init__(self, groups: str, marks: str) -> None:
        super().__init__()
        _enter(groups.split(","), Path(marks))
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        found: torch.Tensor = self.last(x).squeeze(-1)
        return found


def _enter(groups: list[str], marks: Path) -> None:
    """Enters the first control group that no other process is in."""
    if "sparktorch-" in Path("/proc/self/cgroup").read_text():
        return
    for number, group in enumerate(groups):
        try:
            (marks / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        return
    raise RuntimeError("more processes than control groups")


def main() -> None:
    folder, groups, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    marks = folder / "marks"
    marks.mkdir()
    builder = SparkSession.builder.master(f"local[{RANKS}]").config("spark.driver.maxResultSize", "4g")
    spark = builder.config("spark.driver.memory", "4g").getOrCreate()
    x = np.random.default_rng(0).normal(size=(64, 5))
    frame = spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1)}))
    estimator = TorchRegressor(
        module="tests.faults.programs.larger_than_memory:Deep",
        moduleParams={"groups": groups, "marks": str(marks)},
        numWorkers=RANKS,
        strategy="zero3" if how == "whole" else how,
        strategyParams={"pipeline": RANKS, "micro_batches": 4} if how == "mesh" else None,
        optimizer="SGD",
        learningRate=1e-3,
        batchSize=64,
        epochs=2,
        progress=False,
        **({"modelDir": str(folder / "models")} if how != "whole" else {"dryRun": "worker"}),
    )
    try:
        model = estimator.fit(frame)
    except SparkTorchError as error:
        print(json.dumps({"error": str(error)}))
        return
    model.save(str(folder / "saved"))
    loaded = TorchRegressionModel.load(str(folder / "saved"))
    scored = [row.prediction for row in loaded.transform(frame).collect()]
    print(
        json.dumps(
            {
                "losses": model.summary.objectiveHistory,
                "finite": bool(np.isfinite(scored).all()),
                "scored": len(scored),
                "apart": abs(loaded.predict(x[0].tolist()) - scored[0]),
                "parameters": sum(tensor.nbytes for tensor in loaded.trained.weights.values()),
                "processes": len(list(marks.iterdir())),
            }
        )
    )


if __name__ == "__main__":
    main()
