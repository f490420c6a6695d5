"""What is learned of a table's columns: categories of texts, figures and distribution of numbers, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.data.distribution import MOST_VALUES, DistinctValues, Distribution
from sparktorch.distributed.root_cause import missing_module
from sparktorch.errors import ColumnError
from sparktorch.tasks.shared.columns import as_doubles

__all__ = ["Figures", "categories_and_figures", "check_rows", "rounded"]

_SCHEMA = pa.schema(
    [
        ("position", pa.int32()),
        ("value", pa.string()),
        ("rows", pa.int64()),
        *((name, pa.float64()) for name in ("mean", "squares", "smallest", "largest")),
        ("hash", pa.int64()),
    ]
)
_DDL = (
    "position int, value string, rows bigint, mean double, squares double, smallest double, largest double, hash bigint"
)


class Figures(NamedTuple):
    """Figures of a column of numbers, of the rows where it is finite; of the first columns, their distribution, too."""

    rows: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    smallest: float = 0.0
    largest: float = 0.0
    distribution: Distribution = Distribution()


def check_rows(count: int) -> None:
    """Refuses to learn of no rows."""
    if not count:
        what, hint = "the DataFrame has no rows that train", "check the filter or the path it comes from"
        raise ColumnError(what, hint=hint, code="ST-NO-ROWS")


def categories_and_figures(
    rows: DataFrame,
    texts: Sequence[Column],
    numbers: Sequence[Column],
    *,
    limited: int,
    most: int,
    labels: int,
    distinct: Sequence[int] = (),
) -> tuple[list[dict[str, int]], list[Figures]]:
    """Returns the values of each column of strings with their numbers of rows, and the figures of columns of numbers.

    Frequent values come first. Of the first `limited` texts, it returns at most `most` values; of the others, which are
    labels, at most `labels`. Of the first numbers, which are numbers, dates or timestamps, the figures have the
    distribution, of at most as many values as `distinct` has for each. It does not depend on how rows are divided into
    partitions and batches.

    Raises:
        ClusterError: The executors' Python lacks a module, such as this one.
    """
    positions = range(len(texts) + len(numbers))
    columns = [column.alias(f"c{position}") for position, column in zip(positions, (*texts, *numbers), strict=True)]
    summed = rows.select(*columns).mapInArrow(partial(_of_batches, texts=len(texts), distinct=list(distinct)), _DDL)
    of_batches = F.when(F.col("value").isNull(), F.struct("rows", "mean", "squares"))
    groups = summed.groupBy("position", "value").agg(
        F.sum("rows").alias("rows"),
        (F.sum(F.col("rows") * F.col("mean")) / F.sum("rows")).alias("mean"),
        F.collect_list(of_batches).alias("batches"),
        F.min("smallest").alias("smallest"),
        F.max("largest").alias("largest"),
        F.min("hash").alias("hash"),
    )
    of_column = Window.partitionBy("position")
    order = of_column.orderBy("hash", F.desc("rows"), "value")
    ranked = groups.withColumn("rank", F.row_number().over(order))
    largest = F.get(F.array(*map(F.lit, distinct)), F.col("position") - len(positions)) if distinct else F.lit(0)
    count = F.when(F.col("position") < limited, most).when(F.col("hash").isNull(), labels).otherwise(largest)
    limited_values = ranked.where(F.col("rank") <= count).withColumn("size", F.count(F.lit(1)).over(of_column))
    # Of a column that has left values out, only the distribution is taken, for which fewer are enough.
    is_collected = F.col("hash").isNull() | (F.col("size") < largest) | (F.col("rank") <= MOST_VALUES)
    squares = F.aggregate("batches", F.lit(0.0), _with_batch).alias("squares")
    try:
        collected = limited_values.where(is_collected).select("*", squares).drop("batches").collect()
    except Exception as error:
        missing = missing_module(str(error))
        if missing is None:
            raise
        raise missing from error
    values: list[dict[str, int]] = [{} for _ in texts]
    figures = [Figures() for _ in numbers]
    counts: list[dict[float, int]] = [{} for _ in numbers]
    sizes = [0] * len(numbers)
    for row in sorted(collected, key=lambda row: (row["position"], row["rank"])):
        position, bounds = row["position"], (row["smallest"], row["largest"])
        if position < len(texts):
            values[position][row["value"]] = row["rows"]
        elif position < len(positions):
            varies = bounds[0] < bounds[1]  # What rounding leaves of equal numbers is no deviation.
            deviation = math.sqrt(row["squares"] / row["rows"]) if varies else 0.0
            figures[position - len(texts)] = Figures(row["rows"], row["mean"], deviation, *bounds)
        else:
            counts[position - len(positions)][float(row["value"])] = row["rows"]
            sizes[position - len(positions)] = row["size"]
    for column, most_values in enumerate(distinct):
        distribution = Distribution.of(counts[column], whole=sizes[column] < most_values)
        figures[column] = figures[column]._replace(distribution=distribution)
    return values, figures


def rounded(value: float | None) -> float:
    """Returns a figure without its last digits, which depend on the order in which Spark adds up; 0 for null."""
    return float(f"{value or 0.0:.8g}")


def _with_batch(squares: Column, batch: Column) -> Column:
    """Returns the sum of squared differences from the mean of a group, with those of one more batch of it."""
    difference = batch["mean"] - F.col("mean")
    return squares + batch["squares"] + batch["rows"] * difference * difference


def _of_batches(batches: Iterator[pa.RecordBatch], texts: int, distinct: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Yields the counts of each batch's texts, the figures of its numbers, and at the end their distinct values.

    These are rows for each value, batch or column, not for each cell.
    """
    distinct_values = [DistinctValues(most) for most in distinct]
    columns = 0
    for batch in batches:
        columns = batch.num_columns
        for position, column in enumerate(batch.columns[:texts]):
            counts = pc.value_counts(column.drop_null())
            yield _batch(position, counts.field("values").cast(pa.string()), counts.field("counts"))
        figures = []
        for position, column in enumerate(batch.columns[texts:], texts):
            values = as_doubles(column)
            values = values[np.isfinite(values)]  # Nulls are NaN here.
            if position - texts < len(distinct_values):
                distinct_values[position - texts].add(values)
            if len(values):
                mean = values.mean()
                squares = np.square(values - mean).sum()
                figures.append((position, None, len(values), mean, squares, values.min(), values.max(), None))
        if figures:
            by_column = zip(zip(*figures, strict=True), _SCHEMA.types, strict=True)
            arrays = [pa.array(values, kind) for values, kind in by_column]
            yield pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
    for position, distribution in enumerate(distinct_values, columns):
        texts = pa.array(distribution.values).cast(pa.string())
        yield _batch(position, texts, pa.array(distribution.counts), pa.array(distribution.hashes))


def _batch(position: int, values: pa.Array, counts: pa.Array, hashes: pa.Array | None = None) -> pa.RecordBatch:
    """Returns a row for each value of a column, with its count and the hash by which values are chosen."""
    rows = len(values)
    hashes = pa.nulls(rows, pa.int64()) if hashes is None else hashes
    figures = [pa.nulls(rows, pa.float64())] * 4
    return pa.RecordBatch.from_arrays(
        [pa.array([position] * rows, pa.int32()), values, counts, *figures, hashes], schema=_SCHEMA
    )
