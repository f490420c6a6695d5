"""How a step of a training, and one of a validation, calls a LightningModule, and what that logs over all ranks."""

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
Pair = tuple[Any, Any]  # It is a value, for a mean times its weight, and the weight.

# The record of an epoch has these itself, and no value of one step replaces them.
_OF_EPOCH = {"loss", "learning_rate", "gradient_norm"}
_RECORD = {"epoch", "seconds", "rows_per_second", "data_wait_share", "steps", "validations", "skipped_steps"}


def _larger(first: Any, second: Any) -> torch.Tensor:
    """Returns the larger of two numbers. Unlike Python's `max`, it does not wait for the device."""
    return torch.as_tensor(first).maximum(torch.as_tensor(second))


def _smaller(first: Any, second: Any) -> torch.Tensor:
    """Returns the smaller of two numbers. Unlike Python's `min`, it does not wait for the device."""
    return torch.as_tensor(first).minimum(torch.as_tensor(second))


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {"mean": add, "sum": add, "max": _larger, "min": _smaller}


def check_logged(name: str, reduce_fx: Any, where: str) -> str:
    """Returns how values of a name are reduced; refuses names that the record of the epoch has."""
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
    if isinstance(value, torch.Tensor | int | float):
        number = torch.as_tensor(value)
        if number.numel() == 1:
            return number
    shape = f" of the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    hint = "log a number, a tensor of one element, or a torchmetrics metric that is the module's attribute"
    raise ModuleError(f"{where}: the value is a {type(value).__name__}{shape}", hint=hint)


@dataclass
class _Logged:
    """The values of one name, reduced for the last step that has one, and for the epoch."""

    reduce: str  # It is a key of `_REDUCTIONS`.
    on_step: bool
    on_epoch: bool
    step: int
    metric: str = ""  # The torchmetrics metric at this path has the epoch's value.
    last: Pair | None = None
    epoch: Pair | None = None

    def merge(self, other: _Logged) -> None:
        """Adds the values that another rank has logged under this name, or this rank later."""
        self.epoch = self._reduced(self.epoch, other.epoch)
        if other.step > self.step:
            self.step, self.last = other.step, other.last
        elif other.step == self.step:
            self.last = self._reduced(self.last, other.last)

    def value(self, pair: Pair) -> float:
        """Returns the reduced value."""
        return mean_of(*pair) if self.reduce == "mean" else float(pair[0])

    def plain(self) -> dict[str, Any]:
        """Returns its fields as plain values."""
        last, epoch = (None if pair is None else (float(pair[0]), float(pair[1])) for pair in (self.last, self.epoch))
        return asdict(replace(self, last=last, epoch=epoch))

    def _reduced(self, first: Pair | None, second: Pair | None) -> Pair | None:
        if first is None or second is None:
            return second if first is None else first
        return _REDUCTIONS[self.reduce](first[0], second[0]), first[1] + second[1]


class Logs(Means):
    """Logged values by name. They stay on the device until the ranks exchange them, and know all ranks' metrics."""

    def __init__(self, computed: Callable[[str], float]) -> None:
        """Takes a function that computes the value of a metric, given its path; it is a collective."""
        super().__init__()
        self._computed = computed
        self._logged: dict[str, _Logged] = {}
        self.metrics: set[str] = set()

    def log(self, name: str, value: torch.Tensor | None, weight: int, *, reduce: str, **how: Any) -> None:
        """Adds a value, `how` as the fields of `_Logged`; `None` only notes the name of a metric."""
        pair = None if value is None else (value.double() * (weight if reduce == "mean" else 1), weight)
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
        """Adds such values."""
        for name, values in state.items():
            self._add(name, _Logged(**values))

    def over_ranks(self, world: World) -> dict[str, float]:
        """Returns the values over all ranks; a collective, called by every rank."""
        of_all_ranks = Logs(self._computed)
        for state in self._gather_sums(world):  # In rank order, so that all ranks see the same names in the same order.
            of_all_ranks.load_state_dict(state)
        self.metrics = of_all_ranks.logged_metrics
        values: dict[str, float] = {}
        for name, logged in of_all_ranks._logged.items():
            both = logged.on_step and logged.on_epoch
            if logged.on_step and logged.last is not None and (both or name not in _OF_EPOCH):
                values[f"{name}_step" if both else name] = logged.value(logged.last)
            if logged.on_epoch and (logged.metric or logged.epoch is not None):
                value = self._computed(logged.metric) if logged.metric else logged.value(logged.epoch or (0, 0))
                values |= {name: value, f"{name}_epoch": value} if both else {name: value}
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
        self._training, self._within = training, within

    def means(self, prefix: str) -> Logs:
        """Returns an empty collection, into which values are logged from now on."""
        logs: Logs = self._training.new_logs(prefix)
        return logs

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss; what the module logs does not pass here."""
        return self._training.train(partial(self._within, module), batch), {}

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns the weighted sum of the losses that `validation_step` returned; `None` if it returned none."""
        loss = self._training.validate(partial(self._within, module), batch)
        if loss is None or not batch.rows:
            return None, {}
        what = f"validation_step of {self._training.name}"
        return weigh(loss.float(), batch.rows, batch.loss_weight, what=what, param=self.param), {}


def arguments_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Returns the batch that the module's steps get: the inputs, and the label if there is one."""
    batch = batch.complete()
    return batch.inputs if batch.label is None else (*batch.inputs, batch.label)


def called(method: Callable[..., Any], batch: tuple[torch.Tensor, ...], index: int) -> Any:
    """Calls a step, whose `batch_idx` may be left out."""
    try:
        inspect.signature(method).bind(batch, index)
    except TypeError:
        return method(batch)
    return method(batch, index)


def loss_of(output: Any, name: str) -> torch.Tensor:
    """Returns the loss in what `training_step` of a module returned."""
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
