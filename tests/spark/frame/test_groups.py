"""Rows of a group reach one rank, and in their order, whatever type the columns have."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparktorch.data.columns import GROUP, KEY, ORDER, Groups, InputOptions, Window
from sparktorch.errors import ColumnError
from sparktorch.spark.frame.partition import split
from sparktorch.spark.frame.prepare import Frame, prepare

MICROS = 1_000_000


def framed(data: Any, groups: Groups, **options: Any) -> Frame:
    return prepare(data, "generic", inputs=["x"], label=None, groups=groups, options=InputOptions(**options))


@pytest.mark.parametrize(
    ("kind", "first", "second", "expected"),
    [
        ("tinyint", -3, 4, [-3, 4]),
        ("bigint", -(2**62), 2**62, [-(2**62), 2**62]),
        ("date", date(1969, 12, 31), date(1970, 1, 3), [-1, 2]),
        ("timestamp_ntz", datetime(1969, 12, 31, 23, 59, 59, 250_000), datetime(1970, 1, 1, 1, 2, 3, 4), None),
    ],
)
def test_places_are_whole_numbers_days_or_microseconds(
    spark: SparkSession, kind: str, first: Any, second: Any, expected: list[int] | None
) -> None:
    data = spark.createDataFrame([("a", first, 1.0), ("a", second, 2.0)], f"g string, at {kind}, x float")
    rows = framed(data, Groups(group="g", order="at")).data.orderBy("x0").collect()
    assert [row[ORDER] for row in rows] == (expected or [-750_000, 3_723 * MICROS + 4])


def test_instants_are_microseconds_in_any_time_zone(spark: SparkSession) -> None:
    data = spark.sql("select 'a' as g, timestamp_micros(id * 1500000) as at, cast(id as float) as x from range(3)")
    found = framed(data, Groups(group="g", order="at")).data.orderBy("x0").collect()
    assert [row[ORDER] for row in found] == [0, 1_500_000, 3_000_000]


@pytest.mark.parametrize("ordered", [True, False])
def test_groups_are_whole_and_sorted_where_they_are_read_from_disk(spark: SparkSession, ordered: bool) -> None:
    data = spark.range(500).select((F.col("id") % 37).alias("g"), (-F.col("id")).alias("at"), F.rand(1).alias("x"))
    groups = Groups(group="g", order="at" if ordered else None)
    parts = split(framed(data.repartition(5), groups).data, 3, in_order=True)
    found = parts.withColumn("part", F.spark_partition_id()).collect()
    place = ORDER if ordered else KEY
    order = [(row["part"], row[GROUP] % 2**64, row[place]) for row in found]
    assert order == sorted(order)
    assert len({(row["part"], row[GROUP]) for row in found}) == len({row[GROUP] for row in found}) == 37


def test_without_a_column_all_rows_are_one_group(spark: SparkSession) -> None:
    data = spark.range(50).select("id", F.col("id").cast("float").alias("x"))
    parts = split(framed(data, Groups(group=None, order="id")).data, 3)
    assert {row[0] for row in parts.select(F.spark_partition_id()).collect()} == {0}


def test_keys_know_rows_by_their_contents_their_group_and_their_place(spark: SparkSession) -> None:
    rows = [("a", 1, 1.0), ("b", 1, 1.0), ("a", 2, 1.0), ("a", 1, 2.0), ("a", 1, 1.0)]
    data = spark.createDataFrame(rows, "g string, at int, x float")
    keys = [row[KEY] for row in framed(data, Groups(group="g", order="at")).data.collect()]
    assert len(set(keys)) == 4
    assert keys[0] == keys[4]


def test_columns_that_cannot_order_rows_or_be_in_windows_are_refused(spark: SparkSession) -> None:
    data = spark.createDataFrame([("a", "1", [1.0])], "g string, at string, x array<float>")
    with pytest.raises(ColumnError, match="column 'at' is string, and rows are ordered by"):
        framed(data, Groups(group="g", order="at"))
    with pytest.raises(ColumnError, match=r"column 'x' is array<float>, and groups are told apart by a value"):
        framed(data, Groups(group="x"))
    window = Groups(group="g", window=Window(context=1, horizon=1))
    with pytest.raises(ColumnError, match="column 'x' is padded, and the rows of a window become one tensor"):
        framed(data, window, layouts={"x": "padded"})
