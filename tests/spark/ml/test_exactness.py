"""Fits through the public API equal a plain torch loop over the same batches, however the rows lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchClassifier, TorchRegressor
from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, LABEL, WEIGHT, input_name
from sparktorch.spark.frame.prepare import prepare
from sparktorch.train.recipe.recipe import Recipe
from tests.spark.modules import MLP
from tests.support.frames import Table
from tests.support.ranks import train_job
from tests.support.reference import plain_training

SCHEMA = "features array<float>, label bigint, target float, weight float"
CONFIG: dict[str, Any] = {"batch_size": 64, "epochs": 3, "seed": 11}


@pytest.fixture(scope="module")
def expected(spark: SparkSession, table: pd.DataFrame) -> Callable[[int, str, bool], dict[str, torch.Tensor]]:
    """Returns what a plain loop over so many rows of the table trains, in the order of the keys that Spark gives."""

    @cache
    def by_hand(rows: int, label: str, weighted: bool) -> dict[str, torch.Tensor]:
        task: Any = "classification" if label == "label" else "regression"
        frame = spark.createDataFrame(table[:rows], SCHEMA)
        weight = "weight" if weighted else None
        prepared = prepare(frame, task, inputs=["features"], label=label, weight=weight)
        sent = prepared.data.toPandas()
        arrays = {input_name(0): np.stack(sent["x0"].tolist()), LABEL: sent["y"].to_numpy(), KEY: sent["k"].to_numpy()}
        if weighted:
            arrays[WEIGHT] = sent["w"].to_numpy()
        of = Table(arrays, replace(prepared.columns, classes=3 if label == "label" else None))
        recipe = Recipe(module=MLP, module_params={"outputs": of.columns.classes or 1}, learning_rate=0.01)
        return plain_training(of, train_job(of, recipe, TrainConfig(task=task, **CONFIG)))[0]

    return by_hand


def in_one_partition(rows: DataFrame) -> DataFrame:
    empty = rows.repartition(4).filter("target > 1e9")
    return empty.union(rows.coalesce(1)).union(empty)


@pytest.mark.parametrize(
    ("workers", "label", "weighted", "rows", "arranged"),
    [
        pytest.param(2, "target", True, 1001, lambda rows: rows.repartition(57), id="small partitions"),
        pytest.param(3, "label", False, 1001, lambda rows: rows.repartition(57), id="classes"),
        pytest.param(
            *(1, "label", True, 1001, lambda rows: rows.repartition(4)), marks=pytest.mark.newest, id="one worker"
        ),
        pytest.param(3, "target", False, 1001, in_one_partition, id="all rows in one of nine partitions"),
        pytest.param(3, "target", False, 2, in_one_partition, id="fewer rows than workers"),
    ],
)
def test_a_fit_equals_the_plain_loop_and_is_balanced_whatever_the_partitions(
    spark: SparkSession,
    table: pd.DataFrame,
    expected: Any,
    workers: int,
    label: str,
    weighted: bool,
    rows: int,
    arranged: Callable[[DataFrame], DataFrame],
) -> None:
    frame = spark.createDataFrame(table[:rows].sample(frac=1.0, random_state=57), SCHEMA)
    estimator = (TorchClassifier if label == "label" else TorchRegressor)(
        module=MLP,
        moduleParams={"outputs": 3 if label == "label" else 1},
        labelCol=label,
        weightCol="weight" if weighted else None,
        batchSize=64,
        epochs=3,
        seed=11,
        learningRate=0.01,
        numWorkers=workers,
        progress=False,
    )
    model = estimator.fit(arranged(frame))
    shares = [rank["rows"] for rank in model.summary.ranks]
    assert (model.summary.rows, model.summary.stepsPerEpoch) == (sum(shares), -(-rows // 64)) == (rows, -(-rows // 64))
    assert max(shares) - rows / workers < 4 * (rows / workers) ** 0.5 + 1
    for name, value in expected(rows, label, weighted).items():
        torch.testing.assert_close(model.module.state_dict()[name], value, atol=1e-5, rtol=1e-5)
