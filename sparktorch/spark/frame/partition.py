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

    Rows of groups are split and sorted by their group, whose hash is the key, and by their order in it.

    `by_position` mixes each row's position in the source into its key first, for data with many equal rows, which have
    equal keys. The split then depends on the partitioning of the source. `in_order` sorts the rows of each partition by
    key, validation rows last.
    """
    if by_position:
        data = data.withColumn(KEY, F.xxhash64(F.col(KEY), F.monotonically_increasing_id()))
    parted = repartition_by_id(data, parts, _part(data, parts))
    return _in_order(parted) if in_order else parted


def split_into_folds(data: DataFrame, parts: int, *, in_order: bool = False) -> DataFrame:
    """Copies every row to every partition, marked for validation in the one that `split` would put it into."""
    part = _part(data, parts)
    copies = data.withColumn(_COPY, F.explode(F.sequence(F.lit(0), F.lit(parts - 1)))).withColumn(
        VALIDATION, part == F.col(_COPY)
    )
    parted = repartition_by_id(copies, parts, F.col(_COPY)).drop(_COPY)
    return _in_order(parted) if in_order else parted


def keep(data: DataFrame, parts: int) -> DataFrame:
    """Returns the rows in their present partitions, after a check that there are `parts` of them.

    Counting partitions runs the shuffles that produce them, but reads no rows.
    """
    if is_connect(data.sparkSession):
        # Only on Connect: a Python worker that leaves rows unread ends, and the next one imports torch again.
        partitions = len(data.mapInArrow(_one_row, "number int").collect())
    else:
        partitions = data.rdd.getNumPartitions()
    if partitions != parts:
        raise ConfigError(
            f"split='keep' makes a worker of each partition; the DataFrame has {partitions}, and numWorkers is {parts}",
            hint=f"set numWorkers={partitions}, or leave split at 'key', which balances any partitioning"
            if partitions
            else "leave split at 'key'",
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
    """Returns the partition of a row by its key; see `sparktorch.data.sampling.plan.rank_of_key`."""
    # A null group goes to any rank, which refuses it.
    key = F.coalesce(F.col(GROUP), F.lit(0)) if GROUP in data.columns else F.col(KEY)
    return F.shiftright(F.shiftrightunsigned(key, 33) * F.lit(parts), 31).cast("int")


def _in_order(data: DataFrame) -> DataFrame:
    """Sorts each partition by key, read as unsigned; Spark spills to disk if needed."""
    grouped = GROUP in data.columns
    order = [F.col(GROUP if grouped else KEY).bitwiseXOR(F.lit(-(2**63)))]
    if grouped:
        order.append(F.col(ORDER if ORDER in data.columns else KEY))
    elif VALIDATION in data.columns:
        order.insert(0, F.coalesce(F.col(VALIDATION), F.lit(False)))
    return data.sortWithinPartitions(*order)
