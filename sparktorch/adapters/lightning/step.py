"""Calls a LightningModule in training steps and validation steps, and reduces what it logs over all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import add
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.loss import Means, Sums, TrainingStep, mean_of, weigh
from sparktorch.train.recipe.module_hooks import Within

__all__ = ["Call", "LightningStep", "Logs", "arguments_of", "called", "check_logged", "loss_of", "number_of"]

Call = Callable[[Callable[[], Any]], Any]
Pair = tuple[Any, Any]  # A value and its weight; for a mean, the value is multiplied by the weight.

_OF_EPOCH = {"loss", "learning_rate", "gradient_norm"}  # The value of one step does not replace these record entries.
_RECORD = {"epoch", "seconds", "rows_per_second", "data_wait_share", "steps", "validations", "skipped_steps"}


def _larger(one: Any, other: Any) -> torch.Tensor:
    """Returns the larger of two numbers. Unlike Python's `max`, it does not wait for the device."""
    return torch.as_tensor(one).maximum(torch.as_tensor(other))


def _smaller(one: Any, other: Any) -> torch.Tensor:
    """Returns the smaller of two numbers. Unlike Python's `min`, it does not wait for the device."""
    return torch.as_tensor(one).minimum(torch.as_tensor(other))


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": add,
    "sum": add,
    "max": _larger,
    "min": _smaller,
}


def check_logged(name: str, reduce_fx: Any, where: str) -> str:
    """Returns how the values under a name are reduced; refuses names that the record of the epoch has itself."""
    reduce = "mean" if reduce_fx == "avg" else str(getattr(reduce_fx, "__name__", reduce_fx))
    what = hint = ""
    if name in _RECORD:
        what, hint = f"the record of the epoch has its own {name!r}", "choose another name"
    elif reduce not in _REDUCTIONS:
        what, hint = f"reduce_fx is {reduce!r}", f"it is one of {', '.join(_REDUCTIONS)}"
    if what:
        raise ModuleError(f"{where}: {what}", hint=hint)
    return reduce


def number_of(value: Any, where: str) -> torch.Tensor:
    """Returns a logged value as a tensor of one element."""
    if isinstance(value, torch.Tensor | int | float) and (number := torch.as_tensor(value)).numel() == 1:
        return number
    shape = f" of the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    hint = "log a number, a tensor of one element, or a torchmetrics metric that is the module's attribute"
    raise ModuleError(f"{where}: the value is a {type(value).__name__}{shape}", hint=hint)


