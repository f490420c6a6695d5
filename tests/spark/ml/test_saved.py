"""What version 0.1.0 saved is read by this one: models, estimators, a checkpoint and a model in MLflow's format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchClassificationModel, TorchRegressionModel, TorchRegressor
from tests.support.mlflow import QUIET
from tests.support.saved import SAVED, checkpointed, rows

pytestmark = QUIET


@pytest.fixture(scope="module")
def data(spark: SparkSession) -> DataFrame:
    return rows(spark)


def expected(name: str) -> list[Any]:
    found: list[Any] = json.loads((SAVED / "scores.json").read_text())[name]
    return found


def test_a_model_by_import_path_scores_as_it_did(data: DataFrame) -> None:
    model = TorchClassificationModel.load(str(SAVED / "model"))
    found = [row[0].toArray() for row in model.transform(data).select("probability").collect()]
    np.testing.assert_allclose(found, expected("model"), atol=1e-6)
    assert (model.getThresholds(), model.getHandleInvalid()) == ([0.2, 0.5, 0.9], "keep")
    assert len(model.summary.history) == 1


def test_a_model_by_its_graph_scores_as_it_did(data: DataFrame) -> None:
    model = TorchRegressionModel.load(str(SAVED / "graph"))
    found = [row[0] for row in model.transform(data).select("found").collect()]
    np.testing.assert_allclose(found, expected("graph"), atol=1e-6)


def test_a_pipeline_of_estimators_has_its_params(spark: SparkSession) -> None:
    generic, classifier = Pipeline.load(str(SAVED / "pipeline")).getStages()
    assert (generic.getMetrics(), generic.getMaxRestarts()) == ({"r2": "R2Score"}, 2)
    now = checkpointed("checkpoints")
    assert {param.name: value for param, value in classifier._paramMap.items()} == {
        param.name: value for param, value in now._paramMap.items()
    }


def test_a_pickled_estimator_finds_the_model_that_it_goes_on_from(data: DataFrame) -> None:
    reader = TorchRegressor.read().option("allowPickle", "true")
    estimator = reader.load(str(SAVED / "pickled"))
    assert estimator.getOptimizerParams() == {"betas": (0.9, 0.95)}  # as a tuple: JSON would have made a list of it
    scored = estimator.getModule().transform(data).select("prediction").collect()
    assert len(scored) == 96
    fitted = estimator.setOptimizerParams({}).setEpochs(1).fit(data)
    assert len(fitted.summary.history) == 1


def test_a_model_in_mlflows_format_predicts_as_it_did(data: DataFrame) -> None:
    import mlflow

    inputs = pd.DataFrame({"x": [row["x"] for row in data.select("x").collect()]})
    found = mlflow.pyfunc.load_model(str(SAVED / "mlflow")).predict(inputs)
    np.testing.assert_allclose(found["probability"].tolist(), expected("model"), atol=1e-6)


def test_a_fit_goes_on_from_its_checkpoint(data: DataFrame, tmp_path: Path) -> None:
    shutil.copytree(SAVED / "checkpoint", tmp_path / "old")
    resumed = checkpointed(tmp_path / "old").fit(data)
    fresh = checkpointed(tmp_path / "new").fit(data)
    then = json.loads((SAVED / "history.json").read_text())
    assert resumed.summary.history[:2] == then[:2]  # the times as well: these epochs were not trained again
    np.testing.assert_allclose([epoch["loss"] for epoch in fresh.summary.history], [e["loss"] for e in then], rtol=1e-5)
    weights = resumed.module.state_dict()
    for name, value in fresh.module.state_dict().items():
        np.testing.assert_allclose(weights[name], value, atol=1e-6)
