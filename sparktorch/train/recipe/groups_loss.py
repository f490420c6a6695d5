"""The training step for a loss of whole groups, such as the rows of a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.devices import upload
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.lookup import building, name_of
from sparktorch.train.recipe.loss import Sums, TrainingStep, full_precision, with_tensors
from sparktorch.train.recipe.task import align, prediction

__all__ = ["GroupsLossStep"]


class GroupsLossStep(TrainingStep):
    """The forward pass and a loss of whole groups: `loss(output, label, sizes)`, or `loss(output, sizes)` unlabelled.

    The loss returns one value per group or their mean; `sizes`, int64 of shape `(groups,)`, are the groups' numbers of
    rows, which follow one another in output and label. In validation, `metrics` is called alike, and returns the values
    of the groups by name.
    """

    param, rowwise = "loss", "return one loss per group: a tensor of shape (groups,)"
    hint = "with groupCol, a loss is called as loss(output, label, sizes)"

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        params: Mapping[str, Any] | None = None,
        metrics: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Takes what can be pickled; `params` are keyword arguments of the loss, or of its class."""
        super().__init__(self._losses)
        self.what, options = f"loss {name_of(loss)}", dict(params or {})
        if isinstance(loss, type):
            with building("loss", loss):
                loss, options = loss(**options), {}
        self._loss, self._params, self._metrics = loss, options, metrics
        self._module = self._with_tensors = with_tensors(loss)

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns the same as a call for a batch of validation groups, and the sums of the metrics."""
        self._measures = True
        try:
            return self(module, batch)
        finally:
            self._measures = False

    _measures = False

    def _losses(self, module: nn.Module, batch: Batch) -> Any:
        plain = _plain(module)
        output = full_precision(prediction(adapter_of(plain).call(module, batch.inputs, batch.names, plain)))
        assert batch.sizes is not None
        sizes = upload(batch.sizes, batch.inputs[0].device)
        output, label = align("regression", output, batch.label)
        arguments = (output, sizes) if label is None else (output, label, sizes)
        if self._with_tensors is not None:
            self._with_tensors.to(output.device)
        losses = self._loss(*arguments, **self._params)
        return (losses, self._metrics(*arguments)) if self._measures and self._metrics is not None else losses


def _plain(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
