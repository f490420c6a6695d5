"""The values of an estimator's Params by name."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Params

__all__ = ["Values"]


class Values:
    """Param values by name; `None` if the Param does not exist, or has neither value nor default."""

    def __init__(self, instance: Params) -> None:
        self._instance = instance

    def __getitem__(self, name: str) -> Any:
        instance = self._instance
        return instance.getOrDefault(name) if instance.hasParam(name) and instance.isDefined(name) else None
