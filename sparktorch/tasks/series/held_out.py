"""The rows of series that a training holds out are the last ones: how many windows they have, and their marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Rows
from pyspark.sql import functions as F

from sparktorch.data.columns import Window
from sparktorch.spark.compat import frame_of_rows

__all__ = [
    "WindowSplit",
    "count_windows",
    "lengths_of_series",
    "mark_last_of_series",
    "mark_last_rows",
    "windows_held_out",
]


class WindowSplit(NamedTuple):
    """How the windows of a series are divided.

    Attributes:
        trained: Number of windows that train.
        held_out: Number of windows that are held out.
        marked_rows: Number of rows that are marked for validation, the last ones of the series.
    """

    trained: int
    held_out: int
    marked_rows: int


def windows_held_out(rows: int, window: Window, share: float, most: float = 1.0, *, few: bool = False) -> WindowSplit:
    """Divides the windows of a series with `rows` rows.

    - A row that a held-out window forecasts is forecast by no window that trains: the windows between them do neither.
    - Few windows forecast much the same rows, and say too little about others. So none are held out if the share has
      fewer windows than begin in the rows of a horizon, or if less than half of the windows would be left to train.
    - With `few`, for users who ask for validation, one held-out window is enough.
    - The share that is held out is at most `most`.
    """
    windows = max(0, (rows - window.rows) // window.step + 1)
    overlapping = -(-window.horizon // window.step)  # The horizons of this number of consecutive windows overlap.
    wanted = windows * share
    candidates: list[int] = []
    if wanted >= overlapping:
        candidates += [int(wanted), overlapping]
    if few and share and windows:
        candidates += [int(wanted), 1]
    for candidate in candidates:
        held_out = max(1, min(candidate, int(windows * most)))
        trained = windows - held_out - (overlapping - 1)
        if 2 * trained >= windows:
            return WindowSplit(trained, held_out, (held_out - 1) * window.step + window.horizon)
    return WindowSplit(windows, 0, 0)


def lengths_of_series(rows: DataFrame, series: Column) -> list[tuple[int, int]]:
    """Returns each number of rows that series have, with the number of series that have it.

    Args:
        rows: The rows of all series.
        series: The column that tells the series apart.
    """
    lengths = rows.groupBy(series.alias("series")).agg(F.count(F.lit(1)).alias("length"))
    return [tuple(row) for row in lengths.groupBy("length").agg(F.count(F.lit(1))).collect()]


def count_windows(lengths: Sequence[tuple[int, int]], window: Window) -> int:
    """Returns the number of windows of all series, if none are held out; `lengths` is as from `lengths_of_series`."""
    return sum(windows_held_out(length, window, 0.0).trained * series_count for length, series_count in lengths)


def mark_last_rows(dataset: DataFrame, order: Column, marks: str, count: int) -> DataFrame:
    """Marks the last rows of one series in a new column, without a window function.

    Spark would warn that the window function has no partitions.
    """
    if not count:
        return dataset.withColumn(marks, F.lit(False))
    first = f"{marks}_first"
    last_rows = dataset.select(order.alias(first)).orderBy(F.desc(first)).limit(count)
    with_first = dataset.crossJoin(F.broadcast(last_rows.agg(F.min(first).alias(first))))
    return with_first.withColumn(marks, F.coalesce(order >= F.col(first), F.lit(False))).drop(first)


def mark_last_of_series(
    dataset: DataFrame, series: Column, order: Column, marks: str, marks_by_length: Mapping[int, int]
) -> DataFrame:
    """Marks the last rows of each series in a new column; how many follows from the number of its rows."""
    table = pa.table(
        {
            "length": pa.array(list(marks_by_length), pa.int64()),
            "marks": pa.array(list(marks_by_length.values()), pa.int64()),
        }
    )
    rows_of_series = Rows.partitionBy(series)
    rows_back = f"{marks}_position"  # The last row of a series has 1.
    length = f"{marks}_length"
    rows = dataset.select(
        "*",
        F.row_number().over(rows_of_series.orderBy(order.desc())).alias(rows_back),
        F.count(F.lit(1)).over(rows_of_series).alias(length),
    )
    marked_rows = F.broadcast(frame_of_rows(dataset.sparkSession, table).toDF(length, marks))
    rows = rows.join(marked_rows, length, "left").withColumn(marks, F.col(rows_back) <= F.col(marks))
    return rows.drop(rows_back, length)
