"""What the network of series starts from: a level and the profile of a season; and how the season is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

__all__ = ["SeasonalForecast", "season_of", "start_of"]

_SMOOTHING = 0.5  # Before training, this is the share of the newest value in the level.
_SMOOTHINGS, _SLOPES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.0, 0.5, 1.0)  # A start is chosen from these.
_BETTER = 0.9  # A longer season is taken if its error is less than this share of a shorter one's.
_LONGEST = 1024  # No season of more rows is tried.
_WINDOWS = 32  # Seasons are tried on so many windows of each series.
_VALUES = 1e8  # All trials together read so many values, which takes about a second.

Floats = npt.NDArray[np.float64]


class SeasonalForecast(nn.Module):
    """Continues the level and the seasonal profile of a context, both weighted sums of its values.

    The profile is the deviation of each row of a season from the season's mean and from the slope of the context,
    averaged over its seasons. The level is that of exponential smoothing of what is left without the profile, as in the
    method of Winters ("Forecasting Sales by Exponentially Weighted Moving Averages", Management Science 1960). So
    before training, a context that repeats itself is continued by its last season, as the seasonal naive forecast does.
    Training changes the weight of each season in the profile, of each value in the level, and of the slope: few
    weights, which a single short series can teach.
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
            smoothing: The share of the newest value in the level before training. Without it, that is a half, and the
                last season is forecast until anything is learned.
            slope: The part of the context's slope by which a forecast goes on before training.
        """
        super().__init__()
        self.smoothing, self.slope = smoothing, slope
        self.horizon, self.season = horizon, season if season <= context else 1
        self.seasons = context // self.season
        self.register_buffer("season_weights", torch.empty(self.seasons))
        self.register_buffer("value_weights", torch.empty(self.seasons * self.season))
        self.season_changes = nn.Parameter(torch.empty(self.seasons))
        self.value_changes = nn.Parameter(torch.empty(self.seasons * self.season))
        self.slope_weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights from before training. Their changes are 0, so that weight decay leads back to these."""
        values = len(self.value_changes)
        smoothing = _SMOOTHING if self.smoothing is None else self.smoothing
        smoothed = (1 - smoothing) ** torch.arange(values - 1, -1, -1, dtype=torch.float32)
        with torch.no_grad():
            self.season_weights.fill_(1 / self.seasons)
            self.value_weights.copy_(smoothed / smoothed.sum())
            for learned in (self.season_changes, self.value_changes, self.slope_weight):
                learned.zero_()

    def forward(self, past: torch.Tensor, correction: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the forecast, of shape `(samples, horizon)`, of a context of shape `(samples, context)`.

        With what layers beside it add, of shape `(samples, horizon, ...)`, it returns the sum. Outside of training and
        without `smoothing`, that is the last season again as long as nothing was learned: the validation before the
        first step measures the seasonal naive forecast, and a training that is never better returns it. The weights say
        whether anything was learned, which are the same in all ranks: a buffer of a rank without windows would not
        change.
        """
        last = past[:, -1:]
        rows = (past - last)[:, -len(self.value_changes) :].reshape(past.shape[0], self.seasons, self.season)
        means = rows.mean(2, keepdim=True)
        slope = (means[:, -1] - means[:, 0]) / max(1, len(self.value_changes) - self.season)
        steps = torch.arange(max(self.season, self.horizon), dtype=past.dtype, device=past.device)
        deviations = rows - means - (slope * (steps[: self.season] - (self.season - 1) / 2)).unsqueeze(1)
        profile = (deviations * (self.season_weights + self.season_changes).view(1, -1, 1)).sum(1)
        residuals = (rows - profile.unsqueeze(1)).flatten(1)
        level = residuals @ (self.value_weights + self.value_changes)
        trend = slope * (steps[: self.horizon] + 1) * (self.slope + self.slope_weight)
        forecast = self._repeated(profile) + trend + level.unsqueeze(1) + last
        if correction is None:
            return forecast
        more = [1] * (correction.dim() - 2)
        corrected = correction + forecast.view(*forecast.shape, *more)
        if self.training or self.smoothing is not None:
            return corrected
        learned = torch.cat([self.season_changes, self.value_changes, self.slope_weight]).any()
        learned = (learned | correction.flatten(1).any(1)).view(-1, 1, *more)
        return torch.where(learned, corrected, self._repeated(past[:, -self.season :]).view(*forecast.shape, *more))

    def _repeated(self, season: torch.Tensor) -> torch.Tensor:
        """Returns a season again and again, as far as the horizon."""
        return season.repeat(1, -(-self.horizon // self.season))[:, : self.horizon]


def season_of(series: Sequence[Floats], context: int, horizon: int) -> int:
    """Returns the season, in rows and no longer than the context, from which some series are forecast best; 1 if none.

    Every length is tried, with the slope of the context and without: that whose forecasts before training have the
    least error is the season. A longer one must be better by a tenth, as multiples of a season are as good. The same
    rows give the same season.
    """
    longest = min(context, _LONGEST)
    windows = _windows_of(series, context, horizon, 2 * longest)
    if windows is None:
        return 1
    best, least = 1, np.inf
    for season in range(1, longest + 1):
        error = min(_error(windows, context, season, {"smoothing": _SMOOTHING, "slope": slope}) for slope in (0.0, 1.0))
        if error < _BETTER * least:
            best, least = season, error
    return best


def start_of(series: Sequence[Floats], context: int, horizon: int, season: int) -> dict[str, float]:
    """Returns the `smoothing` and the `slope` from which some series are forecast best; none if their last season is.

    There are fifteen pairs, so that few windows choose as well as many. The same rows give the same start.
    """
    starts: list[dict[str, float]] = [{}]
    starts += [{"smoothing": smoothing, "slope": slope} for smoothing in _SMOOTHINGS for slope in _SLOPES]
    windows = _windows_of(series, context, horizon, len(starts))
    if windows is None:
        return {}
    return min(starts, key=lambda start: _error(windows, context, season, start))


def _windows_of(series: Sequence[Floats], context: int, horizon: int, trials: int) -> torch.Tensor | None:
    """Returns some windows of the series, the fewer the more trials there are; `None` if no series has one."""
    long = [values for values in series if len(values) >= context + horizon and np.ptp(values) > 0]
    if not long:
        return None
    count = max(1, min(_WINDOWS, int(_VALUES / (trials * context * len(long)))))
    return torch.from_numpy(np.concatenate([_scaled_windows(values, context, horizon, count) for values in long]))


def _scaled_windows(values: Floats, context: int, horizon: int, count: int) -> Floats:
    """Returns some windows of a series, less the last value of their context, in units of the series' deviation."""
    windows = np.lib.stride_tricks.sliding_window_view(values, context + horizon)
    starts = np.unique(np.linspace(len(windows) - 1, 0, count).round().astype(int))
    scaled: Floats = (windows[starts] - windows[starts, context - 1 : context]) / np.std(values)
    return scaled


def _error(windows: torch.Tensor, context: int, season: int, start: Mapping[str, Any]) -> float:
    """Returns the mean absolute error of the forecasts before training, rounded."""
    horizon = windows.shape[1] - context
    forecast = SeasonalForecast(context, horizon, season, **start).double().eval()
    with torch.no_grad():
        outputs = forecast(windows[:, :context], torch.zeros(len(windows), horizon))
        # Weights are float32: errors in units of the series' deviation differ by some 1e-7 where none is better.
        return round(float((outputs - windows[:, context:]).abs().mean()), 6)
