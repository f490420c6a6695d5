"""The network of series starts from a seasonal forecast, whose season is that which forecasts some series best."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.deferred import deferred
from sparktorch.tasks.series.network import SeriesModule, SeriesNetwork
from sparktorch.tasks.series.season import context_for, longest_context, middle_length
from sparktorch.tasks.series.seasonal import SeasonalForecast, season_of, start_of

NETWORK = "sparktorch.tasks.series.network:SeriesNetwork"
WAVE = torch.tensor([3.0, -1.0, 7.0, 0.5])  # a season


def repeated(samples: int, context: int, horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns contexts that repeat seasons of different levels and sizes, `(samples, context, 1)`, and what follows."""
    size = torch.arange(1, samples + 1).unsqueeze(1)
    rows = 100 + size * (50 + WAVE[(torch.arange(context + horizon) + 1) % len(WAVE)])
    return rows[:, :context].unsqueeze(2), rows[:, context:]


@pytest.mark.parametrize(("context", "horizon"), [(12, 4), (14, 11), (5, 2), (4, 9)])
@pytest.mark.parametrize("quantiles", [[], [0.1, 0.5, 0.9]])
def test_before_training_the_network_forecasts_the_last_season_of_what_repeats_itself(
    context: int, horizon: int, quantiles: list[float]
) -> None:
    columns: dict[str, Any] = {"past": [(1.0, 2.0)], "future": [(0.0, 1.0)], "static": [(0.0, 1.0)]}
    module = SeriesModule(NETWORK, {}, context, horizon, **columns, quantiles=quantiles, season=len(WAVE))
    past, after = repeated(3, context, horizon)
    more = torch.rand(3, context + horizon, 1), torch.rand(3, context, 1)
    found = module(torch.cat([past, torch.rand(3, context, 1)], 2), *more)
    for forecast in found.unbind(2) if quantiles else [found]:
        torch.testing.assert_close(forecast, after, rtol=1e-5, atol=1e-4)


def test_before_training_the_profile_is_that_of_the_mean_season_and_the_level_is_smoothed() -> None:
    past = torch.rand(6, 14, generator=torch.Generator().manual_seed(1))
    found = SeasonalForecast(14, 5, 4)(past)
    for values, forecast in zip(past.double().numpy(), found.detach().numpy(), strict=True):
        seasons = values[2:].reshape(3, 4)
        slope = (seasons[2].mean() - seasons[0].mean()) / 8
        profile = (seasons - seasons.mean(1, keepdims=True)).mean(0) - slope * (np.arange(4) - 1.5)
        rest = values[2:] - np.tile(profile, 3)
        weights = 0.5 ** np.arange(11, -1, -1)
        want = rest @ weights / weights.sum() + profile[[0, 1, 2, 3, 0]]
        np.testing.assert_allclose(forecast, want, rtol=1e-5)


@pytest.mark.parametrize(("smoothing", "slope"), [(0.1, 0.0), (0.9, 0.5)])
def test_a_start_says_how_much_of_the_level_is_the_newest_value_and_how_far_the_slope_goes_on(
    smoothing: float, slope: float
) -> None:
    past = torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
    found = SeriesNetwork(8, 5, season=4, smoothing=smoothing, slope=slope).eval()(past.unsqueeze(2))
    seasons = past.reshape(3, 2, 4)
    rises = (seasons[:, 1].mean(1) - seasons[:, 0].mean(1)) / 4
    rows = seasons - seasons.mean(2, keepdim=True) - rises.view(3, 1, 1) * (torch.arange(4) - 1.5)
    rest = (seasons - rows.mean(1, keepdim=True)).flatten(1)
    weights = (1 - smoothing) ** torch.arange(7, -1, -1)
    want = (rest @ weights / weights.sum()).unsqueeze(1) + rows.mean(1)[:, [0, 1, 2, 3, 0]]
    torch.testing.assert_close(found, want + slope * rises.unsqueeze(1) * torch.arange(1, 6))


