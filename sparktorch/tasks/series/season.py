"""The season of the series in a DataFrame, found in some of them, and the context and the start that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.errors import counted
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import table_of
from sparktorch.tasks.series.seasonal import season_of, start_of

__all__ = ["context_for", "learned_season", "learned_start", "longest_context", "middle_length"]

_LOG = logging.getLogger(__name__)

# Of so many series, it looks at the last windows of each, in no more than these rows if two windows fit in.
_SERIES, _WINDOWS, _ROWS = 16, 8, 2048
# The most and the fewest rows of a context, and how many seasons and horizons it has.
_LONGEST, _LEAST, _SEASONS, _HORIZONS = 1024, 8, 3, 2


def middle_length(lengths: Sequence[tuple[int, int]]) -> int:
    """Returns the rows of the middle series; `lengths` are numbers of rows, each with how many series have it."""
    passed, series = 0, sum(count for _, count in lengths)
    for length, count in sorted(lengths):
        passed += count
        if 2 * passed >= series:
            return length
    return 0


def longest_context(rows: int, horizon: int) -> int:
    """Returns the longest context in which a season is looked for: half of the rows that a series has but a horizon."""
    return min(_LONGEST, max(2, (rows - horizon) // 2))


def context_for(rows: int, horizon: int, season: int) -> int:
    """Returns the rows of a context for series of so many rows: two horizons, or three seasons if these are more.

    These are no more than half of what a series has before a horizon, but for two seasons, which show a slope, where
    they leave a window.
    """
    longest = longest_context(rows, horizon)
    seasons = min(_SEASONS, longest // season) if season > 1 else 0
    if 1 < season <= min(_LONGEST, rows - horizon) // 2:
        seasons = max(seasons, 2)
    return max(2, min(longest, max(_HORIZONS * horizon, _LEAST)), seasons * season)


def learned_season(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> int:
    """Returns the season from which the last rows of some series are forecast best."""
    return _season_of(_last_values(dataset, names, p, context), context, p["horizon"])


def learned_start(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> tuple[int, dict[str, float]]:
    """Returns the season, that of the Param if it is set, and the start from which the last rows are forecast best."""
    values = _last_values(dataset, names, p, context)
    season = p["season"] or _season_of(values, context, p["horizon"])
    return season, start_of(values, context, p["horizon"], season)


def _season_of(values: Sequence[npt.NDArray[Any]], context: int, horizon: int) -> int:
    season = season_of(values, context, horizon)
    where = f"in {counted(len(values), 'series', 'series')}; set `season` if you know it"
    _LOG.info("%s, %s", "no season was found" if season == 1 else f"a season of {season} rows was found", where)
    return season


def _last_values(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of some series, which a hash chooses, of the rows that train.

    What the driver gets of them is bounded, whatever the DataFrame has.
    """
    length = context + p["horizon"]
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    rows = dataset.where(trains).select(
        (names.column(p["groupCol"]) if p["groupCol"] else F.lit(0)).alias("series"),
        names.column(p["orderCol"]).alias("time"),
        names.column(p["labelCol"]).cast("double").alias("value"),
    )
    rows = rows.where(F.abs("value") < float("inf"))
    most = max(2 * length, min(_WINDOWS * length, _ROWS))
    return _last_of_some(rows, length, most) if p["groupCol"] else _last(rows, most)


def _last(rows: DataFrame, most: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of one series, without a window function, which would warn that it has no partitions."""
    latest = table_of(rows.orderBy(F.desc("time")).limit(most).select("value"))
    return [latest["value"].to_numpy()[::-1]]


def _last_of_some(rows: DataFrame, least: int, most: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of each of some series, which have `least` rows or more."""
    long = rows.groupBy("series").count().where(F.col("count") >= least)
    sample = long.orderBy(F.xxhash64("series"), "series").limit(_SERIES).select("series")
    back = F.row_number().over(Window.partitionBy("series").orderBy(F.desc("time")))
    of_sample = rows.join(F.broadcast(sample), "series")
    keyed = of_sample.select(F.xxhash64("series").alias("of"), back.alias("back"), "value")
    latest = keyed.where(F.col("back") <= most)
    table = table_of(latest)
    series, indices, values = (table[name].to_numpy() for name in ("of", "back", "value"))
    order = np.lexsort((-indices, series))
    return np.split(values[order], np.flatnonzero(np.diff(series[order])) + 1)
