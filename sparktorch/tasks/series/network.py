"""Modules that forecast: the one that scales windows for another, and the one that is trained where none is named."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from sparktorch.base.imports import load_object
from sparktorch.errors import ModuleError
from sparktorch.tasks.series.seasonal import SeasonalForecast
from sparktorch.tasks.shared.layers import UNTRAINED, CategoryEmbedding, perceptron

__all__ = ["SeriesModule", "SeriesNetwork", "scale_of"]

_PACE = 0.1  # The weights of saved models are for this factor.

Figures = Sequence[Sequence[float]]  # Each column has its mean and standard deviation.


class SeriesModule(nn.Module):
    """Calls a module with scaled windows, and returns its forecasts in the units of the series."""

    def __init__(
        self,
        module: Any,
        params: Mapping[str, Any],
        context: int,
        horizon: int,
        past: Figures = (),
        future: Figures = (),
        static: Figures = (),
        scaling: str | None = "window",
        quantiles: Sequence[float] = (),
        deviation: float = 1.0,
        season: int | None = None,
        categories: Sequence[Sequence[Any] | None] = (),
    ) -> None:
        """Builds the module.

        Args:
            module: An instance, or its class or factory or the import path of either, which is called with `params`
                and those of these numbers that it has parameters for: `context`, `horizon`, `past_columns`,
                `future_columns`, `static_columns`, `quantiles` and `season`.
            params: Keyword arguments for `module`.
            context: Rows of a window that are known.
            horizon: Rows after them, to be forecast.
            past: Figures of the columns known up to the last row of the context.
            future: Figures of those known ahead.
            static: Figures of those that do not change within a series.
            scaling: "window" for a target less the mean of its context, in units of the standard deviation; or `None`.
            quantiles: The quantiles that the module returns; without, it returns one value.
            deviation: Standard deviation of the target, which scales windows whose context is 0 throughout; other
                constant ones are scaled by their value.
            season: Rows of a season, 1 if there is none; `None` in models saved before it was learned.
            categories: The known categories of each static column, `None` for one of numbers. The module gets vectors
                of categories, which are learned.
        """
        super().__init__()
        self.past, self.future, self.static, self.deviation = past, future, static, deviation
        self.context, self.horizon, self.scaling, self.quantiles = context, horizon, scaling, len(quantiles)
        self.categories = list(categories) if categories else [None] * len(static)
        cardinalities = [UNTRAINED + len(values) for values in self.categories if values is not None]
        static_columns = len(static) - len(cardinalities)
        if cardinalities:
            self.embeddings = nn.ModuleList(map(CategoryEmbedding.of, cardinalities))
            static_columns += sum(embedding.embedding_dim for embedding in self.embeddings)  # type: ignore[misc]
        made_by = load_object(module) if isinstance(module, str) else module
        if isinstance(made_by, nn.Module):
            self.module = made_by
            # Training leaves the user's module as it is. Some cannot be copied, as those of torch.nn.utils.weight_norm.
            with suppress(RuntimeError):
                self.module = copy.deepcopy(made_by)
            return
        arguments = {
            "context": context,
            "horizon": horizon,
            "past_columns": 1 + len(past) + len(future),
            "future_columns": len(future),
            "static_columns": static_columns,
            "quantiles": list(quantiles),
            **({} if season is None else {"season": season}),
        }
        parameters = inspect.signature(made_by).parameters
        self.module = made_by(**{**{name: value for name, value in arguments.items() if name in parameters}, **params})

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts, float32 of shape `(samples, horizon)`, or `(samples, horizon, quantiles)`.

        Args:
            past: Of shape `(samples, context, 1 + past columns)`, the target first.
            more: If there are columns known ahead, these, of shape `(samples, context + horizon, columns)`; then, if
                there are, the static ones, of shape `(samples, context, columns)`.
        """
        mean, deviation = scale_of(past[:, :, 0], self.scaling, self.deviation)
        context_inputs = [((past[:, :, 0] - mean) / deviation).unsqueeze(2), *_standardised(past[:, :, 1:], self.past)]
        horizon_inputs = []
        if self.future:
            future_values = torch.cat(_standardised(more[0], self.future), 2)
            context_inputs.append(future_values[:, : self.context])
            horizon_inputs.append(future_values[:, self.context :])
        if self.static:
            horizon_inputs.append(self._of_series(more[-1][:, -1]))
        outputs = self.module(torch.cat(context_inputs, 2), *horizon_inputs).float()
        shape = (past.shape[0], self.horizon, *([self.quantiles] if self.quantiles else []))
        other_shapes = () if self.quantiles else ((*shape, 1), *(((past.shape[0],),) if self.horizon == 1 else ()))
        if tuple(outputs.shape) not in (shape, *other_shapes):
            raise ModuleError(
                f"{type(self.module).__qualname__} returned shape {tuple(outputs.shape)}",
                hint=f"return (samples, horizon{', quantiles' if self.quantiles else ''}), here {shape}",
                param="module",
            )
        forecast: torch.Tensor = (
            outputs.view(past.shape[0], self.horizon, -1) * deviation[:, :, None] + mean[:, :, None]
        )
        return forecast.view(shape)

    def _of_series(self, static: torch.Tensor) -> torch.Tensor:
        """Returns static columns, `(samples, columns)`, as numbers that are scaled, and then vectors of categories."""
        columns = _standardised(static, self.static)
        numbers = [column for column, values in zip(columns, self.categories, strict=True) if values is None]
        indices = [index for index, values in enumerate(self.categories) if values is not None]
        vectors = [self.embeddings[position](static[:, index].long()) for position, index in enumerate(indices)]
        return torch.cat([*numbers, *vectors], 1)


