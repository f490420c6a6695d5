"""`SeriesModule`, which scales windows for any module that forecasts, and `SeriesNetwork`, the default module."""

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

# The outputs of a correction are multiplied by this factor. It must not change: the weights of saved models fit it.
_CORRECTION_FACTOR = 0.1

MeanAndDeviation = Sequence[float]


class SeriesModule(nn.Module):
    """Calls a module with scaled windows, and returns its forecasts in the units of the series."""

    def __init__(
        self,
        module: Any,
        params: Mapping[str, Any],
        context: int,
        horizon: int,
        past: Sequence[MeanAndDeviation] = (),
        future: Sequence[MeanAndDeviation] = (),
        static: Sequence[MeanAndDeviation] = (),
        scaling: str | None = "window",
        quantiles: Sequence[float] = (),
        deviation: float = 1.0,
        season: int | None = None,
        categories: Sequence[Sequence[Any] | None] = (),
    ) -> None:
        """Builds the module.

        Args:
            module: An instance, its class or factory, or the import path of either. A class or factory is called with
                `params`, and with those of the following arguments that it has parameters for: `context`, `horizon`,
                `past_columns`, `future_columns`, `static_columns`, `quantiles` and `season`.
            params: Keyword arguments for `module`.
            context: Rows of a window that are known.
            horizon: Rows to be forecast, which follow the context.
            past: Mean and standard deviation of each column that is known up to the last row of the context.
            future: Mean and standard deviation of each column that is known ahead.
            static: Mean and standard deviation of each column that does not change within a series.
            scaling: "window" subtracts the mean of its context from the target, and divides by the standard deviation
                of its context; `None` leaves the target as it is.
            quantiles: The quantiles that the module returns. Without quantiles, it returns one value.
            deviation: Standard deviation of the target, which scales windows whose context is 0 throughout. A context
                with another constant value is scaled by this value.
            season: Rows of a season, 1 if there is none; `None` in models saved before seasons were learned.
            categories: The known categories of each static column, or `None` for a column of numbers. The module gets
                a learned vector for each category.
        """
        super().__init__()
        self.past = past
        self.future = future
        self.static = static
        self.deviation = deviation
        self.context = context
        self.horizon = horizon
        self.scaling = scaling
        self.quantile_count = len(quantiles)
        self.categories = list(categories) if categories else [None] * len(static)
        cardinalities = [UNTRAINED + len(values) for values in self.categories if values is not None]
        static_columns = len(static) - len(cardinalities)
        if cardinalities:
            self.embeddings = nn.ModuleList(map(CategoryEmbedding.of, cardinalities))
            static_columns += sum(embedding.embedding_dim for embedding in self.embeddings)  # type: ignore[misc]
        factory = load_object(module) if isinstance(module, str) else module
        if isinstance(factory, nn.Module):
            self.module = factory
            # The copy leaves the user's module untrained. Some modules, such as those of torch.nn.utils.weight_norm,
            # cannot be copied, and are trained themselves.
            with suppress(RuntimeError):
                self.module = copy.deepcopy(factory)
            return
        arguments = {
            "context": context,
            "horizon": horizon,
            "past_columns": 1 + len(past) + len(future),
            "future_columns": len(future),
            "static_columns": static_columns,
            "quantiles": list(quantiles),
        }
        if season is not None:
            arguments["season"] = season
        parameters = inspect.signature(factory).parameters
        accepted = {name: value for name, value in arguments.items() if name in parameters}
        self.module = factory(**(accepted | dict(params)))

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts, float32 of shape `(samples, horizon)`, or `(samples, horizon, quantiles)`.

        Args:
            past: The target, and then the past columns, of shape `(samples, context, 1 + past columns)`.
            more: If there are columns known ahead, a tensor of shape `(samples, context + horizon, columns)`. Then, if
                there are static columns, a tensor of shape `(samples, context, columns)`.
        """
        target = past[:, :, 0]
        mean, deviation = scale_of(target, self.scaling, self.deviation)
        context_inputs = [((target - mean) / deviation).unsqueeze(2), *_standardised(past[:, :, 1:], self.past)]
        horizon_inputs = []
        if self.future:
            future_values = torch.cat(_standardised(more[0], self.future), 2)
            context_inputs.append(future_values[:, : self.context])
            horizon_inputs.append(future_values[:, self.context :])
        if self.static:
            # Static columns have the same values in all rows of a context: its last row stands for all.
            horizon_inputs.append(self._static_inputs(more[-1][:, -1]))
        outputs = self.module(torch.cat(context_inputs, 2), *horizon_inputs).float()
        samples = past.shape[0]
        shape = (samples, self.horizon, self.quantile_count) if self.quantile_count else (samples, self.horizon)
        accepted_shapes: list[tuple[int, ...]] = [shape]
        if not self.quantile_count:
            # Many modules keep an axis for one value, or drop the axis of a horizon of one row.
            accepted_shapes.append((samples, self.horizon, 1))
            if self.horizon == 1:
                accepted_shapes.append((samples,))
        if tuple(outputs.shape) not in accepted_shapes:
            raise ModuleError(
                f"{type(self.module).__qualname__} returned shape {tuple(outputs.shape)}",
                hint=f"return (samples, horizon{', quantiles' if self.quantile_count else ''}), here {shape}",
                param="module",
            )
        outputs = outputs.view(samples, self.horizon, -1)
        forecast: torch.Tensor = outputs * deviation[:, :, None] + mean[:, :, None]
        return forecast.view(shape)

    def _static_inputs(self, static: torch.Tensor) -> torch.Tensor:
        """Returns scaled numbers, and then vectors of categories, from static columns of shape `(samples, columns)`."""
        numbers: list[torch.Tensor] = []
        vectors: list[torch.Tensor] = []
        scaled_columns = _standardised(static, self.static)
        for index, (scaled, categories) in enumerate(zip(scaled_columns, self.categories, strict=True)):
            if categories is None:
                numbers.append(scaled)
            else:
                vectors.append(self.embeddings[len(vectors)](static[:, index].long()))
        return torch.cat([*numbers, *vectors], 1)


def scale_of(target: torch.Tensor, scaling: str | None, zero_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what to subtract from each sample's target, and what to divide by: both of shape `(samples, 1)`.

    Args:
        target: The target in the context, of shape `(samples, context)`.
        scaling: "window" for the mean and the standard deviation of the context; `None` for 0 and 1.
        zero_scale: What to divide by where all of the context is 0. A context with another constant value is divided
            by the size of this value.
    """
    first = target[:, :1]
    if scaling is None:
        return torch.zeros_like(first), torch.ones_like(first)
    # Squares of large numbers that differ little would have no digits left: so the first number is subtracted before.
    differences = target - first
    deviation = differences.std(1, correction=0, keepdim=True)
    scale_of_constant = torch.where(first != 0, first.abs(), zero_scale)
    return first + differences.mean(1, keepdim=True), torch.where(deviation > 0, deviation, scale_of_constant)


