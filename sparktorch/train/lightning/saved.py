"""What a LightningModule adds to a checkpoint: its hooks for it, and its plain attributes that a training changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sparktorch.train.lightning.attributes import plain_attributes
from sparktorch.train.lightning.recognise import overrides
from sparktorch.train.lightning.trainer import TrainerView

__all__ = ["Saved"]


class Saved:
    """Saves and restores a module, but for its weights."""

    def __init__(self, module: nn.Module, trainer: TrainerView) -> None:
        """Notes the plain attributes that the module was built with."""
        self._module: Any = module
        self._trainer, self._built = trainer, plain_attributes(module)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `on_save_checkpoint` adds, and the plain attributes that are not as built."""
        checkpoint = self._checkpoint()
        if overrides(self._module, "on_save_checkpoint"):
            self._module.on_save_checkpoint(checkpoint)
        saved = {name: value for name, value in checkpoint.items() if name not in self._checkpoint()}
        now, built = plain_attributes(self._module), self._built
        changed = {name: value for name, value in now.items() if name not in built or built[name] != value}
        return {"saved": saved, "attributes": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        vars(self._module).update(state["attributes"])
        if overrides(self._module, "on_load_checkpoint"):
            self._module.on_load_checkpoint(self._checkpoint() | state["saved"])

    def _checkpoint(self) -> dict[str, Any]:
        """Returns the checkpoint that the hooks see: weights are saved elsewhere, each rank its share."""
        epoch, step = self._trainer.current_epoch, self._trainer.global_step
        return {"epoch": epoch, "global_step": step, "state_dict": {}}
