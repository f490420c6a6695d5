"""What the network of series starts from: a level and the profile of a season; and how the season is found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

__all__ = ["SeasonalForecast", "season_of"]

_SMOOTHING = 0.5  # the share of the newest value in the level, before training
_BETTER = 0.95  # an error in relation to that of a shorter season
_LONGEST = 1024  # rows of a season that is tried
_WINDOWS, _VALUES = 32, 1e8  # of each series, on which seasons are tried; and those of all trials, about a second's

Floats = npt.NDArray[np.float64]


class SeasonalForecast(nn.Module):
    """Continues the level and the seasonal profile of a context, both weighted sums of its values.

    The profile is the deviation of each row of a season from the season's mean and from the slope of the context,
    averaged over its seasons. The level is that of exponential smoothing of what is left without the profile, as in the
    method of Winters ("Forecasting Sales by Exponentially Weighted Moving Averages", Management Science 1960). So
    before training, a context that repeats itself is continued by its last season, as the seasonal naive forecast does.
    Training changes the weight of each season in the profile, of each value in the level, and of the slope, which
    begins at 0: few weights, which a single short series can teach.
    """

    season_weights: torch.Tensor
    value_weights: torch.Tensor
    untrained: torch.Tensor  # 1 before the first step of a training, 0 from then on

    def __init__(self, context: int, horizon: int, season: int) -> None:
        """Makes the weights.

        Args:
            context: Rows that are known.
            horizon: Rows to be forecast.
            season: Rows of a season. If it is 1, or more than the context, there is no profile.
        """
        super().__init__()
        self.horizon, self.season = horizon, season if season <= context else 1
        self.seasons = context // self.season
        self.register_buffer("season_weights", torch.empty(self.seasons))
        self.register_buffer("value_weights", torch.empty(self.seasons * self.season))
        self.register_buffer("untrained", torch.empty((), dtype=torch.int64))
        self.season_changes = nn.Parameter(torch.empty(self.seasons))
        self.value_changes = nn.Parameter(torch.empty(self.seasons * self.season))
        self.slope_weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights from before training. Their changes are 0, so that weight decay leads back to these."""
        values = len(self.value_changes)
        smoothed = (1 - _SMOOTHING) ** torch.arange(values - 1, -1, -1, dtype=torch.float32)
        with torch.no_grad():
            self.untrained.fill_(1)
            self.season_weights.fill_(1 / self.seasons)
            self.value_weights.copy_(smoothed / smoothed.sum())
            for learned in (self.season_changes, self.value_changes, self.slope_weight):
                learned.zero_()

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        """Returns the forecast, of shape `(samples, horizon)`, of a context from which its last value is subtracted."""
        rows = past[:, -len(self.value_changes) :].reshape(past.shape[0], self.seasons, self.season)
        means = rows.mean(2, keepdim=True)
        slope = (means[:, -1] - means[:, 0]) / max(1, len(self.value_changes) - self.season)
        steps = torch.arange(max(self.season, self.horizon), dtype=past.dtype, device=past.device)
        deviations = rows - means - (slope * (steps[: self.season] - (self.season - 1) / 2)).unsqueeze(1)
        profile = (deviations * (self.season_weights + self.season_changes).view(1, -1, 1)).sum(1)
        rest = (rows - profile.unsqueeze(1)).flatten(1)
        level = rest @ (self.value_weights + self.value_changes)
        trend = slope * (steps[: self.horizon] + 1) * self.slope_weight
        forecast: torch.Tensor = profile.repeat(1, -(-self.horizon // self.season))[:, : self.horizon]
        return forecast + trend + level.unsqueeze(1)

    def or_naive(self, forecast: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Returns a forecast of shape `(samples, horizon, ...)` or, while nothing was trained, the last season again.

        So the validation before the first step measures the seasonal naive forecast, and a training that is never
        better returns it. A pass in training mode ends that.
        """
        if self.training:
            self.untrained.zero_()
            return forecast
        naive = past[:, -self.season :].repeat(1, -(-self.horizon // self.season))[:, : self.horizon]
        naive = naive.view(*naive.shape, *[1] * (forecast.dim() - 2))
        return torch.where(self.untrained > 0, naive, forecast)


def season_of(series: Sequence[Floats], context: int, horizon: int) -> int:
    """Returns the season, in rows and no longer than the context, from which some series are forecast best; 1 if none.

    Every length is tried: that whose forecasts before training have the least error is the season. A longer one must
    be better by a twentieth, as multiples of a season are as good. The same rows give the same season.
    """
    long = [values for values in series if len(values) >= context + horizon and np.ptp(values) > 0]
    if not long:
        return 1
    longest = min(context, _LONGEST)
    count = max(1, min(_WINDOWS, int(_VALUES / (longest * context * len(long)))))
    windows = torch.from_numpy(np.concatenate([_scaled_windows(values, context, horizon, count) for values in long]))
    best, least = 1, np.inf
    for season in range(1, longest + 1):
        error = _error(windows, context, season)
        if error < _BETTER * least:
            best, least = season, error
    return best


def _scaled_windows(values: Floats, context: int, horizon: int, count: int) -> Floats:
    """Returns some windows of a series, less the last value of their context, in units of the series' deviation."""
    windows = np.lib.stride_tricks.sliding_window_view(values, context + horizon)
    places = np.unique(np.linspace(len(windows) - 1, 0, count).round().astype(int))
    found: Floats = (windows[places] - windows[places, context - 1 : context]) / np.std(values)
    return found


def _error(windows: torch.Tensor, context: int, season: int) -> float:
    """Returns the mean absolute error of the forecasts before training, rounded: sums differ in their last digits."""
    forecast = SeasonalForecast(context, windows.shape[1] - context, season).double()
    with torch.no_grad():
        return float(f"{float((forecast(windows[:, :context]) - windows[:, context:]).abs().mean()):.8g}")
