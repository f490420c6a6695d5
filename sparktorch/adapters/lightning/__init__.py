"""LightningModules: their steps, optimizers, logged values and hooks as the parts of a training."""

from sparktorch.adapters.lightning.recipe import LightningRecipe, recipe_type
from sparktorch.adapters.lightning.recognise import check_class, is_lightning, without_trainer

__all__ = ["LightningRecipe", "check_class", "is_lightning", "recipe_type", "without_trainer"]
