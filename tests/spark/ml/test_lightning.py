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
from torch import nn

from sparktorch import TorchRegressionModel, TorchRegressor
from sparktorch.errors import ConfigError, ModuleError, RankError
from tests.support.mlflow import QUIET

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    from lightning.pytorch import LightningModule

    from tests.support.lightning_modules import Lit, LitMinimal

pytestmark = QUIET
QUICK: dict[str, Any] = {"labelCol": "target", "batchSize": 100, "numWorkers": 2, "seed": 3, "progress": False}


class OfThisFile(LightningModule):
    """A classifier that has only what it must have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def training_step(self, batch: Any) -> torch.Tensor:
        x, label = batch
        return nn.functional.cross_entropy(self(x), label)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


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


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "validation": (
        ModuleError,
        "OfThisFile has no validation_step",
        {"module": OfThisFile, "validationIndicatorCol": "held_out"},
    ),
    "rate": (ConfigError, "learningRate is set, and the module is a LightningModule", {"learningRate": 0.1}),
    "size": (ConfigError, "microBatchSize is 'auto'", {"microBatchSize": "auto"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_fit_cannot_honour_is_refused_by_name_before_a_job(case: str, frame: DataFrame) -> None:
    error, message, params = REFUSED[case]
    marked = frame.selectExpr("*", "target > 0 AS held_out")
    before = len(frame.sparkSession.sparkContext.statusTracker().getJobIdsForGroup(None))
    with pytest.raises(error, match=message) as caught:
        TorchRegressor(**{"module": LitMinimal, **QUICK, **params}).fit(marked)
    assert not isinstance(caught.value, RankError)
    assert caught.value.hint  # type: ignore[attr-defined]
    assert len(frame.sparkSession.sparkContext.statusTracker().getJobIdsForGroup(None)) <= before + 1  # the first row
