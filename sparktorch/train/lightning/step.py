"""How a step of a training, and one of a validation, calls a LightningModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError
from sparktorch.train.lightning.logs import Logs
from sparktorch.train.recipe.loss import Sums, TrainingStep, weigh
from sparktorch.train.recipe.own_training import Within

__all__ = ["Call", "LightningStep", "arguments_of", "called", "check_not_left_out", "loss_of"]

Call = Callable[[Callable[[], Any]], Any]


class LightningStep(TrainingStep):
    """Calls `training_step` within the module's forward pass, and `validation_step` for validation rows."""

    param = "module"
    hint = "its batch is a tuple: (*inputs, label), without a label (*inputs,); self.logger is None, self.log is there"
    logs_validation = True

    def __init__(
        self,
        name: str,
        train: Callable[[Call, Batch], torch.Tensor],
        validate: Callable[[Call, Batch], torch.Tensor | None],
        new_logs: Callable[[str], Logs],
        within: Within,
    ) -> None:
        """Takes the methods of the training, and what calls a function within the module's forward pass."""
        self.what = f"training_step of {name}"
        self._name, self._train, self._validate, self._new_logs, self._within = name, train, validate, new_logs, within

    def means(self, prefix: str) -> Logs:
        """Returns an empty collection, into which values are logged from now on."""
        return self._new_logs(prefix)

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss; what the module logs does not pass here."""
        return self._train(partial(self._within, module), batch), {}

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns the weighted sum of the losses that `validation_step` returned; `None` if it returned none."""
        loss = self._validate(partial(self._within, module), batch)
        if loss is None or not batch.rows:
            return None, {}
        what = f"validation_step of {self._name}"
        return weigh(loss.float(), batch.rows, batch.loss_weight, what=what, param=self.param), {}


def arguments_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Returns the batch that the module's steps get: the inputs, and the label if there is one."""
    whole = batch.complete()
    return whole.inputs if whole.label is None else (*whole.inputs, whole.label)


def called(method: Callable[..., Any], batch: tuple[torch.Tensor, ...], index: int) -> Any:
    """Calls a step, whose `batch_idx` may be left out."""
    takes = inspect.signature(method).parameters.values()
    positional = [each for each in takes if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    several = len(positional) > 1 or any(each.kind is each.VAR_POSITIONAL for each in takes)
    return method(batch, index) if several else method(batch)


def check_not_left_out(answer: Any, name: str) -> None:
    """Refuses what `on_train_batch_start` of a module returns to leave out the rest of the epoch.

    Raises:
        ModuleError: It has returned that.
    """
    if answer == -1:
        raise ModuleError(
            f"on_train_batch_start of {name} returned -1, which would end the epoch in this rank only",
            hint="set self.trainer.should_stop = True, which ends the training after the epoch",
            param="module",
        )


def loss_of(output: Any, name: str) -> torch.Tensor:
    """Returns the loss in what `training_step` of a module returned.

    Raises:
        ModuleError: There is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    what = f"a dict with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else type(output).__name__
    none = "None, which would skip the batch in this rank only"
    raise ModuleError(
        f"training_step of {name} returned {none if output is None else what}",
        hint="return the loss, or a dict with it under 'loss'; for a batch that does not count, return loss * 0",
        param="module",
    )
