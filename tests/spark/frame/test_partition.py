"""Placing rows: partition r holds rank r's keys, on every version of pyspark."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch.data.columns import InputOptions
from sparktorch.data.sampling.plan import rank_of_key
from sparktorch.spark.compat import split_by_hash
from sparktorch.spark.frame.partition import split
from sparktorch.spark.frame.prepare import prepare


@pytest.mark.parametrize(("parts", "by_hash"), [(1, False), (3, False), (7, True)])
def test_rows_go_where_their_key_says(
    frame: DataFrame, parts: int, by_hash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(frame, "classification", inputs=["features"], label="label").data
    if by_hash:  # pyspark 4.0 has no repartitionById
        monkeypatch.delattr(DataFrame, "repartitionById", raising=False)
        monkeypatch.delattr(type(frame), "repartitionById", raising=False)
    placed = split(data, parts).withColumn("part", F.spark_partition_id()).toPandas()
    expected = rank_of_key(placed["k"].to_numpy(), parts)
    assert np.array_equal(placed["part"].to_numpy(), expected)
    assert len(placed) == 1001


def test_stand_ins_are_found_for_many_partitions(spark: SparkSession) -> None:
    data = spark.range(5000).select(F.xxhash64("id").alias("k"))
    part = F.pmod(F.col("k"), F.lit(100)).cast("int")
    placed = split_by_hash(data.withColumn("p", part), 100, part).withColumn("at", F.spark_partition_id())
    assert placed.where("p != at").count() == 0


def test_without_a_key_of_its_contents_a_row_has_one_of_what_ranks_make_no_digest_of(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [(1.0, [1, 2], 3.0), (2.0, [1, 2], 4.0), (1.0, [1], 3.0)], "a double, ids array<int>, y double"
    )
    options = InputOptions(layouts={"ids": "padded"})

    def keys(*inputs: str, **more: str) -> list[int] | None:
        asked = options if "ids" in inputs else InputOptions()
        data = prepare(rows, "regression", inputs=inputs, label="y", options=asked, keyed=False, **more).data
        return [row["k"] for row in data.collect()] if "k" in data.columns else None

    assert keys("a") is None
    first, second, third = keys("a", "ids") or []
    assert first == second != third
    assert len(set(keys("a", key="y") or [])) == 2
