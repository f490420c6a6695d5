"""The training step for a loss that compares the rows within a group, such as the rows of a query."""

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
    """The forward pass and a loss for whole groups.

    The loss is called as `loss(output, label, sizes)`, or without labels as `loss(output, sizes)`. `sizes`, int64 of
    shape `(groups,)`, has the number of rows of each group; output and label have the rows of one group after the
    other. The loss returns one value per group, or the mean of these values. In validation, `metrics` is called with
    the same arguments, and returns one value per group for each name.
    """

    param = "loss"
    rowwise = "return one loss per group: a tensor of shape (groups,)"
    hint = "with groupCol, a loss is called as loss(output, label, sizes)"

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        params: Mapping[str, Any] | None = None,
        metrics: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Takes values that can be pickled; `params` are keyword arguments of the loss, or of the loss's class."""
        super().__init__(self._losses)
        self.what = f"loss {name_of(loss)}"
        options = dict(params or {})
        if isinstance(loss, type):
            with building("loss", loss):
                loss = loss(**options)
                options = {}
        self._loss = loss
        self._params = options
        self._metrics = metrics
        self._measures = False
        self._with_tensors = with_tensors(loss)
        self._module = self._with_tensors

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns what a call returns, for a batch of validation groups, and in addition the sums of the metrics."""
        self._measures = True
        try:
            return self(module, batch)
        finally:
            self._measures = False

    def _losses(self, module: nn.Module, batch: Batch) -> Any:
        """Returns the loss of each group or their mean; in validation, a pair of losses and metrics."""
        plain = _plain(module)
        output = full_precision(prediction(adapter_of(plain).call(module, batch.inputs, batch.names, plain)))
        assert batch.sizes is not None
        sizes = upload(batch.sizes, batch.inputs[0].device)
        output, label = align("regression", output, batch.label)
        arguments = (output, sizes) if label is None else (output, label, sizes)
        if self._with_tensors is not None:
            self._with_tensors.to(output.device)
        losses = self._loss(*arguments, **self._params)
        if self._measures and self._metrics is not None:
            return losses, self._metrics(*arguments)
        return losses


def _plain(module: nn.Module) -> nn.Module:
    """Returns the user's module, without DDP around it."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
