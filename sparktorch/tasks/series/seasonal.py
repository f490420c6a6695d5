"""The seasonal forecast from which the network of series starts, and the search for its season and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

__all__ = ["SeasonalForecast", "season_of", "start_of"]

_SMOOTHING = 0.5  # Before training, this is the share of the newest value in the level, unless another one is chosen.
# `start_of` chooses the share of the newest value, and the part of the slope, from these.
_SMOOTHINGS = (0.1, 0.3, 0.5, 0.7, 0.9)
_SLOPES = (0.0, 0.5, 1.0)
_BETTER = 0.9  # A longer season is taken if its error is less than this share of a shorter one's.
_LONGEST_SEASON = 1024  # No season with more rows is tried.
_MOST_WINDOWS = 32  # Forecasts are tried on at most this number of windows of each series.
_MOST_VALUES = 1e8  # All trials together read about this number of values, which takes about a second.

Floats = npt.NDArray[np.float64]


class SeasonalForecast(nn.Module):
    """Continues the level, the slope and the seasonal profile of a context.

    - The profile is how much each row of a season differs from the season's mean and from the slope of the context. It
      is a weighted sum over the seasons of the context.
    - The level is a weighted sum of the context's values less the profile, with the weights of exponential smoothing,
      as in the method of Winters ("Forecasting Sales by Exponentially Weighted Moving Averages", Management Science
      1960).

    So before training, a context that repeats itself is continued by its last season, as the seasonal naive forecast
    does. Training changes the weights of seasons in the profile, of values in the level, and of the slope: few weights,
    which a single short series can teach.
    """

    season_weights: torch.Tensor
    value_weights: torch.Tensor

    def __init__(
        self, context: int, horizon: int, season: int, smoothing: float | None = None, slope: float = 0.0
    ) -> None:
        """Makes the weights.

        Args:
            context: Rows that are known.
            horizon: Rows to be forecast.
            season: Rows of a season. If it is 1, or more than the context, there is no profile.
            smoothing: The share of the newest value in the level before training. With `None`, the share is a half, and
                the network forecasts the last season again until it has learned anything.
            slope: The part of the context's slope by which a forecast goes on before training.
        """
        super().__init__()
        self.smoothing = smoothing
        self.slope = slope
        self.horizon = horizon
        self.season = season if season <= context else 1
        self.seasons = context // self.season
        self.register_buffer("season_weights", torch.empty(self.seasons))
        self.register_buffer("value_weights", torch.empty(self.seasons * self.season))
        self.season_changes = nn.Parameter(torch.empty(self.seasons))
        self.value_changes = nn.Parameter(torch.empty(self.seasons * self.season))
        self.slope_weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights to their values before training.

        The parameters are the changes of these weights, and begin as 0, so that weight decay leads back to the forecast
        from before training.
        """
        values = len(self.value_changes)
        smoothing = _SMOOTHING if self.smoothing is None else self.smoothing
        smoothed = (1 - smoothing) ** torch.arange(values - 1, -1, -1, dtype=torch.float32)
        with torch.no_grad():
            self.season_weights.fill_(1 / self.seasons)
            self.value_weights.copy_(smoothed / smoothed.sum())
            for parameter in (self.season_changes, self.value_changes, self.slope_weight):
                parameter.zero_()

    def forward(self, past: torch.Tensor, correction: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a forecast of shape `(samples, horizon)`, or the sum of forecast and correction.

        In evaluation and without `smoothing`, it returns the last season again until anything has been learned. So the
        validation before the first step measures the seasonal naive forecast, and a training that is never better
        returns that forecast. Whether anything has been learned is seen from the weights, which all ranks have alike: a
        buffer would not change in a rank without windows.

        Args:
            past: The target in the context, of shape `(samples, context)`.
            correction: What other layers add to the forecast, of shape `(samples, horizon, ...)`.
        """
        last = past[:, -1:]
        # Values are divided into whole seasons; the oldest values of a context may be left over.
        values = (past - last)[:, -len(self.value_changes) :].reshape(past.shape[0], self.seasons, self.season)
        means = values.mean(2, keepdim=True)
        slope = (means[:, -1] - means[:, 0]) / max(1, len(self.value_changes) - self.season)
        steps = torch.arange(max(self.season, self.horizon), dtype=past.dtype, device=past.device)
        slope_in_season = slope * (steps[: self.season] - (self.season - 1) / 2)
        deviations = values - means - slope_in_season.unsqueeze(1)
        profile = (deviations * (self.season_weights + self.season_changes).view(1, -1, 1)).sum(1)
        without_profile = (values - profile.unsqueeze(1)).flatten(1)
        level = without_profile @ (self.value_weights + self.value_changes)
        trend = slope * (steps[: self.horizon] + 1) * (self.slope + self.slope_weight)
        forecast = self._repeat(profile) + trend + level.unsqueeze(1) + last
        if correction is None:
            return forecast
        more_axes = [1] * (correction.dim() - 2)  # A correction for quantiles has another axis.
        corrected = correction + forecast.view(*forecast.shape, *more_axes)
        if self.training or self.smoothing is not None:
            return corrected
        has_changes = torch.cat([self.season_changes, self.value_changes, self.slope_weight]).any()
        has_learned = (has_changes | correction.flatten(1).any(1)).view(-1, 1, *more_axes)
        naive = self._repeat(past[:, -self.season :]).view(*forecast.shape, *more_axes)
        return torch.where(has_learned, corrected, naive)

    def _repeat(self, season: torch.Tensor) -> torch.Tensor:
        """Repeats a season up to the end of the horizon."""
        return season.repeat(1, -(-self.horizon // self.season))[:, : self.horizon]


def season_of(series: Sequence[Floats], context: int, horizon: int) -> int:
    """Returns the season, in rows, from which some series are forecast best; 1 if there is none.

    It tries every length up to the context, once with the slope of the context and once without. The season is the
    length whose forecasts before training have the least error. A longer season must be better by a tenth, because
    multiples of a season are as good as the season itself. The same rows give the same season.
    """
    longest = min(context, _LONGEST_SEASON)
    windows = _windows_of(series, context, horizon, 2 * longest)
    if windows is None:
        return 1
    best_season = 1
    least_error = np.inf
    for season in range(1, longest + 1):
        error = min(_error(windows, context, season, {"smoothing": _SMOOTHING, "slope": slope}) for slope in (0.0, 1.0))
        if error < _BETTER * least_error:
            best_season = season
            least_error = error
    return best_season


def start_of(series: Sequence[Floats], context: int, horizon: int, season: int) -> dict[str, float]:
    """Returns the `smoothing` and the `slope` with which some series are forecast best before training.

    It returns neither if the last season is the best forecast, or if no series has a window. It chooses from only
    fifteen pairs, so that a choice by few windows is as good as one by many. The same rows give the same start.
    """
    starts: list[dict[str, float]] = [{}]  # Without `smoothing`, the last season is forecast.
    starts += [{"smoothing": smoothing, "slope": slope} for smoothing in _SMOOTHINGS for slope in _SLOPES]
    windows = _windows_of(series, context, horizon, len(starts))
    if windows is None:
        return {}
    return min(starts, key=lambda start: _error(windows, context, season, start))


def _windows_of(series: Sequence[Floats], context: int, horizon: int, trials: int) -> torch.Tensor | None:
    """Returns some windows of the series, the fewer the more trials there are; `None` if no series has a window.

    Constant series are left out: all forecasts of them are alike.
    """
    long_series = [values for values in series if len(values) >= context + horizon and np.ptp(values) > 0]
    if not long_series:
        return None
    count = max(1, min(_MOST_WINDOWS, int(_MOST_VALUES / (trials * context * len(long_series)))))
    windows = [_scaled_windows(values, context, horizon, count) for values in long_series]
    return torch.from_numpy(np.concatenate(windows))


def _scaled_windows(values: Floats, context: int, horizon: int, count: int) -> Floats:
    """Returns some windows of a series, evenly apart, the last one among them.

    The last value of its context is subtracted from a window, which is divided by the deviation of the series.
    """
    windows = np.lib.stride_tricks.sliding_window_view(values, context + horizon)
    starts = np.unique(np.linspace(len(windows) - 1, 0, count).round().astype(int))
    scaled: Floats = (windows[starts] - windows[starts, context - 1 : context]) / np.std(values)
    return scaled


def _error(windows: torch.Tensor, context: int, season: int, start: Mapping[str, Any]) -> float:
    """Returns the mean absolute error of the forecasts before training; `start` has arguments of `SeasonalForecast`.

    The error is rounded: weights are float32, and so errors that are equal may differ by some 1e-7.
    """
    horizon = windows.shape[1] - context
    forecast = SeasonalForecast(context, horizon, season, **start).double().eval()
    with torch.no_grad():
        no_correction = torch.zeros(len(windows), horizon)
        outputs = forecast(windows[:, :context], no_correction)
        return round(float((outputs - windows[:, context:]).abs().mean()), 6)
