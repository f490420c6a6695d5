"""Fits through the public API equal a plain torch loop over the same batches, however the rows lie."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TorchClassifier, TorchRegressor
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.spark.frame.prepare import prepare
from tests.spark.modules import MLP
from tests.spark.scored import same_weights

BATCH, EPOCHS, SEED = 64, 3, 11


def plain_torch_loop(frame: DataFrame, kind: str, weighted: bool) -> dict[str, torch.Tensor]:
    wire = prepare(
        frame,
        "classification" if kind == "label" else "regression",
        inputs=["features"],
        label=kind,
        weight="weight" if weighted else None,
    ).data.toPandas()
    wire = wire.iloc[np.argsort(wire["k"].to_numpy().view(np.uint64))]
    x = torch.from_numpy(np.stack(wire["x0"].tolist()))
    y = torch.from_numpy(wire["y"].to_numpy().astype(np.int64 if kind == "label" else np.float32))
    w = torch.from_numpy(wire["w"].to_numpy()) if weighted else torch.ones(len(x))
    torch.manual_seed(SEED)
    module = MLP(outputs=3 if kind == "label" else 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    plan = SamplingPlan(rows=len(x), batch_size=BATCH, seed=SEED)
    for epoch in range(EPOCHS):
        steps = torch.from_numpy(plan.steps_of(0, len(x), epoch))
        for step in range(plan.steps):
            rows = (steps == step).nonzero().squeeze(1)
            out = module(x[rows])
            if kind == "label":
                losses = nn.functional.cross_entropy(out, y[rows], reduction="none")
            else:
                losses = (out.squeeze(1) - y[rows]) ** 2
            optimizer.zero_grad()
            ((losses * w[rows]).sum() / w[rows].sum()).backward()
            optimizer.step()
    return module.state_dict()


@pytest.fixture(scope="module")
def expected(frame: DataFrame):  # type: ignore[no-untyped-def]
    return cache(lambda kind, weighted: plain_torch_loop(frame, kind, weighted))


@pytest.mark.parametrize(
    ("workers", "partitions", "kind", "weighted"),
    [
        (2, 57, "target", True),
        (3, 57, "label", False),
        pytest.param(1, 4, "label", True, marks=pytest.mark.newest),
    ],
)
def test_a_fit_equals_the_plain_loop(  # type: ignore[no-untyped-def]
    spark: SparkSession, table: pd.DataFrame, expected, workers: int, partitions: int, kind: str, weighted: bool
) -> None:
    shuffled = table.sample(frac=1.0, random_state=partitions)
    schema = "features array<float>, label bigint, target float, weight float"
    frame = spark.createDataFrame(shuffled, schema).repartition(partitions)
    estimator = (TorchClassifier if kind == "label" else TorchRegressor)(
        module=MLP,
        moduleParams={"outputs": 3 if kind == "label" else 1},
        labelCol=kind,
        weightCol="weight" if weighted else None,
        batchSize=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        learningRate=0.01,
        numWorkers=workers,
        progress=False,
    )
    model = estimator.fit(frame)
    assert model.summary.rows == 1001
    assert model.summary.stepsPerEpoch == 16
    for name, value in expected(kind, weighted).items():
        torch.testing.assert_close(model.module.state_dict()[name], value, atol=1e-5, rtol=1e-5)


def test_two_fits_of_the_same_data_are_bit_identical(frame: DataFrame) -> None:
    estimator = TorchRegressor(module=MLP, labelCol="target", epochs=2, numWorkers=2, progress=False)
    assert same_weights(estimator.fit(frame), estimator.fit(frame.repartition(5)))


@pytest.mark.parametrize(
    ("rows", "kept", "workers"),
    [
        pytest.param(1001, 1, 3, id="all rows in one of nine partitions"),
        pytest.param(2, 2, 3, id="fewer rows than workers"),
    ],
)
def test_any_partitioning_is_balanced(
    spark: SparkSession, table: pd.DataFrame, rows: int, kept: int, workers: int
) -> None:
    schema = "features array<float>, label bigint, target float, weight float"
    whole = spark.createDataFrame(table[:rows], schema)
    empty = whole.repartition(4).filter("target > 1e9")
    frame = empty.union(whole.coalesce(kept)).union(empty)
    model = TorchRegressor(
        module=MLP,
        labelCol="target",
        batchSize=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        learningRate=0.01,
        numWorkers=workers,
        progress=False,
    ).fit(frame)
    found = [rank["rows"] for rank in model.summary.ranks]
    assert sum(found) == rows
    assert max(found) - rows / workers < 4 * (rows / workers) ** 0.5 + 1
    for name, value in plain_torch_loop(whole, "target", weighted=False).items():
        torch.testing.assert_close(model.module.state_dict()[name], value, atol=1e-5, rtol=1e-5)
