"""Rows that equal others: a further column tells them apart, so that a hash can divide them."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.distributed.root_cause import naming_missing_modules

__all__ = ["NUMBER", "tell_apart"]

NUMBER = "_number_among_equal_rows"
_FIRST_ROWS = 2_000  # Where so few rows hold no equals, the groups of equal rows are too small to matter.
_MOST_EQUAL = 0.05


def tell_apart(rows: DataFrame, columns: Sequence[Column], others: Sequence[Column]) -> tuple[DataFrame, list[Column]]:
    """Returns rows, and the columns by which a hash can divide them.

    A hash of `columns` alone would choose all rows that are equal there, or none. So if more than a twentieth of the
    first rows equal others, the rows get a column `NUMBER`: the number of a row among its equals, from 1 on. The
    number is the same in any partitioning: only rows that are equal in `others`, too, may change places.
    """
    # Spark takes the first rows from the first partitions, and runs no job over all partitions, as for a count.
    with naming_missing_modules():
        first = rows.select(F.xxhash64(*columns)).take(_FIRST_ROWS)
    if len(first) - len(set(first)) <= _MOST_EQUAL * len(first):
        return rows, [*columns]
    equals = Window.partitionBy(F.xxhash64(*columns)).orderBy(F.xxhash64(*others))
    return rows.select("*", F.row_number().over(equals).alias(NUMBER)), [*columns, F.col(NUMBER)]
