"""Fits whose rows are on disk, stay in their partitions, or come in another order each time they are computed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressor
from sparktorch.errors import ConfigError
from sparktorch.train.callbacks import FitContext
from tests.spark.modules import MLP, Dies

SCHEMA = "features array<float>, target float"


def regressor(**params: Any) -> TorchRegressor:
    values = {"module": MLP, "labelCol": "target", "epochs": 2, "batchSize": 64, "seed": 3, "progress": False}
    return TorchRegressor(**{**values, "numWorkers": 2, **params})


def weights_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])


class Looks(Callback):
    """Writes down the files without names that a rank has open, and where they would be."""

    ranks = "all"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_start(self, context: FitContext) -> None:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        targets = [os.readlink(link) for link in links if link.is_symlink()]
        found = [target for target in targets if target.endswith("(deleted)")]
        (self._folder / f"rank{context.world.rank}").write_text("\n".join([os.environ["SPARK_LOCAL_DIRS"], *found]))


def test_a_fit_from_disk_is_the_fit_from_memory_and_its_files_are_where_spark_keeps_its_own(
    frame: DataFrame, tmp_path: Path
) -> None:
    model = regressor(storage="disk", weightCol="weight", callbacks=[Looks(tmp_path)]).fit(frame)
    other = regressor(shuffleBlock=32, weightCol="weight").fit(frame)
    assert torch.equal(weights_of(model), weights_of(other))
    assert [rank["storage"] for rank in model.summary.ranks] == ["disk", "disk"]
    assert all(0 < rank["data_wait_share"] < 1 for rank in model.summary.ranks)
    for rank in range(2):
        directory, *files = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert "blockmgr" in directory
        assert sum(file.startswith(directory) for file in files) == 1  # for features, label and weight
        left = [path for path in Path(directory).rglob("*") if "sparktorch" in path.name]
        assert not [path for path in left if "userFiles" not in str(path)]  # where Spark has the code of other tests


# Spark itself refuses a barrier job behind all but the first.
@pytest.mark.parametrize(
    "arranged",
    [
        lambda data: data.repartition(2).cache(),
        lambda data: data.coalesce(2),
        lambda data: data.where("target < 0").coalesce(2).union(data.where("target >= 0").coalesce(1)),
    ],
    ids=["repartition", "coalesce", "union"],
)
def test_partitions_that_are_kept_are_trained_where_and_as_they_lie(
    spark: SparkSession, table: pd.DataFrame, arranged: Callable[[DataFrame], DataFrame]
) -> None:
    # Not of a cached frame: Spark coalesces partitions by where it finds them, which may change from job to job.
    placed = arranged(spark.createDataFrame(table[["features", "target"]], SCHEMA))
    workers = placed.rdd.getNumPartitions()
    model = regressor(split="keep", shuffle=False, epochs=1, numWorkers=workers).fit(placed)
    rows = [row for part in placed.rdd.glom().collect() for row in part]
    assert [rank["rows"] for rank in model.summary.ranks] == [len(part) for part in placed.rdd.glom().collect()]
    torch.manual_seed(3)
    module = MLP()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    x = torch.tensor([row["features"] for row in rows])
    y = torch.tensor([row["target"] for row in rows])
    for start in range(0, len(rows), 64):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x[start : start + 64]).squeeze(1), y[start : start + 64]).backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(weights_of(model), expected, atol=1e-5, rtol=0)
    placed.unpersist()


def test_partitions_that_are_no_workers_are_refused(frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match="the DataFrame has 3, and numWorkers is 2"):
        regressor(split="keep").fit(frame)


def restless(spark: SparkSession) -> DataFrame:

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            order = list(range(batch.num_rows))
            random.SystemRandom().shuffle(order)
            yield batch.take(pa.array(order))

    draw = np.random.default_rng(1)
    x = draw.normal(size=(600, 5)).astype(np.float32)
    table = pd.DataFrame({"features": list(x), "target": x.sum(1)})
    return spark.createDataFrame(table, SCHEMA).repartition(5).mapInArrow(rows, SCHEMA)


def test_rows_that_are_computed_again_in_another_order_change_nothing(spark: SparkSession, tmp_path: Path) -> None:
    data = restless(spark)
    assert data.select("*").collect() != data.select("*").collect()
    calm = regressor(shuffleBlock=32).fit(data)
    # The stages before the barrier job run again with it, after the worker has died in the second epoch.
    killer = Dies(tmp_path / "killed", rank=1, step=14)
    checkpoints = {"checkpointDir": str(tmp_path / "checkpoints"), "checkpointUnit": "step", "checkpointInterval": 3}
    model = regressor(storage="disk", callbacks=[killer], maxRestarts=1, **checkpoints).fit(data)
    assert (tmp_path / "killed").exists()
    assert torch.equal(weights_of(model), weights_of(calm))
    assert model.summary.fingerprint == calm.summary.fingerprint
