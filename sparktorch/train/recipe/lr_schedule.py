"""The learning rate over the steps: a torch scheduler, warm-up, and the linear scaling rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.lookup import name_of
from sparktorch.train.recipe.recipe import KERNELS, Recipe

__all__ = ["Schedule", "fixed_epochs", "without_step_warning"]

_WARMUP_EPOCHS = 5  # See Goyal et al. 2017, section 2.2.


class Schedule:
    """Steps a scheduler after each optimizer step or each epoch, and warms up the first steps.

    With a reference batch size, it applies the linear scaling rule of Goyal et al. 2017
    (https://arxiv.org/abs/1706.02677): over the first five epochs, the learning rate moves linearly from the user's
    rate to `batch size / reference` times this rate.
    """

    def __init__(self, recipe: Recipe, config: TrainConfig, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Builds the scheduler that the recipe names; `steps` is the number of steps in an epoch."""
        self._optimizer = optimizer
        self._by_step = config.schedule_interval == "step"
        scaling = 1.0
        if config.reference_batch_size is not None:
            scaling = config.batch_size / config.reference_batch_size
            for group in optimizer.param_groups:
                group["lr"] *= scaling
        warmup = config.warmup_steps
        if warmup is None:
            warmup = _WARMUP_EPOCHS * steps if scaling != 1 else 0
        self._warmup_steps = warmup
        # The factor of the learning rate before the first step.
        self._first_factor = 1 / scaling if scaling != 1 else 0.0
        self._step = 0
        self._scheduler = recipe.build_scheduler(optimizer, config.epochs * (steps if self._by_step else 1))
        without_step_warning(optimizer)
        self._last_rate = optimizer.param_groups[0]["lr"]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step."""
        return float(self._last_rate)

    def step(self, take: Callable[[], object]) -> None:
        """Calls `take`, an optimizer step, at the learning rates of this step."""
        self._step += 1
        groups = self._optimizer.param_groups
        self._last_rate = groups[0]["lr"]
        if self._step <= self._warmup_steps:
            # A scheduler may compute the next rate from the current one, so it must not see the rate of the warm-up.
            factor = self._first_factor + (1 - self._first_factor) * self._step / self._warmup_steps
            scheduled = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] *= factor
            self._last_rate = groups[0]["lr"]
            take()
            for group, rate in zip(groups, scheduled, strict=True):
                group["lr"] = rate
        else:
            take()
        if self._by_step and self._scheduler is not None:
            self._scheduler.step()

    def epoch_done(self, record: Mapping[str, Any], *, validated: bool) -> None:
        """Steps a scheduler that goes by epochs. `ReduceLROnPlateau` sees validation losses only, if there are any."""
        if self._scheduler is None or self._by_step:
            return
        if isinstance(self._scheduler, ReduceLROnPlateau):
            loss = record.get("val_loss" if validated else "loss")
            if loss is not None:
                self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule's state, with the learning rates, as plain values."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        return {"step": self._step, "last_rate": self._last_rate, "groups": groups, "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._step = state["step"]
        self._last_rate = state["last_rate"]
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for group, values in zip(self._groups, state["groups"], strict=True):
            group.update({name: value for name, value in values.items() if name not in KERNELS})


def without_step_warning(optimizer: torch.optim.Optimizer) -> None:
    """Stops torch's schedulers from warning that the optimizer has taken no step: a schedule counts skipped steps, too.

    The skipped step may be the first one.
    """
    vars(optimizer)["_opt_called"] = True


def fixed_epochs(recipe: Recipe) -> str:
    """Returns why a training cannot go on with another number of epochs; empty if it can."""
    if recipe.steps_itself:
        return "a LightningModule may read self.trainer.max_epochs"
    if recipe.scheduler is None:
        return ""
    factory, options = recipe.scheduler_call(1)
    filled = ", ".join(sorted(options.keys() - recipe.scheduler_params.keys()))
    return filled and (
        f"scheduler {name_of(factory)} gets {filled} from epochs (it need not if schedulerParams have {filled} from "
        "the beginning)"
    )
