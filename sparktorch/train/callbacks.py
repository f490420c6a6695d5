"""Callbacks: user code that runs during training, in the ranks and on the driver."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

from sparktorch.base.config import one_of
from sparktorch.base.world import World
from sparktorch.distributed.process_group import max_over_ranks
from sparktorch.errors import ConfigError, RankError

__all__ = ["Callback", "Callbacks", "FitContext", "check_callback"]


@dataclass
class FitContext:
    """The state of a rank's training, which every hook in the rank receives.

    Attributes:
        module: The user's module, unwrapped. With strategies that shard the model, its parameters are this rank's
            shards.
        optimizer: This rank's optimizer.
        world: The rank's position among the ranks, and its device.
        epoch: Number of the epoch, from 1; 0 before the first epoch.
        step: Optimizer steps taken so far, over all epochs.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    epoch: int = 0
    step: int = 0
    _asked_to_stop: bool = field(default=False, repr=False)

    def stop(self) -> None:
        """Requests that training stops after this epoch; a request of one rank stops all ranks."""
        self._asked_to_stop = True


class Callback:
    """Base class of callbacks; a hook that is not overridden does nothing and costs nothing.

    In the ranks, hooks are called in this order: `on_fit_start`; for each epoch `on_epoch_start`, `on_step_end` after
    each step, and `on_epoch_end`; last `on_fit_end`. `on_validation_end` comes after each validation.

    The hooks `on_driver_...` run in the process that called `fit`, on the instance itself. All other hooks run in the
    ranks, each on a copy that was pickled before the training. Changes to a copy are not sent back to the driver. An
    exception in a rank ends the fit.

    Attributes:
        ranks: Where the hooks of the ranks run: "main" means rank 0 only, "all" means every rank. A hook needs "all" if
            it uses a collective of `torch.distributed`, or changes the training, such as learning rates, weights or
            `requires_grad`: if ranks differ after an epoch, the fit ends with an error.
    """

    ranks: Literal["main", "all"] = "main"

    def on_fit_start(self, context: FitContext) -> None:
        """Is called before the first epoch, and before a checkpoint is resumed: epoch and step are 0 here."""

    def on_epoch_start(self, context: FitContext) -> None:
        """Is called before the first step of each epoch."""

    def on_step_end(self, context: FitContext) -> None:
        """Is called after each step of the optimizer."""

    def on_validation_end(self, context: FitContext, metrics: dict[str, float]) -> None:
        """Is called after each validation, with its metrics; they are the same in every rank."""

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        """Is called with the record of the epoch, which is the same in every rank except for times.

        Numbers that rank 0 adds to the record also appear in `summary.history`, and are logged.
        """

    def on_fit_end(self, context: FitContext) -> None:
        """Is called after the last epoch, if the training has not failed.

        `context.module` has the weights of the last step, even if the fitted model gets other weights.
        """

    def on_driver_progress(self, record: dict[str, Any]) -> None:
        """Is called on the driver a few times a second, with epoch, epochs, step, steps and loss of rank 0."""

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        """Is called on the driver with the record of each epoch, as soon as the epoch is over.

        If this hook or `on_driver_progress` raises, the driver logs a warning and stops calling the callback; the fit
        goes on.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints save for the callback; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""


_HOOKS = ("on_fit_start", "on_epoch_start", "on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end")
# Sums of weights may differ by this share between ranks: the kernels of different devices round differently.
_ROUNDING = 1e-5


def check_callback(callback: Any) -> None:
    """Refuses a value that is no `Callback`, or whose `ranks` is unknown."""
    if not isinstance(callback, Callback):
        is_class = isinstance(callback, type)
        what = f"the class {callback.__qualname__}" if is_class else f"a {type(callback).__name__}"
        raise ConfigError(
            f"callbacks holds {what}", hint="pass instances of subclasses of sparktorch.Callback", param="callbacks"
        )
    one_of(f"ranks of {type(callback).__qualname__}", callback.ranks, ("main", "all"))


class Callbacks:
    """The hooks of one rank."""

    def __init__(self, callbacks: Sequence[Callback], context: FitContext) -> None:
        """Looks up which callbacks override each hook, and run it in this rank."""
        self._context = context
        self._all = callbacks
        in_this_rank = [callback for callback in callbacks if callback.ranks == "all" or context.world.is_main]
        self._callbacks_of_hook = {
            hook: [callback for callback in in_this_rank if _overrides(callback, hook)] for hook in _HOOKS
        }

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback, in their order; an exception becomes a `RankError` that names the hook."""
        for callback in self._callbacks_of_hook[hook]:
            self._call(callback, hook, arguments)

    def add_to(self, record: dict[str, Any]) -> None:
        """Calls `on_epoch_end`; the hooks may add nothing but numbers to the epoch's record."""
        before = dict(record)
        self.call("on_epoch_end", record)
        changed = [name for name, value in record.items() if name not in before or value is not before[name]]
        for name in changed:
            if not isinstance(record[name], Real):
                raise ConfigError(
                    f"a callback put {name!r} into the record of the epoch, a {type(record[name]).__name__}",
                    hint="add numbers only",
                    param="callbacks",
                )
            record[name] = float(record[name])

    def state_dict(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns class and state of every callback, for `load_state_dict`."""
        return [(type(callback).__qualname__, callback.state_dict()) for callback in self._all]

    def load_state_dict(self, state: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Restores the state of every callback; a callback without saved state starts fresh."""
        for callback, (name, values) in zip(self._all, state, strict=False):
            if name == type(callback).__qualname__:
                callback.load_state_dict(values)

    def _call(self, callback: Callback, hook: str, arguments: tuple[Any, ...]) -> None:
        try:
            getattr(callback, hook)(self._context, *arguments)
        except Exception as error:
            raise RankError(
                f"{type(callback).__qualname__}.{hook} raised {type(error).__name__}: {error}",
                trace="".join(traceback.format_exception(error)),
            ) from error

    def has_stop_request(self, module_asked: bool | None) -> bool:
        """Returns whether a callback or the module has requested a stop in this rank; checkpoints save it."""
        return self._context._asked_to_stop or bool(module_asked)

    def request_stop(self) -> None:
        """Requests a stop again that was requested before the checkpoint from which the training resumes."""
        self._context.stop()

    def ask_to_stop(self, module_asked: bool | None, shared: Callable[[], Mapping[str, float]]) -> bool:
        """Returns whether a callback or the module has requested a stop in any rank.

        It is a collective, unless nobody can request a stop. `module_asked` says whether this rank's module has
        requested one; `None` means that the module never does. `shared` returns numbers by name that are equal in all
        ranks, unless a hook has changed the training in some ranks only: a `ConfigError` says so.
        """
        world = self._context.world
        if not self._all and module_asked is None:
            return False
        stop_requested = float(self.has_stop_request(module_asked))
        numbers = shared() if world.world_size > 1 else {}
        # One collective finds the maximum over ranks of the request, and maximum and minimum of each number: the
        # minimum is the negative of the maximum of the negative numbers.
        negative = [-number for number in numbers.values()]
        values = torch.tensor([stop_requested, *numbers.values(), *negative], dtype=torch.float64)
        any_asked, *bounds = max_over_ranks(values, world).tolist()
        largest = bounds[: len(numbers)]
        smallest = [-bound for bound in bounds[len(numbers) :]]
        for what, high, low in zip(numbers, largest, smallest, strict=True):
            if high - low > _ROUNDING * abs(high):
                raise self._difference_error(what)
        return bool(any_asked)

    def _difference_error(self, what: str) -> ConfigError:
        """Returns the error for a hook that has made `what` differ between the ranks."""
        callbacks = [callback for callback in self._all if any(_overrides(callback, hook) for hook in _HOOKS)]
        in_main = [type(callback).__qualname__ for callback in callbacks if callback.ranks == "main"]
        in_all = [type(callback).__qualname__ for callback in callbacks if callback.ranks == "all"]
        if in_main:
            reason = f"hooks of {', '.join(in_main)} run in rank 0 alone"
            if in_all:
                reason += f", those of {', '.join(in_all)} in all ranks"
        else:
            reason = f"hooks of {', '.join(in_all) or 'the module'} have changed them in some ranks only"
        return ConfigError(
            f"after epoch {self._context.epoch}, the {what} differ between the ranks: {reason}",
            hint='what changes the training runs in all ranks, and does the same in each: set ranks = "all" in the '
            "class of the callback",
            param="callbacks",
            code="ST-CALLBACK",
        )


def _overrides(callback: Callback, hook: str) -> bool:
    """Returns whether a callback has a hook of its own."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
