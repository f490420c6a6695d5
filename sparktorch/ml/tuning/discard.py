"""What becomes of models that a search does not return."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import PersistenceError

if TYPE_CHECKING:
    from sparktorch.ml.model import TorchModelBase

__all__ = ["discard"]

_LOG = logging.getLogger(__name__)


def discard(model: TorchModelBase) -> None:
    """Deletes a model's folder, if it was fitted with `modelDir`; what MLflow logs keeps its own."""
    if not isinstance(model.trained.weights, WeightsFolder) or hasattr(model, "_mlflow_logged"):
        return
    try:
        model.deleteWeights()
    except PersistenceError as error:
        _LOG.warning("a model that the search does not return stays: %s", error)
