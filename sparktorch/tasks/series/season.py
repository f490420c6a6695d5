"""The season of series, learned from some series of a DataFrame; the context and the start that follow from it."""

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

__all__ = ["context_for", "learn_season", "learn_start", "longest_context", "middle_length"]

_LOG = logging.getLogger(__name__)

_MOST_SERIES = 16  # A season is learned from at most this number of series.
_LAST_WINDOWS = 8  # The rows of at most this number of windows are read, the last ones of each series.
_MOST_ROWS = 2048  # No more rows of a series are read, unless two windows have more.
_LONGEST_CONTEXT = 1024  # No context has more rows.
_SHORTEST_CONTEXT = 8  # No context has fewer rows, unless the series are too short.
_SEASONS = 3  # A context has this number of seasons.
_HORIZONS = 2  # A context has this number of horizons, if they have more rows than its seasons.


def middle_length(lengths: Sequence[tuple[int, int]]) -> int:
    """Returns the median number of rows; `lengths` are numbers of rows, each with the number of series that have it."""
    series_count = sum(count for _, count in lengths)
    passed = 0
    for length, count in sorted(lengths):
        passed += count
        if 2 * passed >= series_count:
            return length
    return 0


def longest_context(rows: int, horizon: int) -> int:
    """Returns the longest context in which a season is looked for: half of a series' rows without a horizon."""
    return min(_LONGEST_CONTEXT, max(2, (rows - horizon) // 2))


def context_for(rows: int, horizon: int, season: int) -> int:
    """Returns the rows of a context for series with a number of rows.

    - A context has two horizons, or three seasons if these are more.
    - It has no more than half of the rows that a series has before a horizon.
    - Two seasons, which show a slope, may be more than half, if they leave a window.
    """
    longest = longest_context(rows, horizon)
    seasons = 0
    if season > 1:
        seasons = min(_SEASONS, longest // season)
        if 2 * season <= min(_LONGEST_CONTEXT, rows - horizon):
            seasons = max(seasons, 2)
    return max(2, min(longest, max(_HORIZONS * horizon, _SHORTEST_CONTEXT)), seasons * season)


def learn_season(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> int:
    """Returns the season from which the last rows of some series are forecast best."""
    return _season_of(_last_values(dataset, names, p, context), context, p["horizon"])


def learn_start(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> tuple[int, dict[str, float]]:
    """Returns the season and the start from which the last rows are forecast best; a season that is set is kept."""
    values = _last_values(dataset, names, p, context)
    season = p["season"] or _season_of(values, context, p["horizon"])
    return season, start_of(values, context, p["horizon"], season)


def _season_of(values: Sequence[npt.NDArray[Any]], context: int, horizon: int) -> int:
    """Returns the season from which the values are forecast best, and logs it."""
    season = season_of(values, context, horizon)
    result = "no season was found" if season == 1 else f"a season of {season} rows was found"
    where = f"in {counted(len(values), 'series', 'series')}; set `season` if you know it"
    _LOG.info("%s, %s", result, where)
    return season


def _last_values(dataset: DataFrame, names: ColumnNames, p: Values, context: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of some series, chosen by a hash, from the training rows.

    The number of values that the driver gets is bounded, whatever the DataFrame has.
    """
    length = context + p["horizon"]
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    rows = dataset.where(trains).select(
        (names.column(p["groupCol"]) if p["groupCol"] else F.lit(0)).alias("series"),
        names.column(p["orderCol"]).alias("time"),
        names.column(p["labelCol"]).cast("double").alias("value"),
    )
    rows = rows.where(F.abs("value") < float("inf"))
    most = max(2 * length, min(_LAST_WINDOWS * length, _MOST_ROWS))
    if p["groupCol"]:
        return _last_of_some_series(rows, length, most)
    return _last_of_one_series(rows, most)


def _last_of_one_series(rows: DataFrame, most: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of one series, without a window function, which would warn that it has no partitions."""
    latest = table_of(rows.orderBy(F.desc("time")).limit(most).select("value"))
    return [latest["value"].to_numpy()[::-1]]


def _last_of_some_series(rows: DataFrame, least: int, most: int) -> list[npt.NDArray[Any]]:
    """Returns the last values of each of some series that have at least `least` rows."""
    long_series = rows.groupBy("series").count().where(F.col("count") >= least)
    some_series = long_series.orderBy(F.xxhash64("series"), "series").limit(_MOST_SERIES).select("series")
    # Rows are numbered from the last one of a series backwards.
    rows_back = F.row_number().over(Window.partitionBy("series").orderBy(F.desc("time")))
    rows_of_some = rows.join(F.broadcast(some_series), "series")
    latest = rows_of_some.select(F.xxhash64("series").alias("hash"), rows_back.alias("rows_back"), "value")
    table = table_of(latest.where(F.col("rows_back") <= most))
    hashes, back, values = (table[name].to_numpy() for name in ("hash", "rows_back", "value"))
    order = np.lexsort((-back, hashes))
    starts = np.flatnonzero(np.diff(hashes[order])) + 1
    return np.split(values[order], starts)
