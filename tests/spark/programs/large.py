"""Fits, saves, loads and scores a model of more than 2 GiB, most of it zeros; prints what came out as one JSON line."""

from __future__ import annotations

import json
import sys

import torch
from pyspark.sql import SparkSession
from torch import nn

from sparktorch import TorchRegressionModel, TorchRegressor

NUMBERS = 560_000_000  # of 4 bytes: 2.09 GiB


class Large(nn.Module):
    """A line, and zeros that it adds."""

    zeros: torch.Tensor

    def __init__(self, numbers: int = NUMBERS) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("zeros", torch.zeros(numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(x.unsqueeze(1)) + self.zeros[-1]
        return out


def main(directory: str) -> dict[str, object]:
    from tests.spark.programs.large import Large  # by the name that executors know it by

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    for name, value in {"memory": "8g", "maxResultSize": "0"}.items():
        builder = builder.config(f"spark.driver.{name}", value)
    spark = builder.getOrCreate()
    data = spark.range(64).selectExpr("cast(id / 64 as float) x", "cast(3 * id / 64 as float) y")
    model = TorchRegressor(
        module=Large, inputCols=["x"], labelCol="y", optimizer="SGD", learningRate=0.5, epochs=20, batchSize=16
    ).fit(data)
    scored = model.transform(data).toPandas()
    model.save(directory)
    size = len(model.trained.weights)
    del model
    loaded = TorchRegressionModel.load(directory)
    again = loaded.transform(data).toPandas()
    spark.stop()
    error = float((scored["y"] - scored["prediction"]).abs().max())
    return {"bytes": size, "error": error, "same": bool(again.equals(scored))}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
