"""The recipe of a transformers model, whose configuration is JSON, and whose weights may be in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparktorch.adapters.huggingface.folder import ConvertedWeights
from sparktorch.adapters.huggingface.models import is_model
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["HuggingFaceRecipe"]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceRecipe(Recipe):
    """What is trained, with a model of transformers."""

    def _arguments(self, factory: Any) -> Mapping[str, Any]:
        """Returns the arguments of the factory; a class of models gets `config` as a configuration, not as a dict."""
        config = self.module_params.get("config")
        if not is_model(factory) or not isinstance(config, Mapping):
            return self.module_params
        return {**self.module_params, "config": factory.config_class.from_dict(dict(config))}

    def _saved_of(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        """Returns the initial weights under a module's names; transformers' rules rename the weights of a folder."""
        folder = self.initial
        if isinstance(folder, bytes) or folder.token or not is_model(module):
            return super()._saved_of(module)
        return ConvertedWeights(module, folder)
