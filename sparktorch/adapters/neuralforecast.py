"""Models of Nixtla's neuralforecast as modules that forecast windows of series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparktorch.base.imports import load_object

__all__ = ["NeuralForecastNetwork"]


class NeuralForecastNetwork(nn.Module):
    """Calls a model of neuralforecast with windows: `module` of a `Forecaster`, with `model` in `moduleParams`.

    Only the model's `forward` is used. The model's own `training_step` would draw windows from whole series and scale
    the windows, which the `Forecaster` has done before.
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
            model: The model's class, or the import path of the class, such as "neuralforecast.models:NHITS".
            context: The model's `input_size`.
            horizon: The model's `h`.
            past_columns: Number of columns in the context; the target is one of them.
            future_columns: Number of columns that are known ahead.
            static_columns: Number of columns that are constant in a series.
            quantiles: The quantiles that the model returns; if empty, the model returns one value.
            params: Other keyword arguments of the model.
        """
        super().__init__()
        self.past = past_columns - future_columns
        self.future = future_columns
        columns = {"hist_exog_list": self.past - 1, "futr_exog_list": future_columns, "stat_exog_list": static_columns}
        named = {name: [f"{name}{index}" for index in range(count)] for name, count in columns.items() if count}
        if quantiles:
            params = {"loss": load_object("neuralforecast.losses.pytorch:MQLoss")(quantiles=list(quantiles)), **params}
        made_by = load_object(model) if isinstance(model, str) else model
        self.model = made_by(h=horizon, input_size=context, **named, **params)

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts of shape `(samples, horizon, 1 or quantiles)`; arguments are as for `SeriesNetwork`."""
        target = past[:, :, :1]
        history = past[:, :, 1 : self.past]
        future_values = past[:, :, self.past :]
        expected = 1 if self.future else 0  # The future columns are one tensor; the static columns come after it.
        outputs: torch.Tensor = self.model(
            {
                "insample_y": target,
                "insample_mask": torch.ones_like(target),
                "hist_exog": history if self.past > 1 else None,
                "futr_exog": torch.cat([future_values, more[0]], 1) if self.future else None,
                "stat_exog": more[-1] if len(more) > expected else None,
            }
        )
        return outputs
