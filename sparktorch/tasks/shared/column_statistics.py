"""Statistics of columns, computed in one pass: the values of texts, the figures and distributions of numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from sparktorch.data.distribution import MOST_VALUES, DistinctValues, Distribution
from sparktorch.distributed.root_cause import naming_missing_modules
from sparktorch.errors import ColumnError
from sparktorch.tasks.shared.columns import as_doubles

__all__ = ["ColumnStatistics", "Figures", "check_rows", "column_statistics", "round_figure"]

# Executors return two kinds of rows: the figures of a column in one batch, which have no value, and one value of a
# column with its count. Values of numbers also have the hash by which they are chosen if there are too many of them.
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
_NO_COLUMNS: Mapping[str, Column] = {}


class Figures(NamedTuple):
    """Figures of a column of numbers, computed from the rows in which it is finite.

    Attributes:
        rows: The number of these rows.
        mean: The mean.
        deviation: The standard deviation.
        smallest: The smallest number.
        largest: The largest number.
        distribution: The distinct values with their counts; without values where nobody asked for a distribution.
    """

    rows: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    smallest: float = 0.0
    largest: float = 0.0
    distribution: Distribution = Distribution()


class ColumnStatistics(NamedTuple):
    """The statistics of columns, by the names under which `column_statistics` was given the columns.

    Attributes:
        categories: The number of rows of each value, frequent values first.
        labels: The number of rows of each value, frequent values first.
        numbers: The figures with their distribution.
        label_numbers: The figures without a distribution.
        rows: The number of rows for which each condition is true.
    """

    categories: dict[str, dict[str, int]]
    labels: dict[str, dict[str, int]]
    numbers: dict[str, Figures]
    label_numbers: dict[str, Figures]
    rows: dict[str, int]


def column_statistics(
    dataset: DataFrame,
    *,
    categories: Mapping[str, Column],
    most_categories: int,
    labels: Mapping[str, Column] = _NO_COLUMNS,
    most_labels: int = 0,
    numbers: Mapping[str, Column] = _NO_COLUMNS,
    most_values: Mapping[str, int] | None = None,
    label_numbers: Mapping[str, Column] = _NO_COLUMNS,
    conditions: Mapping[str, Column] = _NO_COLUMNS,
) -> ColumnStatistics:
    """Returns statistics that do not depend on how the rows are divided into partitions and batches.

    Rows in which a column is null do not count for that column.

    Args:
        dataset: The rows.
        categories: Columns of strings.
        most_categories: The most values that are returned of a column of categories.
        labels: Columns of strings.
        most_labels: The most values that are returned of a column of labels.
        numbers: Columns of numbers, dates or timestamps.
        most_values: The most values that the distribution of each column of numbers has, by the column's name.
        label_numbers: Columns of numbers that need no distribution.
        conditions: Columns of booleans.

    Raises:
        ClusterError: The executors' Python lacks a module, such as this one.
    """
    # A condition becomes a column that is 1 where the condition is true, and null elsewhere: its figures count rows.
    ones = {name: F.when(condition, F.lit(1.0)) for name, condition in conditions.items()}
    texts = {("category", name): column for name, column in categories.items()}
    texts |= {("label", name): column for name, column in labels.items()}
    measured = {("number", name): column for name, column in numbers.items()}
    measured |= {("label_number", name): column for name, column in label_numbers.items()}
    measured |= {("condition", name): column for name, column in ones.items()}
    # The statistics of a column have its position. Those of the columns of numbers have a second one, behind all
    # columns, for their distribution.
    columns = {**texts, **measured}
    positions = {key: position for position, key in enumerate([*columns, *(("values", name) for name in numbers)])}
    most_distinct = [(most_values or {})[name] for name in numbers]
    numbered = [column.alias(f"c{position}") for position, column in enumerate(columns.values())]
    statistics_of_batches = partial(_statistics_of_batches, texts=len(texts), most_distinct=most_distinct)
    statistics = _merge(dataset.select(*numbered).mapInArrow(statistics_of_batches, _DDL))
    limit = F.when(F.col("position") < len(categories), most_categories)
    limit = limit.when(F.col("position") < len(texts), most_labels)
    limit = limit.when(F.col("position") < len(columns), 1)
    if most_distinct:
        limit = limit.otherwise(F.get(F.array(*map(F.lit, most_distinct)), F.col("position") - len(columns)))
    rows_at: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(_collect(statistics, limit), key=lambda row: (row["position"], row["rank"])):
        rows_at[row["position"]].append(row)

    def counts(kind: str, name: str) -> dict[str, int]:
        return {row["value"]: row["rows"] for row in rows_at[positions[kind, name]]}

    def figures(kind: str, name: str) -> Figures:
        return _figures(rows_at[positions[kind, name]])

    figures_of_numbers = {}
    for name, most in zip(numbers, most_distinct, strict=True):
        distribution = _distribution(rows_at[positions["values", name]], most)
        figures_of_numbers[name] = figures("number", name)._replace(distribution=distribution)
    return ColumnStatistics(
        categories={name: counts("category", name) for name in categories},
        labels={name: counts("label", name) for name in labels},
        numbers=figures_of_numbers,
        label_numbers={name: figures("label_number", name) for name in label_numbers},
        rows={name: figures("condition", name).rows for name in conditions},
    )


def round_figure(value: float | None) -> float:
    """Returns a figure without its last digits, which depend on the order in which Spark adds up; 0 for null."""
    return float(f"{value or 0.0:.8g}")


def check_rows(count: int) -> None:
    """Refuses to learn from no rows."""
    if not count:
        what = "the DataFrame has no rows that train"
        raise ColumnError(what, hint="check the filter or the path it comes from", code="ST-NO-ROWS")


def _merge(statistics: DataFrame) -> DataFrame:
    """Merges the statistics of all batches: a row for each value of a position, and one for its figures."""
    batch_figures = F.when(F.col("value").isNull(), F.struct("rows", "mean", "squares"))
    groups = statistics.groupBy("position", "value").agg(
        F.sum("rows").alias("rows"),
        (F.sum(F.col("rows") * F.col("mean")) / F.sum("rows")).alias("mean"),
        F.collect_list(batch_figures).alias("batches"),
        F.min("smallest").alias("smallest"),
        F.max("largest").alias("largest"),
        F.min("hash").alias("hash"),
    )
    squares = F.aggregate("batches", F.lit(0.0), _add_squares).alias("squares")
    return groups.select("*", squares).drop("batches")


def _add_squares(squares: Column, batch: Column) -> Column:
    """Adds the squared differences of a batch's numbers from the mean of all batches, which is the column `mean`."""
    difference = batch["mean"] - F.col("mean")
    return squares + batch["squares"] + batch["rows"] * difference * difference