def scale_of(target: torch.Tensor, scaling: str | None, constant: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is subtracted from each sample's target, and what it is divided by: both of shape `(samples, 1)`.

    They are mean and standard deviation of the target's context, of shape `(samples, context)`. A constant one is
    divided by its size, or by `constant` if it is 0.
    """
    first = target[:, :1]
    if scaling is None:
        return torch.zeros_like(first), torch.ones_like(first)
    # Of large numbers that differ little, a mean of squares would have no digits left: so the first one is subtracted.
    centred = target - first
    deviation = centred.std(1, correction=0, keepdim=True)
    flat = torch.where(first != 0, first.abs(), constant)
    return first + centred.mean(1, keepdim=True), torch.where(deviation > 0, deviation, flat)


def _standardised(values: torch.Tensor, figures: Figures) -> list[torch.Tensor]:
    """Returns the columns of the last axis less their mean in units of their deviation, each with an axis of one."""
    return [
        ((values[..., column] - mean) / (deviation or 1.0)).unsqueeze(-1)
        for column, (mean, deviation) in enumerate(figures)
    ]


class SeriesNetwork(nn.Module):
    """A seasonal forecast, and what a linear map of the context and a perceptron of all that is known add to it.

    Before training, these add nothing: the network starts from the seasonal forecast, and learns what it misses. The
    linear map takes differences from the last value, as NLinear does (Zeng et al., "Are Transformers Effective for Time
    Series Forecasting?", AAAI 2023). A perceptron beside it is from TiDE (Das et al., "Long-term Forecasting with
    TiDE", TMLR 2023), without its decoder.
    """

    def __init__(
        self,
        context: int,
        horizon: int,
        past_columns: int = 1,
        future_columns: int = 0,
        static_columns: int = 0,
        quantiles: Sequence[float] = (),
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        season: int | None = None,
        smoothing: float | None = None,
        slope: float = 0.0,
    ) -> None:
        """Makes the layers.

        Args:
            context: Rows that are known.
            horizon: Rows to be forecast.
            past_columns: Columns of the context, the target among them.
            future_columns: Columns of the horizon.
            static_columns: Columns of the series.
            quantiles: The quantiles to return; without, one value.
            hidden: Sizes of the perceptron's hidden layers; without any, only the linear map is left.
            dropout: Probability with which a hidden value is left out in training.
            season: Rows of a season, 1 if there is none; without it, the network starts from random weights, as those
                of earlier versions did.
            smoothing: As for `SeasonalForecast`.
            slope: As for `SeasonalForecast`.
        """
        super().__init__()
        self.shape = (horizon, len(quantiles)) if quantiles else (horizon,)
        outputs = horizon * max(1, len(quantiles))
        self.linear = nn.Linear(context, outputs)
        width = context * past_columns + horizon * future_columns + static_columns
        self.layers = perceptron(width, hidden, outputs, dropout) if hidden else None
        self.seasonal = None
        if season is not None:
            self.seasonal = SeasonalForecast(context, horizon, season, smoothing, slope)
            self.linear = _Correction(context, outputs)
            if self.layers is not None:
                self.layers[-1] = _Correction(hidden[-1], outputs)

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts of shape `(samples, horizon)`, or `(samples, horizon, quantiles)`.

        `past` has the shape `(samples, context, columns)`, the target first; `more` are columns known ahead, of shape
        `(samples, horizon, columns)`, and static ones, of shape `(samples, columns)`, if there are any.
        """
        last = past[:, -1:, 0]
        correction: torch.Tensor = self.linear(past[:, :, 0] - last)
        if self.layers is not None:
            correction = correction + self.layers(torch.cat([part.flatten(1) for part in (past, *more)], 1))
        if self.seasonal is None:
            return (correction + last).view(past.shape[0], *self.shape)
        forecast: torch.Tensor = self.seasonal(past[:, :, 0], correction.view(past.shape[0], *self.shape))
        return forecast


class _Correction(nn.Linear):
    """A linear map that begins as zero, and learns a tenth as fast as others: what a forecast beside it misses.

    At their pace, its many weights would fit a short series before the few of the forecast are learned.
    """

    def reset_parameters(self) -> None:
        """Sets all weights to 0."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the correction."""
        return _PACE * super().forward(values)
