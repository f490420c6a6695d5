"""Strategies of each kind as users ask for them: through fit, on two workers; and folds over workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchClassifier, TorchRegressionModel, TorchRegressor
from sparktorch.data.columns import KEY, VALIDATION
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.spark.frame.partition import split_into_folds
from tests.spark.modules import MLP
from tests.support.callbacks import Determinism
from tests.support.nets import Branched, Fourier, Mlp

ROWS = 240


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(3)
    x = draw.normal(size=(ROWS, 5)).astype(np.float32)
    target = np.sin(x @ np.linspace(-1, 1, 5)) + draw.normal(size=ROWS) / 3
    table = pd.DataFrame({"features": list(x), "target": target, "held_out": np.arange(ROWS) % 4 == 0})
    schema = "features array<float>, target double, held_out boolean"
    return spark.createDataFrame(table, schema).repartition(2).cache()


asked = partial(
    TorchRegressor,
    module=MLP,
    labelCol="target",
    validationIndicatorCol="held_out",
    optimizer="SGD",
    learningRate=0.05,
    batchSize=40,
    epochs=3,
    progress=False,
)


@pytest.fixture(scope="module")
def alone(rows: DataFrame) -> TorchRegressionModel:
    return asked().fit(rows)


def difference(model: TorchRegressionModel, other: TorchRegressionModel) -> float:
    ours, theirs = model.module.state_dict(), other.module.state_dict()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


@pytest.mark.parametrize(
    "params",
    [
        {"strategy": "zero1", "deterministic": True},
        {"strategy": "zero3", "strategyParams": {"min_parameters": 20}, "validationBatchSize": 5},
        {"strategy": "mesh", "strategyParams": {"tensor": 2}},
        {"strategy": "parameterServer", "strategyParams": {"staleness": 0}},
    ],
    ids=lambda params: params["strategy"],
)
def test_two_workers_train_what_one_does(params: dict[str, Any], rows: DataFrame, alone: TorchRegressionModel) -> None:
    model = asked(numWorkers=2, callbacks=[Determinism()], **params).fit(rows)
    assert difference(model, alone) < 1e-5
    ours, theirs = model.summary.history, alone.summary.history
    assert {record["deterministic"] for record in ours} == {params.get("deterministic", False)}
    for name in ("loss", "val_loss"):
        assert [record[name] for record in ours] == pytest.approx([record[name] for record in theirs], abs=1e-5)
    assert all(record["gradient_norm_max"] >= record["gradient_norm"] > 0 for record in ours)
    assert all(rank["peak_memory"] > 10**7 for rank in model.summary.ranks)
    scores = [row["prediction"] for row in model.transform(rows).select("prediction").limit(5).collect()]
    assert scores == pytest.approx(
        [row["prediction"] for row in alone.transform(rows).select("prediction").limit(5).collect()], abs=1e-4
    )


def test_a_layer_that_few_rows_use_trains_as_on_one_worker_where_the_first_row_uses_it(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(60, 5)).astype(np.float32)
    x[:, 0] = np.where(np.arange(60) % 12 == 0, 2.0, -1.0)
    pd.DataFrame({"features": list(x), "target": x.sum(1)}).to_parquet(tmp_path / "rows.parquet")
    rows = spark.read.parquet(str(tmp_path / "rows.parquet"))
    few = partial(
        TorchRegressor, module=Branched, labelCol="target", batchSize=4, epochs=2, learningRate=0.01, progress=False
    )
    model = few(numWorkers=2, checkpointDir=str(tmp_path / "checkpoints"), checkpointInterval=1).fit(rows)
    assert difference(model, few().fit(rows)) < 1e-5
    assert "'extra.weight' got no gradient in a step" in caplog.text


def test_a_plan_says_what_strategies_take_and_trains_nothing(rows: DataFrame, tmp_path: Path) -> None:
    plan = asked(numWorkers=2, optimizer="Adam", labelCol="target").plan(rows, memory=1)
    # meshes of shards and of stages; nothing says how to divide layers
    assert [need.strategy for need in plan.needs] == ["ddp", "zero1", "zero2", "zero3", "mesh", "mesh"]
    assert plan.parameters == 113
    assert plan.needs[0].state == 2 * plan.needs[0].parameters + 4 * 4  # Adam's two numbers each, and counters of steps
    assert plan.fitting[0].strategy == "ddp"
    divided = asked(numWorkers=2, modelDir=str(tmp_path / "models")).plan(rows)
    assert divided.fitting[0].strategy == "zero2"
    assert not (tmp_path / "models").exists()
    classes = rows.withColumn("sign", (rows.target > 0).cast("int"))
    classifier = TorchClassifier(module=MLP, moduleParams={"outputs": 2}, labelCol="sign", numWorkers=2)
    assert classifier.plan(classes).needs[0].activations > 0
    with pytest.raises(ModuleError, match="forward of MLP failed on the first row"):
        asked(moduleParams={"inputs": 4}).plan(rows)
    with pytest.raises(ConfigError, match="memory must be"):
        asked().plan(rows, memory=-1)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 5))
    return pd.DataFrame({"features": list(x), "label": (x.sum(1) > 0).astype(float)})


def test_every_row_is_in_every_fold_and_held_out_in_one(spark: SparkSession) -> None:
    keys = spark.range(500).selectExpr(f"xxhash64(id) as {KEY}", "id")
    rows = split_into_folds(keys, 2).selectExpr("spark_partition_id() as rank", "id", f"{VALIDATION} as held_out")
    found = rows.toPandas()
    assert (found.groupby("rank")["id"].nunique() == 500).all()
    assert (found[found["held_out"]].groupby("id").size() == 1).all()
    assert found["held_out"].sum() == 500


def test_folds_give_a_history_for_each_worker_and_the_best_model(spark: SparkSession, table: pd.DataFrame) -> None:
    frame = spark.createDataFrame(table)
    classifier = TorchClassifier(
        module=Mlp,
        moduleParams={"outputs": 2},
        learningRate=0.02,
        epochs=3,
        batchSize=32,
        numWorkers=2,
        strategy="independent",
        strategyParams={"folds": True},
        nullPolicy="drop",
        progress=False,
    )
    model = classifier.fit(frame.union(frame.limit(3).selectExpr("null as features", "label")))
    summary = model.summary
    assert sum(rank["validation_rows"] for rank in summary.ranks) == 600
    assert all(rank["rows"] + rank["validation_rows"] == 600 for rank in summary.ranks)
    accuracies = [rank["epochs"][-1]["val_accuracy"] for rank in summary.ranks]
    assert min(accuracies) > 0.85
    best = min(summary.ranks, key=lambda rank: rank["epochs"][-1]["val_loss"])
    assert summary.history == best["epochs"]
    assert (summary.rows, summary.validationRows) == (best["rows"], best["validation_rows"])
    assert (summary.droppedRows, [rank["dropped"] for rank in summary.ranks]) == (3, [3, 3])
    scored = model.transform(frame).toPandas()
    assert (scored["prediction"] == scored["label"]).mean() > 0.85


def test_the_best_model_predicts_with_what_its_own_seed_draws_and_so_does_one_that_goes_on_from_it(
    spark: SparkSession, table: pd.DataFrame
) -> None:
    frame = spark.createDataFrame(table)
    regressor = TorchRegressor(
        module=Fourier,
        batchSize=32,
        epochs=2,
        learningRate=0.05,
        seed=5,
        numWorkers=2,
        strategy="independent",
        progress=False,
    )
    model = regressor.fit(frame)
    ranks = [rank["epochs"][-1]["loss"] for rank in model.summary.ranks]
    assert model.trained.seed == 5 + ranks.index(min(ranks))
    params = {regressor.module: model, regressor.strategy: "ddp", regressor.epochs: 1, regressor.learningRate: 1e-12}
    again = regressor.fit(frame, params)
    found, wanted = (each.transform(frame).toPandas()["prediction"] for each in (again, model))
    assert np.allclose(found, wanted, atol=1e-5)
    error = ((wanted - table["label"]) ** 2).mean()
    assert again.summary.history[0]["loss"] == pytest.approx(error, rel=1e-3)