@dataclass
class _Logged:
    """The values under one name, reduced for the last step that has a value, and for the epoch.

    Attributes:
        reduce: A key of `_REDUCTIONS`.
        on_step: Whether the record gets the value of the last step.
        on_epoch: Whether the record gets the value of the epoch.
        step: The last step that has a value.
        metric: The path of the torchmetrics metric that has the epoch's value; empty if there is none.
        last: The reduced value of this step.
        epoch: The reduced value of the epoch.
    """

    reduce: str
    on_step: bool
    on_epoch: bool
    step: int
    metric: str = ""
    last: Pair | None = None
    epoch: Pair | None = None

    def merge(self, other: _Logged) -> None:
        """Adds the values that another rank has logged under this name, or this rank later."""
        self.epoch = self._reduce(self.epoch, other.epoch)
        if other.step > self.step:
            self.step = other.step
            self.last = other.last
        elif other.step == self.step:
            self.last = self._reduce(self.last, other.last)

    def value(self, pair: Pair) -> float:
        """Returns the reduced value."""
        return mean_of(*pair) if self.reduce == "mean" else float(pair[0])

    def plain(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        last, epoch = (None if pair is None else (float(pair[0]), float(pair[1])) for pair in (self.last, self.epoch))
        return asdict(replace(self, last=last, epoch=epoch))

    def _reduce(self, one: Pair | None, other: Pair | None) -> Pair | None:
        if one is None:
            return other
        if other is None:
            return one
        return _REDUCTIONS[self.reduce](one[0], other[0]), one[1] + other[1]


class Logs(Means):
    """Logged values by name, which stay on the device until the ranks exchange them.

    Attributes:
        metrics: After `over_ranks`, the paths of the torchmetrics metrics that any rank has logged.
    """

    def __init__(self, computed: Callable[[str], float]) -> None:
        """Takes a function that computes the value of a metric from its path; this function is a collective."""
        super().__init__()
        self._computed = computed
        self._logged: dict[str, _Logged] = {}
        self.metrics: set[str] = set()

    def log(self, name: str, value: torch.Tensor | None, weight: int, *, reduce: str, **how: Any) -> None:
        """Adds a value, with `how` as the other fields of `_Logged`; `None` only notes the name of a metric."""
        pair = None
        if value is not None:
            pair = (value.double() * (weight if reduce == "mean" else 1), weight)
        self._add(name, _Logged(reduce, **how, last=pair, epoch=None if how.get("metric") else pair))

    @property
    def logged_metrics(self) -> set[str]:
        """Paths of the metrics that this rank has logged."""
        return {logged.metric for logged in self._logged.values() if logged.metric}

    def clear(self) -> None:
        """Removes all values."""
        self._logged = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's values by name, for `load_state_dict`."""
        return {name: logged.plain() for name, logged in self._logged.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the values that `state_dict` returned."""
        for name, values in state.items():
            self._add(name, _Logged(**values))

    def over_ranks(self, world: World) -> dict[str, float]:
        """Returns the values over all ranks; a collective, called by every rank."""
        whole = Logs(self._computed)
        for state in self._gather_sums(world):  # In rank order, so that all ranks see the same names in the same order.
            whole.load_state_dict(state)
        self.metrics = whole.logged_metrics
        values: dict[str, float] = {}
        for name, logged in whole._logged.items():
            # As in Lightning, a name that is logged both ways gets the suffixes "_step" and "_epoch".
            has_both = logged.on_step and logged.on_epoch
            if logged.on_step and logged.last is not None and (has_both or name not in _OF_EPOCH):
                values[f"{name}_step" if has_both else name] = logged.value(logged.last)
            if logged.on_epoch and (logged.metric or logged.epoch is not None):
                value = self._computed(logged.metric) if logged.metric else logged.value(logged.epoch or (0, 0))
                values[name] = value
                if has_both:
                    values[f"{name}_epoch"] = value
        return values

    def _add(self, name: str, logged: _Logged) -> None:
        if name in self._logged:
            self._logged[name].merge(logged)
        else:
            self._logged[name] = logged


class LightningStep(TrainingStep):
    """Calls `training_step` within the module's forward pass, and `validation_step` for validation rows."""

    param = "module"
    hint = "its batch is a tuple: (*inputs, label), without a label (*inputs,); self.logger is None, self.log is there"
    logs_validation = True

    def __init__(self, training: Any, within: Within) -> None:
        """Takes a `LightningTraining`, and what calls a function within the module's forward pass."""
        self.what = f"training_step of {training.name}"
        self._training = training
        self._within = within

    def means(self, prefix: str) -> Logs:
        """Returns an empty collection, into which the module logs values from now on."""
        logs: Logs = self._training.new_logs(prefix)
        return logs

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss, and no metrics: what the module logs goes to `Logs`."""
        return self._training.train(partial(self._within, module), batch), {}

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns the weighted sum of the losses that `validation_step` returned; `None` if it returned no loss."""
        loss = self._training.validate(partial(self._within, module), batch)
        if loss is None or not batch.rows:
            return None, {}
        what = f"validation_step of {self._training.name}"
        return weigh(loss.float(), batch.rows, batch.loss_weight, what=what, param=self.param), {}


def arguments_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Returns the batch that the module's steps get: the inputs, and the label if there is one."""
    whole = batch.complete()
    return whole.inputs if whole.label is None else (*whole.inputs, whole.label)


def called(method: Callable[..., Any], batch: tuple[torch.Tensor, ...], index: int) -> Any:
    """Calls a step of a module, which may leave out the argument `batch_idx`."""
    try:
        inspect.signature(method).bind(batch, index)
    except TypeError:
        return method(batch)
    return method(batch, index)


def loss_of(output: Any, name: str) -> torch.Tensor:
    """Returns the loss in the output of a module's `training_step`; refuses an output without a loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    what = f"a dict with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else type(output).__name__
    none = "None, which would skip the batch in this rank only"
    raise ModuleError(
        f"training_step of {name} returned {none if output is None else what}",
        hint="return the loss, or a dict with it under 'loss'; for a batch that does not count, return loss * 0",
        param="module",
        code="ST-LIGHTNING",
    )
