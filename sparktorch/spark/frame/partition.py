"""Repartitions the rows before the job, so that partition r holds the rows of rank r."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.data.columns import GROUP, KEY, ORDER, VALIDATION
from sparktorch.errors import ConfigError
from sparktorch.spark.compat import repartition_by_id
from sparktorch.spark.session import is_connect

__all__ = ["keep", "moved_as_they_are", "split", "split_into_folds"]

_COPY = "copy"
_NUMBER = "number"


def split(data: DataFrame, parts: int, *, by_position: bool = False, in_order: bool = False) -> DataFrame:
    """Repartitions encoded rows with their keys so that partition r holds the r-th part of the key space.

    Rows in groups are split by their group, whose hash is the key. `by_position` mixes each row's position in the
    source into its key first, for data with many equal rows, which have equal keys. The split then depends on the
    partitioning of the source. `in_order` sorts the rows of each partition by key, validation rows last; rows in
    groups by group, and by their order in it.
    """
    if by_position:
        data = data.withColumn(KEY, F.xxhash64(F.col(KEY), F.monotonically_increasing_id()))
    parted = repartition_by_id(data, parts, _part(data, parts))
    return _sort(parted) if in_order else parted


def split_into_folds(data: DataFrame, parts: int, *, in_order: bool = False) -> DataFrame:
    """Copies every row to every partition; its copy in the partition that `split` would choose is for validation."""
    copies = data.withColumn(_COPY, F.explode(F.sequence(F.lit(0), F.lit(parts - 1))))
    copies = copies.withColumn(VALIDATION, _part(data, parts) == F.col(_COPY))
    parted = repartition_by_id(copies, parts, F.col(_COPY)).drop(_COPY)
    return _sort(parted) if in_order else parted


def keep(data: DataFrame, parts: int) -> DataFrame:
    """Returns the rows in their present partitions, after a check that there are `parts` partitions.

    Counting partitions runs the shuffles that produce them, but reads no rows.
    """
    if is_connect(data.sparkSession):
        # Only on Connect: a Python worker that leaves rows unread ends, and the next one imports torch again.
        partitions = len(data.mapInArrow(_one_row, "number int").collect())
    else:
        partitions = data.rdd.getNumPartitions()
    if partitions != parts:
        hint = "leave split at 'key'"
        if partitions:
            hint = f"set numWorkers={partitions}, or {hint}, which balances any partitioning"
        raise ConfigError(
            f"split='keep' makes a worker of each partition; the DataFrame has {partitions}, and numWorkers is {parts}",
            hint=hint,
            param="split",
            code="ST-PARTITIONS",
        )
    return data


def moved_as_they_are(data: DataFrame, parts: int) -> DataFrame:
    """Shuffles the rows of each of `parts` partitions, in their order, to the partition of the same number."""
    return repartition_by_id(data.withColumn(_NUMBER, F.spark_partition_id()), parts, F.col(_NUMBER)).drop(_NUMBER)


def _one_row(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"number": pa.array([1], pa.int32())})


def _part(data: DataFrame, parts: int) -> Column:
    """Returns the expression for a row's partition; see `sparktorch.data.sampling.plan.rank_of_key`."""
    # A null group goes to any rank, which refuses it.
    key = F.coalesce(F.col(GROUP), F.lit(0)) if GROUP in data.columns else F.col(KEY)
    return F.shiftright(F.shiftrightunsigned(key, 33) * F.lit(parts), 31).cast("int")


def _sort(data: DataFrame) -> DataFrame:
    """Sorts each partition, as `split` says; Spark spills to disk if needed."""
    if GROUP in data.columns:
        order_in_group = F.col(ORDER if ORDER in data.columns else KEY)
        return data.sortWithinPartitions(_as_unsigned(GROUP), order_in_group)
    if VALIDATION in data.columns:
        is_for_validation = F.coalesce(F.col(VALIDATION), F.lit(False))
        return data.sortWithinPartitions(is_for_validation, _as_unsigned(KEY))
    return data.sortWithinPartitions(_as_unsigned(KEY))


def _as_unsigned(name: str) -> Column:
    """Returns an expression that sorts a column of int64 as if its values were unsigned."""
    return F.col(name).bitwiseXOR(F.lit(-(2**63)))
