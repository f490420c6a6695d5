"""The rows before the job, so that partition r holds those of rank r."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.data.columns import KEY, VALIDATION
from sparktorch.errors import ConfigError

__all__ = ["keep", "split", "split_into_folds"]

_COPY = "copy"


def split(data: DataFrame, parts: int, *, by_place: bool = False, in_order: bool = False) -> DataFrame:
    """Splits the rows so that partition r holds the r-th part of the key space.

    Args:
        data: Wire columns, among them the key.
        parts: Number of partitions, the world size.
        by_place: Mixes each row's place in the source into its key first, for data with so many
            equal rows that their contents cannot tell them apart. The split then depends on the
            partitioning of the source.
        in_order: Sorts the rows of each partition by key, those held out for validation last.
    """
    if by_place:
        data = data.withColumn(KEY, F.xxhash64(F.col(KEY), F.monotonically_increasing_id()))
    placed = _place(data, parts, _part(parts))
    return _in_order(placed) if in_order else placed


def split_into_folds(data: DataFrame, parts: int, *, in_order: bool = False) -> DataFrame:
    """Sends every row to every partition, marked for validation in the one that `split` would send it to.

    Args:
        data: Wire columns, among them the key.
        parts: Number of partitions, the world size.
        in_order: Sorts as `split` does.
    """
    part = _part(parts)
    copies = data.withColumn(_COPY, F.explode(F.sequence(F.lit(0), F.lit(parts - 1)))).withColumn(
        VALIDATION, part == F.col(_COPY)
    )
    placed = _place(copies, parts, F.col(_COPY)).drop(_COPY)
    return _in_order(placed) if in_order else placed


def keep(data: DataFrame, parts: int) -> DataFrame:
    """Returns the rows in the partitions they are in.

    Counts the partitions in a job that reads no rows, but runs the shuffles before them.

    Args:
        data: Wire columns.
        parts: Number of partitions there must be, the world size.

    Raises:
        ConfigError: There are more or fewer.
    """
    found = len(data.mapInArrow(_one_row, "found int").collect())
    if found != parts:
        raise ConfigError(
            f"split='keep' makes a worker of each partition; the DataFrame has {found}, and numWorkers is {parts}",
            hint=f"set numWorkers={found}, or leave split at 'key', which balances any partitioning"
            if found
            else "leave split at 'key'",
            param="split",
        )
    return data


def _one_row(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"found": pa.array([1], pa.int32())})


def _part(parts: int) -> Column:
    """Returns the partition that a row's key belongs to; see `data.plan.rank_of_key`."""
    return F.shiftright(F.shiftrightunsigned(F.col(KEY), 33) * F.lit(parts), 31).cast("int")


def _place(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Sends every row to the partition with that number."""
    if hasattr(DataFrame, "repartitionById"):  # pyspark >= 4.1
        return data.repartitionById(parts, part)
    return split_by_hash(data, parts, part)


def split_by_hash(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Sends rows to partition `part` through Spark's hash partitioning, for pyspark 4.0.

    Spark puts a row into partition `pmod(hash(x), parts)`: one `x` is found for each partition
    that hashes to it.
    """
    candidates = data.sparkSession.range(parts * 64).select(F.col("id").cast("int").alias("x"))
    found = candidates.groupBy(F.pmod(F.hash("x"), F.lit(parts)).alias("part")).agg(F.min("x").alias("x")).collect()
    stand_in = {row["part"]: row["x"] for row in found}
    lookup = F.array(*[F.lit(stand_in[index]) for index in range(parts)])
    return data.repartition(parts, F.get(lookup, part))


def _in_order(data: DataFrame) -> DataFrame:
    """Sorts each partition by key, read as unsigned; Spark spills to disk what does not fit into its memory."""
    order = [F.col(KEY).bitwiseXOR(F.lit(-(2**63)))]
    if VALIDATION in data.columns:
        order.insert(0, F.coalesce(F.col(VALIDATION), F.lit(False)))
    return data.sortWithinPartitions(*order)
