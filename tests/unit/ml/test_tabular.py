"""What the estimators of tables and rankings decide by Params, types and figures, before and after rows are seen."""

from __future__ import annotations

from pyspark.sql import types as T

from sparktorch.data.distribution import Distribution
from sparktorch.ml.tasks.column_statistics import Figures
from sparktorch.ml.tasks.tabular import _coded
from sparktorch.spark.column_names import ColumnNames


def names(**kinds: T.DataType) -> ColumnNames:
    return ColumnNames(T.StructType([T.StructField(name, kind) for name, kind in kinds.items()]), lambda: False)


def figures(*values: int) -> Figures:
    counts = dict.fromkeys(map(float, values), 100)
    smallest, largest = float(min(values)), float(max(values))
    return Figures(100 * len(values), 0.0, 1.0, smallest, largest, Distribution.of(counts))


def test_integers_beyond_2_to_the_53_are_numbers_alone_and_a_hash_column_does_not_fail() -> None:
    columns = {
        "hash": figures(-(1 << 63), 5, (1 << 63) - 1),
        "snowflake": figures(1 << 60, (1 << 60) + 256, (1 << 60) + 512),
        "wide": figures(-(10**15), 0, 10**15),
        "month": figures(1, 12),
    }
    kinds = names(**dict.fromkeys(columns, T.LongType()))
    assert _coded(columns, kinds, 500, 30) == {"wide": [-(10**15), 0, 10**15], "month": list(range(1, 13))}
