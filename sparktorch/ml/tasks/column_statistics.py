"""What is learned of a table's columns: the categories of texts, and the figures of numbers, in one pass."""

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

from sparktorch.distributed.root_cause import missing_module

__all__ = ["Figures", "categories_and_figures"]

_SCHEMA = pa.schema(
    [
        ("place", pa.int32()),
        ("value", pa.string()),
        ("rows", pa.int64()),
        *((name, pa.float64()) for name in ("mean", "squares", "smallest", "largest")),
    ]
)
_DDL = "place int, value string, rows bigint, mean double, squares double, smallest double, largest double"


class Figures(NamedTuple):
    """Figures of a column of numbers, of the rows where it is finite."""

    rows: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    smallest: float = 0.0
    largest: float = 0.0


def categories_and_figures(
    rows: DataFrame,
    texts: Sequence[Column],
    numbers: Sequence[Column],
    *,
    limited: int,
    least: int,
    most: int,
    labels: int,
) -> tuple[list[list[str]], list[Figures]]:
    """Returns the values of each column of strings, frequent ones first, and the figures of each column of doubles.

    Of the first `limited` texts, it returns at most `most` values, of `least` rows or more; of the others, which are
    labels, at most `labels`.

    Raises:
        ClusterError: The executors' Python lacks a module, such as this one.
    """
    places = range(len(texts) + len(numbers))
    named = [column.alias(f"c{place}") for place, column in zip(places, (*texts, *numbers), strict=True)]
    summed = rows.select(*named).mapInArrow(partial(_of_batches, texts=len(texts)), _DDL)
    of_batches = F.when(F.col("place") >= len(texts), F.struct("rows", "mean", "squares"))
    groups = summed.groupBy("place", "value").agg(
        F.sum("rows").alias("rows"),
        (F.sum(F.col("rows") * F.col("mean")) / F.sum("rows")).alias("mean"),
        F.collect_list(of_batches).alias("batches"),
        F.min("smallest").alias("smallest"),
        F.max("largest").alias("largest"),
    )
    order = Window.partitionBy("place").orderBy(F.desc("rows"), "value")
    ranked = groups.withColumn("rank", F.row_number().over(order))
    often = (F.col("place") >= limited) | (F.col("rows") >= least)
    kept = often & (F.col("rank") <= F.when(F.col("place") < limited, most).otherwise(labels))
    squares = F.aggregate("batches", F.lit(0.0), _with_batch).alias("squares")
    try:
        found = ranked.where(kept).select("*", squares).drop("batches").collect()
    except Exception as error:
        missing = missing_module(str(error))
        if missing is None:
            raise
        raise missing from error
    values: list[list[str]] = [[] for _ in texts]
    figures = [Figures() for _ in numbers]
    for row in sorted(found, key=lambda row: (row["place"], row["rank"])):
        place, rest = row["place"], (row["smallest"], row["largest"])
        if place < len(texts):
            values[place].append(row["value"])
        else:
            varies = rest[0] < rest[1]  # what rounding leaves of equal numbers is no deviation
            deviation = math.sqrt(row["squares"] / row["rows"]) if varies else 0.0
            figures[place - len(texts)] = Figures(row["rows"], row["mean"], deviation, *rest)
    return values, figures


def _with_batch(squares: Column, batch: Column) -> Column:
    """Returns the sum of squared differences from the mean of a group, with those of one more batch of it."""
    apart = batch["mean"] - F.col("mean")
    return squares + batch["squares"] + batch["rows"] * apart * apart


def _of_batches(batches: Iterator[pa.RecordBatch], texts: int) -> Iterator[pa.RecordBatch]:
    """Yields the counts of each batch's texts, and the figures of its numbers: a row for each, not for each cell."""
    for batch in batches:
        for place, column in enumerate(batch.columns[:texts]):
            counts = pc.value_counts(column.drop_null())
            values = counts.field("values").cast(pa.string())
            empty = pa.nulls(len(values), pa.float64())
            yield _batch(pa.array([place] * len(values), pa.int32()), values, counts.field("counts"), *[empty] * 4)
        found = []
        for place, column in enumerate(batch.columns[texts:], texts):
            values = column.to_numpy(zero_copy_only=False)
            values = values[np.isfinite(values)]  # neither null nor NaN
            if len(values):
                mean = values.mean()
                squares = np.square(values - mean).sum()
                found.append((place, None, len(values), mean, squares, values.min(), values.max()))
        if found:
            columns = zip(*found, strict=True)
            yield _batch(*(pa.array(column, kind) for column, kind in zip(columns, _SCHEMA.types, strict=True)))


def _batch(*columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), schema=_SCHEMA)