@pytest.mark.parametrize("season", [1, 9])
def test_without_a_season_in_the_context_there_is_a_level_alone(season: int) -> None:
    past = torch.rand(2, 8)
    found = SeasonalForecast(8, 3, season)(past)
    weights = 0.5 ** torch.arange(7, -1, -1, dtype=torch.float32)
    torch.testing.assert_close(found, (past @ (weights / weights.sum())).unsqueeze(1).expand(-1, 3))


def test_a_level_that_is_higher_is_forecast_higher_whatever_was_trained() -> None:
    module = SeriesModule(NETWORK, {"hidden": [4]}, 8, 3, season=4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand(parameter.shape) - 0.5)
    past = torch.rand(5, 8, 1)
    torch.testing.assert_close(module(3 * past + 7), 3 * module(past) + 7)


def test_a_network_that_is_made_real_later_starts_from_the_same_forecast() -> None:
    later = deferred(lambda: SeriesNetwork(12, 5, hidden=[8, 8], season=4))
    later.check_reset()
    later.materialise(later.module)
    past = torch.rand(3, 12, 1)
    torch.testing.assert_close(later.module(past), SeriesNetwork(12, 5, season=4)(past))


def test_a_model_that_was_saved_before_there_were_seasons_scores_the_same() -> None:
    torch.manual_seed(0)
    module = SeriesModule(NETWORK, {"hidden": [3]}, 4, 2)  # the arguments that such a model has
    assert all(name.split(".")[1] in ("linear", "layers") for name in module.state_dict())
    found = module(torch.tensor([[1.0, 3.0, 2.0, 5.0], [0.0, 2.0, 4.0, 7.0]]).unsqueeze(2))
    want = [[6.488809585571289, 4.688776016235352], [8.073427200317383, 6.016364097595215]]  # of version 0.1.0
    torch.testing.assert_close(found, torch.tensor(want))


def series(kind: str, rows: int = 240) -> np.ndarray[Any, np.dtype[np.float64]]:
    draw, time = np.random.default_rng(3), np.arange(rows)
    return {
        "monthly": 100 + time + 10 * np.sin(time * np.pi / 6) + draw.normal(size=rows),
        "weekly": np.array([5, 6, 5, 7, 9, 14, 2])[time % 7] * np.exp(0.2 * draw.normal(size=rows)),
        "noise": draw.normal(size=rows),
        "walk": draw.normal(size=rows).cumsum(),
        "trend": 3.0 * time + draw.normal(size=rows),
        "constant": np.full(rows, 5.0),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "season"), [("monthly", 12), ("weekly", 7), ("noise", 1), ("walk", 1), ("trend", 1), ("constant", 1)]
)
def test_the_season_is_that_from_which_the_series_are_forecast_best(kind: str, season: int) -> None:
    assert season_of([series(kind)], 36, 12) == season
    assert season_of([series("constant"), series(kind, 200) * 1e6, series(kind, 20)], 36, 12) == season


def test_a_season_is_told_from_a_trend_that_is_larger() -> None:
    time = np.arange(72)
    rising = 3.0 * time + 10 * np.sin(time * np.pi / 6) + np.random.default_rng(3).normal(size=72)
    assert season_of([rising], 24, 12) == 12


@pytest.mark.parametrize(
    ("values", "start"),
    [
        (series("trend"), {"slope": 1.0}),
        (series("walk"), {"smoothing": 0.9, "slope": 0.0}),
        (series("noise"), {"smoothing": 0.1, "slope": 0.0}),
        (np.tile([3.0, -1.0, 7.0, 0.5], 30), {}),
        (series("constant"), {}),
        (series("noise", 20), {}),
    ],
    ids=["trend", "walk", "noise", "repeated", "constant", "short"],
)
def test_the_start_is_that_from_which_the_series_are_forecast_best_and_none_if_their_last_season_is(
    values: np.ndarray[Any, Any], start: dict[str, float]
) -> None:
    found = start_of([values], 24, 12, 4)
    assert found.keys() == (start and {"smoothing": 0.5, "slope": 0.0}).keys()
    assert start.items() <= found.items()


