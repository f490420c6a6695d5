"""How a module of windows is trained: its loss, in the units in which it gets the target."""

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
    """A training step whose loss is that of scaled forecasts: each series counts the same, whatever its size.

    Attributes:
        loss: As the Param.
        params: As the Param `lossParams`.
        scaling: As for `SeriesModule`.
        deviation: As for `SeriesModule`.
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
        forecast, label = module(*batch.inputs), batch.label
        assert label is not None
        mean, deviation = scale_of(batch.inputs[0][:, :, 0], self.scaling, self.deviation)
        per_row = (len(label), *[1] * (forecast.dim() - 1))
        scaled = (forecast - mean.view(per_row)) / deviation.view(per_row)
        return self._loss.per_row(scaled, (label - mean) / deviation)


class QuantileLoss(nn.Module):
    """The pinball loss, whose mean is least at the quantiles."""

    def __init__(self, quantiles: Sequence[float], reduction: str = "mean") -> None:
        """Takes the quantiles, and "mean" or "none"."""
        super().__init__()
        self.quantiles, self.reduction = quantiles, reduction

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Returns the loss of an output of shape `(..., quantiles)` for labels of shape `(...)`."""
        over = label.unsqueeze(-1) - output
        quantiles = output.new_tensor(self.quantiles)
        losses = torch.maximum(quantiles * over, (quantiles - 1) * over)
        return losses.mean() if self.reduction == "mean" else losses
