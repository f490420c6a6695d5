"""What `configure_optimizers` returns, read by Lightning's own functions: the optimizer and its schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from sparktorch.adapters.lightning.recognise import base_of
from sparktorch.adapters.lightning.state import TrainerView
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.lr_schedule import Schedule, without_step_warning

__all__ = ["Configured", "LightningSchedule", "configured"]


@dataclass
class Configured:
    """An optimizer, and the schedulers of its learning rates, each a `LRSchedulerConfig` of Lightning's."""

    optimizer: Optimizer
    schedulers: list[Any]


def configured(module: Any) -> Configured:
    """Calls `configure_optimizers`; what Lightning's Trainer cannot use raises its errors."""
    lightning: Any = import_module(f"{base_of(type(module)).__module__.rpartition('.')[0]}.optimizer")
    returned = module.configure_optimizers()
    if isinstance(returned, dict) and returned.get("lr_scheduler", ...) is None:
        returned = {name: value for name, value in returned.items() if name != "lr_scheduler"}
    optimizers, returned_schedulers, monitor = lightning._configure_optimizers(returned)
    schedulers = lightning._configure_schedulers_automatic_opt(returned_schedulers, monitor)
    lightning._validate_optimizers_attached(optimizers, schedulers)
    lightning._validate_scheduler_api(schedulers, module)
    what, hint = "", ""
    if len(optimizers) != 1:
        what = f"{len(optimizers)} optimizers, and a fit has one"
        hint = "give one optimizer several parameter groups; sparktorch.run trains with a loop of your own"
    elif isinstance(optimizers[0], torch.optim.LBFGS):
        what, hint = "LBFGS, which computes the loss several times in a step", "choose another one"
    elif any(scheduler.frequency < 1 for scheduler in schedulers):
        what, hint = "a scheduler with a frequency below 1", "set it to the epochs or steps between its steps"
    elif any(scheduler.reduce_on_plateau and scheduler.interval == "step" for scheduler in schedulers):
        what, hint = "a ReduceLROnPlateau that looks at its metric after each step", "set its interval to 'epoch'"
    if what:
        name = type(module).__qualname__
        raise ModuleError(
            f"configure_optimizers of {name} returned {what}", hint=hint, param="module", code="ST-LIGHTNING"
        )
    return Configured(optimizers[0], schedulers)


class LightningSchedule(Schedule):
    """Steps the module's own schedulers, after each step or each epoch."""

    def __init__(self, configured: Configured, optimizer: Optimizer, trainer: TrainerView) -> None:
        """Takes the schedulers, the optimizer in use, which has the same groups, and what tells of the epoch."""
        self._optimizer, self._schedulers, self._trainer = optimizer, configured.schedulers, trainer
        self._step, self._scheduler = 0, None
        without_step_warning(optimizer)
        without_step_warning(configured.optimizer)
        self._last_rate = optimizer.param_groups[0]["lr"]

    def step(self, take: Callable[[], object]) -> None:
        """Calls `take`, an optimizer step, and steps the schedulers without `monitor`: before a validation."""
        self._step += 1
        self._last_rate = self._groups[0]["lr"]
        take()
        trainer = self._trainer
        batches = self._step * trainer.accumulate_grad_batches
        counts = {"step": batches}
        if batches == trainer.num_training_batches:
            counts["epoch"] = trainer.current_epoch + 1
        for config in self._schedulers:
            count = counts.get(config.interval)
            if count and not config.reduce_on_plateau and count % config.frequency == 0:
                config.scheduler.step()

    def epoch_done(self, record: Mapping[str, Any], *, validated: bool) -> None:
        """Steps the schedulers that look at a logged value."""
        self._step = 0
        for config in self._schedulers:
            if not config.reduce_on_plateau or record["epoch"] % config.frequency:
                continue
            value = self._trainer.callback_metrics.get(config.monitor or "")
            if value is not None:
                config.scheduler.step(float(value))
            elif config.strict:
                what = f"configure_optimizers monitors {config.monitor!r}, which is not logged"
                hint = f"there are {', '.join(self._trainer.callback_metrics)}"
                raise ModuleError(what, hint=hint, param="module")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedulers, with the learning rates, as plain values."""
        return super().state_dict() | {"schedulers": [config.scheduler.state_dict() for config in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        for config, values in zip(self._schedulers, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        super().load_state_dict(state)
