"""PyTorch models in MLflow score by their URI."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow.models.model import ModelInfo
from pyspark.sql import DataFrame

from sparktorch import TorchClassificationModel, TorchModel
from sparktorch.errors import ModuleError
from sparktorch.tracking import save_model
from tests.spark.modules import MLP
from tests.support.mlflow import QUIET

pytestmark = QUIET


@pytest.fixture(scope="module")
def net() -> MLP:
    torch.manual_seed(0)
    return MLP(5, 3)


@pytest.fixture(scope="module")
def logged(store: mlflow.MlflowClient, net: MLP) -> ModelInfo:
    with mlflow.start_run():
        return mlflow.pytorch.log_model(net, name="net", registered_model_name="net", serialization_format="pickle")


def test_a_pytorch_model_scores_by_its_uri_and_by_its_folder(logged: ModelInfo, net: MLP, frame: DataFrame) -> None:
    rows = frame.limit(20).cache()
    folder = mlflow.artifacts.download_artifacts(logged.model_uri)
    with torch.no_grad():
        expected = net(torch.tensor([row.features for row in rows.collect()])).numpy()
    for uri in ("models:/net/1", folder, Path(folder)):
        found = TorchModel.fromModule(uri, rows).transform(rows).collect()
        np.testing.assert_allclose([row.prediction for row in found], expected, atol=1e-6)


def test_a_model_of_ours_is_refused_with_what_loads_it(net: MLP, frame: DataFrame, tmp_path: Path) -> None:
    save_model(TorchClassificationModel.fromModule(net, frame), str(tmp_path / "ours"))
    with pytest.raises(ModuleError, match=r"model of sparktorch's already(.|\n)*tracking.load_model"):
        TorchModel.fromModule(str(tmp_path / "ours"), frame)
