"""Pillow, the optional dependency that decodes images."""

from __future__ import annotations

import importlib
from typing import Any

from sparktorch.errors import ConfigError

__all__ = ["pillow"]


def pillow() -> Any:
    """Returns Pillow's module `PIL.Image`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            "images are decoded by Pillow, which is not installed",
            hint="pip install sparktorch-estimator[images], on the executors too",
        ) from error
