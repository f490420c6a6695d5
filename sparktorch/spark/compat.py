"""What the versions of pyspark do differently, from 3.5 on: each difference in one function, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import __version__, inheritable_thread_target
from pyspark.ml.functions import array_to_vector
from pyspark.resource import ResourceProfile
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import PandasUDFType, pandas_udf
from pyspark.sql.pandas.types import from_arrow_schema

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.errors import ConfigError
from sparktorch.spark.session import is_connect

__all__ = [
    *("Collect", "add_pyfile", "arrow_udf", "for_pandas", "frame_of", "from_pandas", "gives_profiles", "inheriting"),
    *("ml_session", "on_barrier", "repartition_by_id", "split_by_hash", "to_vector", "uses_pandas"),
]

Collect = Callable[[], list[Row]]
Batches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_BEFORE_4_0 = __version__.startswith("3.")

# Types of the fields of the structs that hold ML vectors and images.
_FIELDS: dict[str, pa.DataType] = {
    "type": pa.int8(),
    "size": pa.int32(),
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float64()),
    "height": pa.int32(),
    "width": pa.int32(),
    "nChannels": pa.int32(),
    "data": pa.binary(),
}


def gives_profiles() -> bool:
    """Whether the tasks of a DataFrame can have resources of their own, since pyspark 4.0."""
    return not _BEFORE_4_0


def on_barrier(data: DataFrame, function: Batches, schema: str, profile: ResourceProfile | None) -> Collect:
    """Returns what runs a function once per partition, in tasks that start together, and collects what they yield.

    Args:
        data: As many partitions as there are to be tasks.
        function: From the record batches of a partition to those of its result.
        schema: Of the result.
        profile: The resources of a task, `None` for the session's own.
    """
    resources: dict[str, Any] = {} if profile is None else {"profile": profile}
    return data.mapInArrow(function, schema, barrier=True, **resources).collect


def inheriting(spark: SparkSession, target: Callable[[], None]) -> Callable[[], None]:
    """Returns the target of a thread that has the caller's job group, pool and tags."""
    wrap: Any = inheritable_thread_target
    found: Callable[[], None] = wrap(target) if _BEFORE_4_0 else wrap(spark)(target)
    return found


def add_pyfile(spark: SparkSession, path: str) -> None:
    """Puts a file on the Python path of the executors."""
    if is_connect(spark) or not _BEFORE_4_0:
        spark.addArtifacts(path, pyfile=True)
    else:
        spark.sparkContext.addPyFile(path)


def ml_session(spark: SparkSession) -> Any:
    """Returns what pyspark's helpers for the metadata of ML instances take for the session."""
    return spark.sparkContext if _BEFORE_4_0 and not is_connect(spark) else spark


def to_vector(column: Column) -> Column:
    """Returns an array column as ML vectors.

    Raises:
        ConfigError: This session makes none.
    """
    if _BEFORE_4_0 and type(column).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            f"on Spark Connect, pyspark {__version__} makes no ML vectors",
            hint="set the output columns of vectors to '', or let registerUDF make an SQL function, which returns "
            "arrays; pyspark 4.0 and newer make them",
        )
    return array_to_vector(column)


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Returns a table as a DataFrame to be written: a file, or where tasks carry the rows, one for each."""
    if not _BEFORE_4_0:
        return spark.createDataFrame(table).coalesce(1)
    rows = [tuple(row.values()) for row in table.to_pylist()]
    schema = from_arrow_schema(table.schema)
    if is_connect(spark):
        return spark.createDataFrame(rows, schema)
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), schema)


def repartition_by_id(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Sends every row to the partition with the number that a column of int says."""
    by_id: Any = getattr(data, "repartitionById", None) if hasattr(DataFrame, "repartitionById") else None
    return split_by_hash(data, parts, part) if by_id is None else by_id(parts, part)  # pyspark >= 4.1


