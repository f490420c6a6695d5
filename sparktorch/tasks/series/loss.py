"""The training step of a module of windows, whose loss has the units in which the module gets the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.tasks.series.network import scale_of
from sparktorch.train.recipe.loss import Loss

__all__ = ["QuantileLoss", "SeriesStep"]


@dataclass(frozen=True)
class SeriesStep:
    """A training step that computes the loss of scaled forecasts, so that each series counts the same at any size.

    Attributes:
        loss: The value of the Param `loss`.
        params: The value of the Param `lossParams`.
        scaling: The argument `scaling` of `SeriesModule`.
        deviation: The argument `deviation` of `SeriesModule`.
    """

    loss: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    scaling: str | None = "window"
    deviation: float = 1.0

    @cached_property
    def _loss(self) -> Loss:
        return Loss(self.loss, self.params)

    def __call__(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of each window, of shape `(samples, ...)`."""
        forecast = module(*batch.inputs)
        label = batch.label
        assert label is not None
        target = batch.inputs[0][:, :, 0]
        mean, deviation = scale_of(target, self.scaling, self.deviation)
        one_value_per_sample = (len(label), *[1] * (forecast.dim() - 1))
        scaled = (forecast - mean.view(one_value_per_sample)) / deviation.view(one_value_per_sample)
        return self._loss.per_row(scaled, (label - mean) / deviation)


class QuantileLoss(nn.Module):
    """The pinball loss, whose mean is least at the quantiles."""

    def __init__(self, quantiles: Sequence[float], reduction: str = "mean") -> None:
        """Keeps the quantiles; `reduction` is "mean" for the mean of all losses, or "none" for each loss."""
        super().__init__()
        self.quantiles = quantiles
        self.reduction = reduction

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the losses of an output of shape `(..., quantiles)` for labels of shape `(...)`, or their mean."""
        error = label.unsqueeze(-1) - output
        quantiles = output.new_tensor(self.quantiles)
        losses = torch.maximum(quantiles * error, (quantiles - 1) * error)
        return losses.mean() if self.reduction == "mean" else losses
