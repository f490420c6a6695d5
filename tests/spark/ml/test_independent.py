"""Cross-validation over workers: every worker trains on all rows but its own fold."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from sparktorch import TorchClassifier, TorchRegressor
from sparktorch.data.columns import KEY, VALIDATION
from sparktorch.errors import ConfigError
from sparktorch.spark.frame.partition import split_into_folds
from tests.support.nets import Fourier, Mlp


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

    with pytest.raises(ConfigError, match=r"strategyParams\.folds makes the validation rows"):
        classifier.copy({classifier.validationIndicatorCol: "v"}).fit(frame)


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