def _standardised(values: torch.Tensor, figures: Sequence[MeanAndDeviation]) -> list[torch.Tensor]:
    """Splits the last axis into columns, each less its mean and divided by its deviation, and with a last axis of 1."""
    return [
        ((values[..., column] - mean) / (deviation or 1.0)).unsqueeze(-1)
        for column, (mean, deviation) in enumerate(figures)
    ]


class SeriesNetwork(nn.Module):
    """Adds corrections to a seasonal forecast: a linear map of the context, and a perceptron of all inputs.

    Before training, the corrections are 0: the network starts from the seasonal forecast, and learns what the forecast
    misses. The linear map takes differences from the last value, as NLinear does (Zeng et al., "Are Transformers
    Effective for Time Series Forecasting?", AAAI 2023). The perceptron beside it is that of TiDE (Das et al.,
    "Long-term Forecasting with TiDE", TMLR 2023) without its decoder.
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
            past_columns: Number of columns of the context, including the target.
            future_columns: Number of columns that are known in the horizon.
            static_columns: Number of columns that do not change within a series.
            quantiles: The quantiles to return. Without quantiles, the network returns one value.
            hidden: Sizes of the perceptron's hidden layers. Without hidden layers, there is no perceptron.
            dropout: Probability with which a hidden value is left out in training.
            season: Rows of a season, 1 if there is none. With `None`, there is no seasonal forecast, and the network
                starts from random weights, as networks of earlier versions did.
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
            # The corrections replace layers that have drawn random weights. Without these draws, the hidden layers
            # would begin with other weights than in earlier versions.
            self.linear = _Correction(context, outputs)
            if self.layers is not None:
                self.layers[-1] = _Correction(hidden[-1], outputs)

    def forward(self, past: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Returns forecasts of shape `(samples, horizon)`, or `(samples, horizon, quantiles)`.

        Args:
            past: The target and the other columns of the context, of shape `(samples, context, columns)`.
            more: If there are columns known ahead, a tensor of shape `(samples, horizon, columns)`. Then, if there are
                static columns, a tensor of shape `(samples, columns)`.
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
    """A linear map whose weights begin as zero and whose outputs are scaled down: it corrects a forecast.

    Scaling the outputs down slows the training of its weights. There are many, and they would fit a short series before
    the few weights of the forecast are learned.
    """

    def reset_parameters(self) -> None:
        """Sets all weights to 0."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the correction."""
        return _CORRECTION_FACTOR * super().forward(values)