def _collect(statistics: DataFrame, limit: Column) -> list[Row]:
    """Collects the first `limit` values of each position: frequent texts, and numbers with the smallest hashes.

    Each row has its `rank` among the values, and the `size`, the number of values that the limit leaves.
    """
    same_position = Window.partitionBy("position")
    rank = F.row_number().over(same_position.orderBy("hash", F.desc("rows"), "value"))
    limited = statistics.withColumn("rank", rank).where(F.col("rank") <= limit)
    limited = limited.withColumn("size", F.count(F.lit(1)).over(same_position))
    # Where the limit leaves out values of a number, only the distribution is needed, for which fewer values do.
    needed = F.col("hash").isNull() | (F.col("size") < limit) | (F.col("rank") <= MOST_VALUES)
    with naming_missing_modules():
        return limited.where(needed).collect()


def _figures(rows: Sequence[Row]) -> Figures:
    """Returns the figures in the only row for them, which is absent if no number is finite."""
    if not rows:
        return Figures()
    (row,) = rows
    smallest = row["smallest"]
    largest = row["largest"]
    # Rounding can leave a deviation of equal numbers.
    deviation = math.sqrt(row["squares"] / row["rows"]) if smallest < largest else 0.0
    return Figures(row["rows"], row["mean"], deviation, smallest, largest)


def _distribution(rows: Sequence[Row], most: int) -> Distribution:
    """Returns the distribution of the values in rows, which are all values if they are fewer than `most`."""
    counts = {float(row["value"]): row["rows"] for row in rows}
    size = rows[0]["size"] if rows else 0
    return Distribution.of(counts, whole=size < most)


def _statistics_of_batches(
    batches: Iterator[pa.RecordBatch], texts: int, most_distinct: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Yields the counts of each batch's texts, the figures of its numbers, and at the end their distinct values.

    The first `texts` columns are texts, and all other columns numbers. The distinct values of the first columns of
    numbers are returned; `most_distinct` has the most distinct values for each of these columns.
    """
    distinct_values = [DistinctValues(most) for most in most_distinct]
    columns = 0
    for batch in batches:
        columns = batch.num_columns
        for position, column in enumerate(batch.columns[:texts]):
            counts = pc.value_counts(column.drop_null())
            yield _values_batch(position, counts.field("values").cast(pa.string()), counts.field("counts"))
        figures = []
        for index, column in enumerate(batch.columns[texts:]):
            numbers = as_doubles(column)
            numbers = numbers[np.isfinite(numbers)]  # `as_doubles` makes NaN of nulls.
            if index < len(distinct_values):
                distinct_values[index].add(numbers)
            if len(numbers):
                mean = numbers.mean()
                figures.append(
                    {
                        "position": texts + index,
                        "rows": len(numbers),
                        "mean": mean,
                        "squares": np.square(numbers - mean).sum(),
                        "smallest": numbers.min(),
                        "largest": numbers.max(),
                    }
                )
        if figures:
            yield pa.RecordBatch.from_pylist(figures, schema=_SCHEMA)
    for position, distinct in enumerate(distinct_values, columns):
        values = pa.array(distinct.values).cast(pa.string())
        yield _values_batch(position, values, pa.array(distinct.counts), pa.array(distinct.hashes))


def _values_batch(position: int, values: pa.Array, counts: pa.Array, hashes: pa.Array | None = None) -> pa.RecordBatch:
    """Returns a row for each value of a column, with its count and, for numbers, its hash."""
    rows = len(values)
    no_figures = [pa.nulls(rows, pa.float64())] * 4
    if hashes is None:
        hashes = pa.nulls(rows, pa.int64())
    return pa.RecordBatch.from_arrays(
        [pa.array([position] * rows, pa.int32()), values, counts, *no_figures, hashes], schema=_SCHEMA
    )