def split_by_hash(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Sends rows to partition `part` through Spark's hash partitioning.

    Spark puts a row into partition `pmod(hash(x), parts)`: one `x` is found for each partition
    that hashes to it.
    """
    candidates = data.sparkSession.range(parts * 64).select(F.col("id").cast("int").alias("x"))
    found = candidates.groupBy(F.pmod(F.hash("x"), F.lit(parts)).alias("part")).agg(F.min("x").alias("x")).collect()
    stand_in = {row["part"]: row["x"] for row in found}
    lookup = F.array(*[F.lit(stand_in[index]) for index in range(parts)])
    return data.repartition(parts, F.get(lookup, part))


def uses_pandas() -> bool:
    """Whether scoring goes through pandas, in the executors too: pyspark 4.1 has the first UDFs of Arrow arrays."""
    return not hasattr(F, "arrow_udf")


def arrow_udf(
    score: Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]], kind: str, inputs: Sequence[TensorSpec]
) -> Any:
    """Returns a UDF of a function from the batches of all columns to those of the result.

    Args:
        score: The function.
        kind: The type of its result, as SQL says it.
        inputs: What the columns are; a packed input may come as its columns.
    """

    # Spark reads the kind of UDF from these annotations; with one input it passes bare arrays.
    def arrays(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return score(batch if isinstance(batch, tuple) else (batch,) for batch in batches)

    def frames(batches: Iterator[Any]) -> Iterator[Any]:
        for result in score(from_pandas(batch, inputs) for batch in batches):
            table = pa.RecordBatch.from_struct_array(result) if pa.types.is_struct(result.type) else result
            yield table.to_pandas()

    native: Any = getattr(F, "arrow_udf", None)
    if native is not None:
        return native(arrays, kind)
    with warnings.catch_warnings():  # annotations would need pandas at import time in every executor
        warnings.filterwarnings("ignore", message="In Python 3.6\\+ and Spark 3.0\\+")
        return pandas_udf(frames, kind, PandasUDFType.SCALAR_ITER)


def for_pandas(column: Column, kind: T.DataType) -> Column:
    """Returns a column as pandas keeps it whole: it has timestamps in local time, as nanoseconds, within 600 years.

    `arrow_udf` makes timestamps of the microseconds again.
    """
    if not uses_pandas() or "timestamp" not in kind.simpleString().replace("timestamp_ntz", ""):
        return column
    if isinstance(kind, T.ArrayType):
        return F.transform(column, lambda inner: for_pandas(inner, kind.elementType))
    if isinstance(kind, T.StructType):
        fields = [for_pandas(column[field.name], field.dataType).alias(field.name) for field in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    return F.unix_micros(column)


def from_pandas(batch: Any, inputs: Sequence[TensorSpec]) -> tuple[pa.Array, ...]:
    """Returns the columns of a batch as the Arrow arrays that pyspark made its series and frames of."""
    columns = batch if isinstance(batch, tuple) else (batch,)
    if len(columns) == len(inputs):
        kinds = [_kind(spec) for spec in inputs]
    else:
        kinds = [kind for spec in inputs for kind in [None if spec.sources else _kind(spec)] * (len(spec.sources) or 1)]
    if len(columns) != len(kinds):  # which the scorer refuses
        kinds = [None] * len(columns)
    return tuple(_array(column, kind) for column, kind in zip(columns, kinds, strict=True))


def _kind(spec: TensorSpec) -> pa.DataType | None:
    """Returns the type of an input, as far as it is known: SQL functions get columns of other ones, too."""
    if spec.kind == "any":
        return arrow_type(spec.sql)
    if spec.kind != "number":
        return None
    kind = pa.from_numpy_dtype(spec.dtype)
    for _ in range(1 if spec.sources else len(spec.levels) + spec.ragged):
        kind = pa.list_(kind)
    return kind


def _array(column: Any, kind: pa.DataType | None) -> pa.Array:
    """Converts a series; structs come as a frame of their fields, a null row as nulls in all of them."""
    if column.ndim == 1:
        for wanted in () if kind is None else (kind, _in_microseconds(kind)):
            with suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                return pa.Array.from_pandas(column, type=wanted).cast(kind)
        return pa.Array.from_pandas(column)
    names = list(column.columns)
    known = _FIELDS  # it may be an ML vector where the model was fitted on arrays
    if kind is not None and pa.types.is_struct(kind):
        known = {field.name: field.type for field in kind}
    fields = [_array(column[name], known.get(name)) for name in names]
    return pa.StructArray.from_arrays(fields, names=names, mask=reduce(pc.and_, (field.is_null() for field in fields)))


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column that `for_pandas` made."""
    if pa.types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _in_microseconds(field.type)) for field in kind])
    return pa.int64() if pa.types.is_timestamp(kind) else kind
