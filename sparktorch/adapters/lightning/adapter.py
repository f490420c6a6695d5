"""The adapter for LightningModules."""

from __future__ import annotations

from typing import Any

from sparktorch.adapters.lightning.recipe import LightningRecipe
from sparktorch.adapters.lightning.recognise import base_of
from sparktorch.train.recipe.adapter import Adapter

__all__ = ["LightningAdapter"]


class LightningAdapter(Adapter):
    """LightningModules, which bring their loss, optimizer and schedule."""

    recipe = LightningRecipe
    brings_training = True

    def recognises(self, source: Any) -> bool:
        """Whether it is a LightningModule, or the class of one."""
        return base_of(source if isinstance(source, type) else type(source)) is not None
