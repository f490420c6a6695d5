"""LightningModules as users have them: fitted on a DataFrame, scored, saved, loaded and logged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from pyspark.sql import DataFrame

from sparktorch import TorchRegressionModel, TorchRegressor
from tests.support.mlflow import QUIET

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports

    from tests.support.lightning_modules import Lit

pytestmark = QUIET
QUICK: dict[str, Any] = {"labelCol": "target", "batchSize": 100, "numWorkers": 2, "seed": 3, "progress": False}


def test_a_fitted_module_scores_is_saved_and_goes_on(frame: DataFrame, store: MlflowClient, tmp_path: Path) -> None:
    marked = frame.selectExpr("*", "abs(hash(target)) % 4 = 0 AS held_out")
    regressor = TorchRegressor(module=Lit, moduleParams={"schedule": "step"}, epochs=3, **QUICK)
    with mlflow.start_run() as run:
        model = regressor.setValidationIndicatorCol("held_out").fit(marked)
    history = model.summary.history
    assert history[-1]["val_loss"] < 0.5 * history[0]["val_loss"]
    assert [record["epoch_number"] for record in history] == [0.0, 1.0, 2.0]
    logged = store.get_metric_history(run.info.run_id, "both_epoch")
    assert [metric.value for metric in logged] == pytest.approx([record["both_epoch"] for record in history])

    rows = frame.coalesce(1)  # each worker that scores imports Lightning, which takes seconds
    scored = model.transform(rows).toPandas()
    with torch.inference_mode():
        expected = model.module(torch.from_numpy(np.stack(scored["features"].to_numpy()).astype(np.float32)))
    np.testing.assert_allclose(scored["prediction"], expected, rtol=1e-5, atol=1e-5)

    model.save(str(tmp_path / "model"))
    loaded = TorchRegressionModel.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.transform(rows).toPandas()["prediction"], scored["prediction"])
    further = TorchRegressor(module=loaded, epochs=1, **QUICK).fit(frame)
    assert further.summary.history[0]["loss"] < history[1]["loss"]
