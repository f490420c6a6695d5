"""Hooks: code of the user's that runs as the training goes on, in the ranks and on the driver."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import nn

from sparktorch.base.config import one_of
from sparktorch.base.world import World
from sparktorch.distributed.process_group import sum_over_ranks
from sparktorch.errors import ConfigError, RankError

__all__ = ["Callback", "Callbacks", "FitContext", "check_callback"]


@dataclass
class FitContext:
    """Where a rank's training stands; every hook in a rank gets it.

    Attributes:
        module: The module itself, not what the strategy wraps it in. With strategies that divide the
            model, its parameters are this rank's parts.
        optimizer: Of this rank.
        world: The rank's place.
        epoch: Number of the epoch, from 1; 0 before the first.
        step: Optimizer steps taken so far, over all epochs.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    epoch: int = 0
    step: int = 0
    _asked_to_stop: bool = field(default=False, repr=False)

    def stop(self) -> None:
        """Asks the training to end with this epoch; where one rank asks, all of them end."""
        self._asked_to_stop = True


class Callback:
    """Base class of callbacks; a hook that is not overridden does nothing and costs nothing.

    The hooks `on_driver_...` run in the process that called `fit`, on the instance itself. All
    others run in the ranks, each on a copy of its own that was pickled before the training: what they
    write into themselves does not come back. What they raise ends the fit.

    Attributes:
        ranks: Whether the hooks in the ranks run in the "main" one alone, rank 0, or in "all". A hook
            that uses a collective of `torch.distributed` needs "all".
    """

    ranks: Literal["main", "all"] = "main"

    def on_fit_start(self, context: FitContext) -> None:
        """Is called before the first epoch."""

    def on_epoch_start(self, context: FitContext) -> None:
        """Is called before the first step of each epoch."""

    def on_step_end(self, context: FitContext) -> None:
        """Is called after each step of the optimizer."""

    def on_validation_end(self, context: FitContext, metrics: dict[str, float]) -> None:
        """Is called after each validation, with its metrics; they are the same in every rank."""

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        """Is called with the record of the epoch, which is the same in every rank but for the seconds.

        Numbers that rank 0 adds to it become part of `summary.history` and of what is logged.
        """

    def on_fit_end(self, context: FitContext) -> None:
        """Is called after the last epoch of a training that has not failed.

        `context.module` has the weights of the last step, also where the model gets others.
        """

    def on_driver_progress(self, record: dict[str, Any]) -> None:
        """Is called on the driver a few times a second, with epoch, epochs, step, steps and loss of rank 0."""

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        """Is called on the driver with the record of each epoch, as soon as it is over.

        Here and in `on_driver_progress`, an error is warned about and the callback is called no more
        on the driver; the fit goes on.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what the callback needs to go on after a restart; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""


_HOOKS = ("on_fit_start", "on_epoch_start", "on_step_end", "on_validation_end", "on_epoch_end", "on_fit_end")


def check_callback(callback: Any) -> None:
    """Refuses what is no callback.

    Raises:
        ConfigError: It is no instance of `Callback`, or its `ranks` is unknown.
    """
    if not isinstance(callback, Callback):
        given = f"the class {callback.__qualname__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise ConfigError(
            f"callbacks holds {given}", hint="pass instances of subclasses of sparktorch.Callback", param="callbacks"
        )
    one_of(f"ranks of {type(callback).__qualname__}", callback.ranks, ("main", "all"))


class Callbacks:
    """The hooks of one rank."""

    def __init__(self, callbacks: Sequence[Callback], context: FitContext) -> None:
        """Finds the hooks that are overridden and that run in this rank."""
        self._context = context
        self._all = callbacks
        here = [callback for callback in callbacks if callback.ranks == "all" or context.world.is_main]
        self._hooks = {name: [callback for callback in here if _overridden(callback, name)] for name in _HOOKS}
        self.watch_steps = bool(self._hooks["on_step_end"])

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback, in their order.

        Raises:
            RankError: One of them raised; names the hook.
        """
        for callback in self._hooks[hook]:
            self._call(callback, hook, arguments)

    def add_to(self, record: dict[str, Any]) -> None:
        """Calls `on_epoch_end`.

        Raises:
            RankError: A callback raised.
            ConfigError: A callback has put something into it that is not a number.
        """
        before = dict(record)
        self.call("on_epoch_end", record)
        for name in [name for name, value in record.items() if name not in before or value is not before[name]]:
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
        """Has every callback go on from its state; one that was not there before begins anew."""
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

    def ask_to_stop(self) -> bool:
        """Returns whether a callback in any rank has asked the training to end; costs nothing without callbacks."""
        if not self._all:
            return False
        asked = torch.tensor([float(self._context._asked_to_stop)], dtype=torch.float64)
        return bool(sum_over_ranks(asked, self._context.world))


def _overridden(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