def test_one_short_series_with_trend_and_season_is_forecast_by_its_start_far_better_than_by_its_last_season() -> None:
    time = np.arange(84)
    values = (100 + 2.0 * time) * (1 + 0.2 * np.sin(time * np.pi / 6)) + np.random.default_rng(5).normal(size=84)
    before, after = values[:72], values[72:]
    assert season_of([before], 24, 12) == 12
    network = SeriesNetwork(24, 12, season=12, **start_of([before], 24, 12, 12)).double().eval()
    with torch.no_grad():
        found = network(torch.from_numpy(before[-24:]).view(1, 24, 1))[0].numpy()
    assert np.abs(found - after).mean() < 0.5 * np.abs(before[-12:] - after).mean()


def test_a_season_is_no_longer_than_the_context_and_short_series_have_none() -> None:
    assert season_of([series("monthly")], 11, 6) < 11
    assert season_of([series("monthly", 40)], 36, 12) == 1
    assert season_of([], 36, 12) == 1


@pytest.mark.parametrize(("context", "horizon", "season"), [(12, 4, 4), (14, 11, 4), (6, 3, 1), (5, 3, 9)])
@pytest.mark.parametrize("quantiles", [[], [0.1, 0.9]])
def test_until_it_is_trained_the_network_forecasts_the_last_season_of_anything(
    context: int, horizon: int, season: int, quantiles: list[float]
) -> None:
    torch.manual_seed(0)
    module = SeriesModule(NETWORK, {}, context, horizon, quantiles=quantiles, season=season).eval()
    past = 100 + 5 * torch.rand(3, context, 1)
    rows = season if season <= context else 1
    want = past[:, [context - rows + step % rows for step in range(horizon)], 0]
    found = module(past)
    for forecast in found.unbind(2) if quantiles else [found]:
        torch.testing.assert_close(forecast, want)
    begun = module.train()(past)
    assert not torch.allclose(begun, found)
    torch.testing.assert_close(module.eval()(past), found)
    network = module.module
    assert isinstance(network, SeriesNetwork)
    seasonal, layers = network.seasonal, network.layers
    assert seasonal is not None
    assert layers is not None
    weights = [seasonal.season_changes, seasonal.value_changes, seasonal.slope_weight]
    for learned in (*weights, *network.linear.parameters(), *layers[-1].parameters()):
        with torch.no_grad():
            learned.fill_(1e-6)
            torch.testing.assert_close(module(past), begun.detach(), rtol=1e-4, atol=0)
            learned.zero_()


def test_a_model_that_was_saved_before_its_last_season_was_returned_scores_the_same() -> None:
    module = SeriesModule(NETWORK, {"hidden": [3]}, 8, 2, season=4).eval()
    parts = ("season_weights", "value_weights", "season_changes", "value_changes", "slope_weight")
    layers = ("linear.weight", "linear.bias", "layers.0.weight", "layers.0.bias", "layers.3.weight", "layers.3.bias")
    assert set(module.state_dict()) == {f"module.{name}" for name in (*(f"seasonal.{part}" for part in parts), *layers)}


def test_a_context_has_two_horizons_or_three_seasons_as_far_as_half_of_a_series_goes() -> None:
    assert middle_length([(20, 3), (3000, 4)]) == 3000
    assert middle_length([(20, 3), (3000, 2)]) == 20
    assert [longest_context(rows, 24) for rows in (374, 3000, 28, 9)] == [175, 1024, 2, 2]
    assert [context_for(364, 14, season) for season in (1, 7, 30, 80, 180)] == [28, 28, 90, 160, 28]
    assert context_for(72, 12, 12) == 24
    assert context_for(6, 12, 1) == 2
    assert context_for(351, 1, 1) == 8


def test_a_context_has_two_seasons_where_they_leave_a_window_as_these_show_a_slope() -> None:
    assert [context_for(rows, 12, 12) for rows in (35, 36, 48, 60)] == [11, 24, 24, 24]
    assert context_for(2 * 1024, 12, 600) == 600  # two would be more than 1,024 rows
