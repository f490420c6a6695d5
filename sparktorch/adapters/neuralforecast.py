"""Models of Nixtla's neuralforecast as modules of windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparktorch.base.imports import load_object

__all__ = ["NeuralForecastNetwork"]


class NeuralForecastNetwork(nn.Module):
    """Calls a model of neuralforecast with windows: `module` of a `Forecaster`, with `model` in `moduleParams`.

    The model's `forward` alone is used. Its `training_step` draws windows of its own from whole series, and scales
    them; here, both are done before.
    """

    def __init__(
        self,
        model: Any,
        context: int,
        horizon: int,
        past_columns: int,
        future_columns: int,
        static_columns: int,
        quantiles: Sequence[float],
        **params: Any,
    ) -> None:
        """Makes the model.

        Args:
            model: Its class, or the import path, such as "neuralforecast.models:NHITS".
            context: Its `input_size`.
            horizon: Its `h`.
            past_columns: Columns of the context, the target among them.
            future_columns: Columns known ahead.
            static_columns: Columns of the series.
            quantiles: The quantiles that it returns; without, one value.
            params: Its other keyword arguments.
        """
        super().__init__()
        self.past, self.future = past_columns - future_columns, future_columns
        columns = {"hist_exog_list": self.past - 1, "futr_exog_list": future_columns, "stat_exog_list": static_columns}
        named = {name: [f"{name}{index}" for index in range(count)] for name, count in columns.items() if count}
        if quantiles:
            params = {"loss": load_object("neuralforecast.losses.pytorch:MQLoss")(quantiles=list(quantiles)), **params}
        made_by = load_object(model) if isinstance(model, str) else model
        self.model = made_by(h=horizon, input_size=context, **named, **params)

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts of shape `(samples, horizon, 1 or quantiles)`; arguments are as for `SeriesNetwork`."""
        target, history, future_values = past[:, :, :1], past[:, :, 1 : self.past], past[:, :, self.past :]
        outputs: torch.Tensor = self.model(
            {
                "insample_y": target,
                "insample_mask": torch.ones_like(target),
                "hist_exog": history if self.past > 1 else None,
                "futr_exog": torch.cat([future_values, more[0]], 1) if self.future else None,
                "stat_exog": more[-1] if len(more) > (self.future > 0) else None,
            }
        )
        return outputs
