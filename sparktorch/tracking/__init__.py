"""MLflow: the model flavour, and the listener that logs a fit."""

from __future__ import annotations

from sparktorch.tracking.flavor import load_model, log_model, save_model

__all__ = ["load_model", "log_model", "save_model"]
