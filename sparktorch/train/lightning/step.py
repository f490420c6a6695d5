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

__all__ = ["Call", "LightningStep", "arguments_of", "called", "loss_of"]

Call = Callable[[Callable[[], Any]], Any]


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
    whole = batch.complete()
    return whole.inputs if whole.label is None else (*whole.inputs, whole.label)


def called(method: Callable[..., Any], batch: tuple[torch.Tensor, ...], index: int) -> Any:
    """Calls a step, whose `batch_idx` may be left out."""
    try:
        inspect.signature(method).bind(batch, index)
    except TypeError:
        return method(batch)
    return method(batch, index)


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
        code="ST-LIGHTNING",
    )
