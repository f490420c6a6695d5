"""What a module brings to its training besides its forward pass: nothing, unless its recipe says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch

__all__ = ["ModuleHooks", "Within", "call_plainly"]

# A function with the arguments of `Strategy.within_forward`.
Within = Callable[[nn.Module, Callable[[], Any]], Any]


def call_plainly(_module: nn.Module, function: Callable[[], Any]) -> Any:
    """Calls a function, as the `Within` of a module that no strategy has wrapped."""
    return function()


class ModuleHooks:
    """The parts of a training that come from the module itself, and its hooks; here, there are none.

    A recipe builds an instance in every rank and in the dry run: after the module is built, and before the strategy
    wraps the module. Every rank calls every method at the same point, in this order:

    1. `training_step` and `schedule`, while the engine is built; in the dry run, `training_step` and `try_validation`.
    2. `begin_fit`; with checkpoints also `load_state_dict`.
    3. For each epoch `keep_modes` and `begin_epoch`; for each of its steps `before_zero_grad`, then `after_backward`
       for each micro-batch, `before_update` and `end_step`; last `end_epoch`.
    4. For each validation `begin_validation`, `end_validation_rows` and `end_validation`, and `keep_modes` if training
       goes on.
    5. `end_fit`.

    Passes that do not count are within `rehearsal`.

    Attributes:
        stop_requested: Whether the module has requested that training stops; `None` if it never does.
        sees_gradients: Whether `before_update` must find gradients without the factor of a loss scaler.
    """

    stop_requested: bool | None = None
    sees_gradients = False

    def training_step(self, within: Within) -> Any:
        """Returns the module's own `TrainingStep`; `None` means that the recipe's step or loss is used.

        Args:
            within: Calls a function as if it were the module's forward pass; see `Strategy.within_forward`.
        """
        return None

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns the module's own schedule, with the methods of `Schedule`; `None` means that the recipe's is used."""
        return None

    def try_validation(self, batch: Batch) -> None:
        """Tries the module's own validation on the first row, if the training will validate."""

    def rehearsal(self) -> AbstractContextManager[None]:
        """Returns a context for passes that do not count: in it, no hooks are called, and nothing is logged."""
        return nullcontext()

    def begin_fit(self, epoch: int, step: int) -> None:
        """Is called before anything is trained; `epoch` and `step` are the first ones, counted from 0."""

    def begin_epoch(self, epoch: int, *, fresh: bool) -> None:
        """Is called before the steps of an epoch, in training mode; `fresh` is false in a resumed epoch."""

    def keep_modes(self) -> None:
        """Is called after the whole module was set to training mode, to set parts to the mode that they must have."""

    def before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Is called at the start of a step, while the gradients of the last step are still there."""

    def after_backward(self) -> None:
        """Is called after the backward pass of each micro-batch."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Is called when the gradients are complete, before they are clipped."""

    def end_step(self, step: int) -> None:
        """Is called after a step; `step` is the number of all steps so far."""

    def begin_validation(self) -> None:
        """Is called before a validation."""

    def end_validation_rows(self) -> None:
        """Is called after a validation's rows are evaluated, before the ranks reduce its metrics."""

    def end_validation(self, metrics: Mapping[str, float]) -> None:
        """Is called with the metrics of a validation."""

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Is called with the record of an epoch, to which it may add numbers."""

    def end_fit(self) -> None:
        """Is called when the training is over, if it has not failed."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that checkpoints save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, same_ranks: bool) -> None:
        """Restores a rank's state; `same_ranks` is false if another number of ranks has written the checkpoint."""
