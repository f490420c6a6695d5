"""Models with adapters by PEFT: `PeftModel`s, and models of transformers after `add_adapter`."""

from __future__ import annotations

from typing import Any

from sparktorch.adapters.huggingface.adapter import HuggingFaceAdapter
from sparktorch.adapters.huggingface.models import model_in
from sparktorch.train.recipe.loss import TrainingStep

__all__ = ["PeftAdapter"]


class PeftAdapter(HuggingFaceAdapter):
    """Modules whose adapters alone are trained; everything else is as for the transformers model that they adapt."""

    has_frozen_base = True

    def recognises(self, source: Any) -> bool:
        """Whether it is an instance with adapters."""
        return isinstance(getattr(source, "peft_config", None), dict)

    def loss_step(self, source: Any) -> TrainingStep | None:
        """Returns the step for the loss of the base model; `None` if the base is no model of transformers."""
        return None if model_in(source) is None else super().loss_step(source)
