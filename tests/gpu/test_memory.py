"""What a CUDA device alone can show of memory; `make test-gpu` runs it, on a machine that has one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch
from pyspark.sql import SparkSession
from torch import nn

from sparktorch import TorchRegressor
from sparktorch.errors import ClusterError
from tests.support.nets import Score
from tests.support.sessions import spark_session

FITS, SLACK = 20, 64  # MiB


class Huge(Score):
    """Needs more memory than any device has, from its first step on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + x.new_zeros(1 << 42).sum() if x.is_cuda else out


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session("local[1]", tmp_path_factory.mktemp("warehouse")) as session:
        yield session


def fit(spark: SparkSession, module: type[nn.Module]) -> None:
    rows = spark.range(500).selectExpr("transform(array(1, 2, 3, 4, 5), x -> float(sin(id * x))) AS features")
    rows = rows.selectExpr("features", "features[0] AS label")
    TorchRegressor(module=module, batchSize=100, epochs=2, device="cuda", progress=False).fit(rows)


def used() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def test_memory_stays_flat_over_many_fits(spark: SparkSession) -> None:
    fit(spark, Score)  # leaves a context in the Python worker, which is used again
    before = used()
    for _ in range(FITS):
        fit(spark, Score)
    assert used() <= before + SLACK


def test_a_full_device_says_what_to_do(spark: SparkSession) -> None:
    with pytest.raises(ClusterError) as caught:
        fit(spark, Huge)
    assert caught.value.what.startswith("the memory of the device is full: CUDA out of memory")
    assert "microBatchSize" in caught.value.hint
    fit(spark, Score)  # the worker is as good as new
