"""What a search does not return is deleted, but where something else may name it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.base.world import World
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning.tuned_model import discard
from sparktorch.train.loop.model_folder import ModelFolder


class Model:
    """What `discard` looks at."""

    def __init__(self, weights: WeightsFolder | bytes) -> None:
        self.trained: Any = self
        self.weights = weights

    def deleteWeights(self) -> None:  # noqa: N802
        TorchModelBase.deleteWeights(self)  # type: ignore[arg-type]


def test_a_folder_is_deleted_unless_mlflow_logs_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = ModelFolder(str(tmp_path / "model"), World()).write({"x": torch.ones(2)})
    logged, plain, gone = Model(written), Model(written), Model(WeightsFolder(str(tmp_path / "gone"), "gone"))
    logged._mlflow_logged = True  # type: ignore[attr-defined]
    plain._mlflow_run_id = "1"  # type: ignore[attr-defined]  # its metrics are logged, and not the model
    discard(logged)  # type: ignore[arg-type]
    assert written["x"].tolist() == [1.0, 1.0]
    discard(plain)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    discard(Model(b""))  # type: ignore[arg-type]
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        discard(gone)  # type: ignore[arg-type]
    assert "does not return stays" in caplog.text
