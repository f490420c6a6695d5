"""The optimizer and the schedulers that `configure_optimizers` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sparktorch.errors import ModuleError
from sparktorch.train.lightning.trainer import TrainerView
from sparktorch.train.recipe.lr_schedule import Schedule

__all__ = ["Configured", "LightningSchedule", "Scheduled", "configured"]

_FORMS = "an optimizer, ([optimizer], [schedulers]), or {'optimizer': ..., 'lr_scheduler': ...}"


@dataclass
class Scheduled:
    """A scheduler, and when it steps; the keys of Lightning's dict.

    Attributes:
        scheduler: The scheduler.
        interval: "step" or "epoch".
        frequency: Number of batches (micro-batches of `accumulationSteps`) or epochs between its steps.
        monitor: Name of the value that `ReduceLROnPlateau` looks at.
        reduce_on_plateau: Whether its step takes that value.
        strict: Whether the value must be there.
        name: Ignored.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    reduce_on_plateau: bool = False
    strict: bool = True
    name: str | None = None


@dataclass
class Configured:
    """An optimizer, and the schedulers of its learning rates."""

    optimizer: Optimizer
    schedulers: list[Scheduled]


def configured(module: Any) -> Configured:
    """Calls `configure_optimizers`.

    Raises:
        ModuleError: It returned something that a fit cannot use.
    """
    where = f"configure_optimizers of {type(module).__qualname__}"
    optimizers, schedulers = _forms(module.configure_optimizers(), where)
    if len(optimizers) != 1:
        raise _refused(
            f"{where} returned {len(optimizers)} optimizers, and a fit has one",
            "give one optimizer several parameter groups; sparktorch.run trains with a loop of your own",
        )
    (optimizer,) = optimizers
    if not isinstance(optimizer, Optimizer):
        raise _refused(f"{where} returned a {type(optimizer).__name__} as optimizer", "return one of torch.optim")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _refused(f"{where} returned LBFGS, which computes the loss several times in a step", "choose another one")
    found = [_scheduled(value, where) for value in schedulers]
    for each in found:
        if each.scheduler.optimizer is not optimizer:
            raise _refused(f"{where} returned a scheduler of another optimizer", "make it of the one that is returned")
    return Configured(optimizer, found)


def _forms(value: Any, where: str) -> tuple[list[Any], list[Any]]:
    """Returns the optimizers and the schedulers, these as dicts of Lightning's keys."""
    if isinstance(value, Optimizer):
        return [value], []
    if isinstance(value, Mapping) and "optimizer" in value:
        unknown = sorted(map(str, value.keys() - {"optimizer", "lr_scheduler", "monitor"}))
        if unknown:
            raise _refused(f"{where} returned a dict with {', '.join(unknown)}", f"return {_FORMS}")
        given = value.get("lr_scheduler")
        return [value["optimizer"]], [] if given is None else [_keyed(given, value.get("monitor"))]
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], list):
        given = value[1] if isinstance(value[1], list) else [value[1]]
        return value[0], [_keyed(each, None) for each in given]
    if isinstance(value, list | tuple) and value:
        made = [_forms(each, where) for each in value if isinstance(each, Optimizer | Mapping)]
        if len(made) == len(value):
            return [one for some, _ in made for one in some], [one for _, some in made for one in some]
    raise _refused(f"{where} returned {type(value).__name__}", f"return {_FORMS}")


def _keyed(value: Any, monitor: str | None) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"scheduler": value, "monitor": monitor}


def _scheduled(value: dict[str, Any], where: str) -> Scheduled:
    known = [field.name for field in fields(Scheduled)]
    unknown = sorted(map(str, value.keys() - set(known)))
    if unknown or "scheduler" not in value:
        what = f"has {', '.join(unknown)}" if unknown else "has no 'scheduler'"
        raise _refused(f"{where} returned a scheduler's dict that {what}", f"its keys are {', '.join(known)}")
    plateau = value.get("reduce_on_plateau", isinstance(value["scheduler"], ReduceLROnPlateau))
    found = Scheduled(**{**value, "reduce_on_plateau": plateau})
    name = type(found.scheduler).__name__
    if found.interval not in ("step", "epoch"):
        raise _refused(f"{where} sets the interval of {name} to {found.interval!r}", "it is 'step' or 'epoch'")
    if not isinstance(found.frequency, int) or found.frequency < 1:
        raise _refused(f"{where} sets the frequency of {name} to {found.frequency!r}", "it is a number from 1")
    missing = [
        part for part in ("step", "state_dict", "load_state_dict", "optimizer") if not hasattr(found.scheduler, part)
    ]
    if missing:
        raise _refused(
            f"{where} returned {name} as scheduler, which has no {missing[0]}", "use torch.optim.lr_scheduler"
        )
    if plateau and found.monitor is None:
        raise _refused(f"{where} names no 'monitor' for {name}", "add the name of a logged value as 'monitor'")
    if plateau and found.interval == "step":
        raise _refused(f"{where} steps {name} after each step", "set its interval to 'epoch'")
    return found


def _refused(what: str, hint: str) -> ModuleError:
    return ModuleError(what, hint=hint, param="module")


class LightningSchedule(Schedule):
    """Steps the module's own schedulers, after each step or each epoch."""

    def __init__(self, made: Configured, optimizer: Optimizer, trainer: TrainerView) -> None:
        """Takes the schedulers.

        Args:
            made: From `configure_optimizers`.
            optimizer: The optimizer in use, which has the same parameter groups.
            trainer: Tells the epoch, its number of batches, and the latest values, for `ReduceLROnPlateau`.
        """
        self._optimizer, self._schedulers, self._trainer = optimizer, made.schedulers, trainer
        self._step = 0
        self._last_rate = optimizer.param_groups[0]["lr"]

    def step(self, take: Callable[[], object]) -> None:
        """Calls `take`, an optimizer step, and steps the schedulers without `monitor`: before a validation."""
        self._step += 1
        self._last_rate = self._groups[0]["lr"]
        take()
        trainer = self._trainer
        batches = self._step * trainer.accumulate_grad_batches
        done = {"step": batches}
        if batches == trainer.num_training_batches:
            done["epoch"] = trainer.current_epoch + 1
        for each in self._schedulers:
            if not each.reduce_on_plateau and each.interval in done and done[each.interval] % each.frequency == 0:
                each.scheduler.step()

    def epoch_done(self, record: Mapping[str, Any], *, validated: bool) -> None:
        """Steps the schedulers that look at a logged value.

        Raises:
            ModuleError: A monitored value was not logged.
        """
        self._step = 0
        for each in self._schedulers:
            if not each.reduce_on_plateau or record["epoch"] % each.frequency:
                continue
            if (value := self._trainer.callback_metrics.get(each.monitor or "")) is not None:
                each.scheduler.step(float(value))
            elif each.strict:
                raise ModuleError(
                    f"configure_optimizers monitors {each.monitor!r}, which is not logged",
                    hint=f"there are {', '.join(self._trainer.callback_metrics)}",
                    param="module",
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the schedulers, with the learning rates, as plain values."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self._groups]
        schedulers = [each.scheduler.state_dict() for each in self._schedulers]
        return {"step": self._step, "last_rate": self._last_rate, "groups": groups, "schedulers": schedulers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._step, self._last_rate = state["step"], state["last_rate"]
        for each, values in zip(self._schedulers, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(values)
        for group, values in zip(self._groups, state["groups"], strict=True):
            group.update(values)
