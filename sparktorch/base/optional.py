"""Optional dependencies: Pillow decodes images, Optuna chooses the trials of a search, transformers has models."""

from __future__ import annotations

import importlib
from typing import Any

from sparktorch.errors import ConfigError

__all__ = ["optuna", "pillow", "transformers"]


def pillow() -> Any:
    """Returns Pillow's module `PIL.Image`; a `ConfigError` says that it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            "images are decoded by Pillow, which is not installed",
            hint="pip install sparktorch-estimator[images], on the executors too",
        ) from error


def optuna() -> Any:
    """Returns Optuna's module; a `ConfigError` says that it is not installed."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            "the trials of a search are chosen by Optuna, which is not installed",
            hint="pip install sparktorch-estimator[search], on the driver alone",
        ) from error


def transformers() -> Any:
    """Returns Hugging Face's module; a `ConfigError` says that it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "models in folders and configurations are made by transformers, which is not installed",
            hint="pip install sparktorch-estimator[huggingface], on the executors too",
        ) from error
