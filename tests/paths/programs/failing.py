"""A fit that fails, in a script that sets nothing: arguments are the master, what fails, and the Parquet file."""

import sys

import torch
from pyspark.sql import SparkSession
from torch import nn

from sparktorch import TorchClassifier

_, master, what, path = sys.argv


class Net(nn.Linear):
    """Scores of three classes; fails in the second of two ranks if it is to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs in the driver's dry run, too, which has no ranks."""
        if what == "module" and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise KeyError("planted")
        return super().forward(x)


spark = SparkSession.builder.master(master).getOrCreate()
rows = spark.read.parquet(path)
inputs = {"inputCols": ["x", "y"], "assembleInputs": True}
module = Net if what == "module" else "torch.nn:Linear"
estimator = TorchClassifier(module=module, moduleParams={"in_features": 2, "out_features": 3}, numWorkers=2, **inputs)
print("begins", file=sys.stderr, flush=True)
estimator.fit(rows)
