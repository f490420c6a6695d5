"""The adapter of Hugging Face's models: instances, classes, configurations, and local folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from sparktorch.adapters.huggingface.folder import opened, rebuildable
from sparktorch.adapters.huggingface.loss import ModelLossStep
from sparktorch.adapters.huggingface.models import argument_names, is_config, is_folder, is_model, model_in
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.train.recipe.adapter import Adapter
from sparktorch.train.recipe.loss import TrainingStep

__all__ = ["HuggingFaceAdapter"]


class HuggingFaceAdapter(Adapter):
    """Models of transformers, which are called by names of arguments, and have losses of their own."""

    recipe = HuggingFaceRecipe

    def recognises(self, source: Any) -> bool:
        """Whether it is a model of transformers, its class or configuration, or a folder."""
        return is_model(source) or is_folder(source) or is_config(source)

    def recipe_fields(
        self, source: Any, params: Mapping[str, Any], *, seed: int, in_place: bool = False, complete: bool = False
    ) -> dict[str, Any]:
        """Returns those of the model in a folder, or of a configuration: `params` replace its entries."""
        fields = opened(source, params, seed=seed, in_place=in_place, complete=complete)
        return super().recipe_fields(source, params, seed=seed) if fields is None else fields

    def loss_step(self, source: Any) -> TrainingStep | None:
        """Returns the step for the model's loss."""
        return ModelLossStep()

    def argument_names(self, module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of the arguments of `forward` that take the inputs; a single one may have any name."""
        return argument_names(module, names)

    def ignores_padding(self, module: nn.Module) -> bool:
        """Whether a model ignores what the attention mask hides, as all of transformers' do."""
        return model_in(module) is not None

    def rebuildable(self, module: Any) -> dict[str, Any] | None:
        """Returns the class and configuration of a model."""
        return rebuildable(module)

    def write(self, module: Any, folder: str, labels: Sequence[str], preprocessor: Any = None) -> None:
        """Writes a folder that `from_pretrained` opens; of adapters what `peft` does, without the base."""
        model = model_in(module)
        if labels and model is not None:
            model.config.id2label = dict(enumerate(labels))
            model.config.label2id = {label: number for number, label in enumerate(labels)}
        super().write(module, folder, labels, preprocessor)

    def to_json(self, value: Any) -> dict[str, Any] | None:
        """Returns a configuration as JSON."""
        if not is_config(value) or isinstance(value, type):
            return None
        values: dict[str, Any] = json.loads(value.to_json_string(use_diff=False))
        return values

    def from_json(self, kind: Any, values: dict[str, Any]) -> Any:
        """Returns a configuration of a class of them."""
        if not (isinstance(kind, type) and is_config(kind)):
            return None
        return cast(Any, kind).from_dict(values)
