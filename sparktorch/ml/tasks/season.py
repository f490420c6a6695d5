"""The season of the series in a DataFrame, found in some of them."""

from __future__ import annotations

import logging

import numpy as np
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.errors import counted
from sparktorch.ml.fit.values import Values
from sparktorch.model.series.seasonal import season_of
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import table_of

__all__ = ["learned_season"]

_LOG = logging.getLogger(__name__)

_SERIES, _WINDOWS, _ROWS = 16, 8, 2048  # some series, and the last windows of each, in no more rows if two fit in


def learned_season(dataset: DataFrame, names: ColumnNames, p: Values) -> int:
    """Returns the season of some series, chosen by a hash: that from which their last rows are forecast best.

    The rows that train count. What the driver gets of them is bounded, whatever the DataFrame has.
    """
    length = p["context"] + p["horizon"]
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    rows = dataset.where(trains).select(
        (names.column(p["groupCol"]) if p["groupCol"] else F.lit(0)).alias("series"),
        names.column(p["orderCol"]).alias("time"),
        names.column(p["labelCol"]).cast("double").alias("value"),
    )
    rows = rows.where(F.abs("value") < float("inf"))
    long = rows.groupBy("series").count().where(F.col("count") >= length)
    by_hash = long.orderBy(F.xxhash64("series"), "series").limit(_SERIES)
    numbered = by_hash.select("series", F.row_number().over(Window.orderBy(F.xxhash64("series"), "series")).alias("of"))
    last = Window.partitionBy("of").orderBy(F.col("time").desc())
    latest = rows.join(F.broadcast(numbered), "series").select("of", F.row_number().over(last).alias("back"), "value")
    table = table_of(latest.where(F.col("back") <= max(2 * length, min(_WINDOWS * length, _ROWS))))
    of, back, values = (table[name].to_numpy() for name in ("of", "back", "value"))
    order = np.lexsort((-back, of))
    parts = np.split(values[order], np.flatnonzero(np.diff(of[order])) + 1)
    season = season_of(parts, p["context"], p["horizon"])
    where = f"in {counted(len(np.unique(of)), 'series', 'series')}; set `season` if you know it"
    _LOG.info("%s, %s", "no season was found" if season == 1 else f"a season of {season} rows was found", where)
    return season
