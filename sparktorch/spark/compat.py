"""Hides differences between versions of pyspark, from 3.5 on: each one in one function here, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timezone
from functools import reduce
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import RDD, __version__, inheritable_thread_target
from pyspark.resource import ResourceProfile
from pyspark.serializers import NoOpSerializer
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.functions import PandasUDFType, pandas_udf
from pyspark.sql.pandas.types import from_arrow_schema

from sparktorch.base.quiet import quiet
from sparktorch.data.columns import TensorSpec, positions_of
from sparktorch.data.convert.values import has_instants, has_times, values_as
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.spark.session import is_connect
from sparktorch.spark.zone import zone_in_udf

__all__ = [
    "Collect",
    "add_pyfile",
    "arrow_batches",
    "arrow_udf",
    "as_microseconds",
    "for_pandas",
    "frame_of",
    "frame_of_batches",
    "frame_of_rows",
    "from_pandas",
    "gives_profiles",
    "has_timestamps",
    "inheriting",
    "ml_session",
    "on_barrier",
    "repartition_by_id",
    "split_by_hash",
    "table_of",
    "to_vector",
    "unlogged_errors",
    "uses_pandas",
]

# Runs a job, and returns its rows.
Collect = Callable[[], list[Row]]
R = TypeVar("R")
Batches = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_BEFORE_4_0 = __version__.startswith("3.")

# The types of fields, by name, in the structs of ML vectors and images.
_FIELD_TYPES: dict[str, pa.DataType] = {
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
    """Whether a DataFrame's tasks can have resources of their own, as from pyspark 4.0 on."""
    return not _BEFORE_4_0


def on_barrier(data: DataFrame | RDD[Any], function: Batches, schema: str, profile: ResourceProfile | None) -> Collect:
    """Returns a callable that runs a function in one barrier task per partition, and collects the resulting rows.

    `function` maps the record batches or elements of a partition to record batches of `schema`, a DDL string. `profile`
    is the tasks' resource profile, `None` for the session's default.
    """
    if isinstance(data, RDD):

        def rows(elements: Any) -> Iterator[tuple[Any, ...]]:
            for batch in function(elements):
                yield from zip(*batch.to_pydict().values(), strict=True)

        def unchanged(elements: Iterable[Any]) -> Iterable[Any]:
            return elements

        source = data
        if profile is not None:
            # `withResources` changes an RDD itself, so a copy of the user's RDD gets the profile.
            source = data.mapPartitions(unchanged, preservesPartitioning=True).withResources(profile)
        return cast(Collect, source.barrier().mapPartitions(rows).collect)
    resources: dict[str, Any] = {} if profile is None else {"profile": profile}
    return data.mapInArrow(function, schema, barrier=True, **resources).collect


def inheriting(spark: SparkSession, target: Callable[[], R]) -> Callable[[], R]:
    """Returns a thread target that inherits the caller's job group, pool and tags."""
    wrap: Any = inheritable_thread_target
    inheriting_target: Callable[[], R] = wrap(target) if _BEFORE_4_0 else wrap(spark)(target)
    return inheriting_target


def add_pyfile(spark: SparkSession, path: str) -> None:
    """Puts a file on the Python path of the executors."""
    if is_connect(spark) or not _BEFORE_4_0:
        spark.addArtifacts(path, pyfile=True)
    else:
        spark.sparkContext.addPyFile(path)


def ml_session(spark: SparkSession) -> Any:
    """Returns what pyspark's helpers for ML metadata expect in this version: the session or the SparkContext."""
    return spark.sparkContext if _BEFORE_4_0 and not is_connect(spark) else spark


def to_vector(column: Column) -> Column:
    """Returns an array column as ML vectors; on Spark Connect before 4.0, which cannot make vectors, it raises."""
    if _BEFORE_4_0 and type(column).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            f"on Spark Connect, pyspark {__version__} makes no ML vectors",
            hint="set the output columns of vectors to '', or let registerUDF make an SQL function, which returns "
            "arrays; pyspark 4.0 and newer make them",
        )
    # A Python worker, which does not need the function, would take a third of a second to import it.
    from pyspark.ml.functions import array_to_vector

    return array_to_vector(column)


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Returns a table as a DataFrame that is written to one file; on classic Spark before 4.0, to one file per row.

    Before 4.0, tasks carry the rows, so each row gets a task of its own.
    """
    if not _BEFORE_4_0:
        return spark.createDataFrame(table).coalesce(1)
    rows = [tuple(row.values()) for row in table.to_pylist()]
    schema = from_arrow_schema(table.schema)
    if is_connect(spark):
        return spark.createDataFrame(rows, schema)
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), schema)


def frame_of_rows(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Returns a table as a DataFrame of several partitions."""
    if not _BEFORE_4_0:
        return spark.createDataFrame(table)
    return spark.createDataFrame([tuple(row.values()) for row in table.to_pylist()], from_arrow_schema(table.schema))


@contextmanager
def unlogged_errors() -> Iterator[None]:
    """Context in which pyspark >= 4 does not log queries' errors, with Java's stack, before it raises them."""
    if _BEFORE_4_0:
        yield
        return
    from pyspark.logger import PySparkLogger

    names = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
    with ExitStack() as muted:
        for name in names:
            # The logger is made here, because `logging` would make one of another class, which cannot take what pyspark
            # logs.
            PySparkLogger.getLogger(name)
            muted.enter_context(quiet(name))
        yield


def table_of(data: DataFrame) -> pa.Table:
    """Returns the rows of a DataFrame, which has no nulls, as a table."""
    if not _BEFORE_4_0:
        return data.toArrow()
    return pa.Table.from_pandas(data.toPandas(), preserve_index=False)


def repartition_by_id(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Moves every row to the partition whose number is in an int column."""
    # pyspark has the method from 4.1 on. An attribute of a DataFrame may also be a column, so its class is asked first.
    repartition: Any = getattr(data, "repartitionById", None) if hasattr(DataFrame, "repartitionById") else None
    return split_by_hash(data, parts, part) if repartition is None else repartition(parts, part)


def split_by_hash(data: DataFrame, parts: int, part: Column) -> DataFrame:
    """Moves every row to partition `part` by Spark's hash partitioning.

    Spark puts a row into partition `pmod(hash(x), parts)`. So an `x` that hashes to each partition is looked up first.
    """
    candidates = data.sparkSession.range(parts * 64).select(F.col("id").cast("int").alias("x"))
    buckets = candidates.groupBy(F.pmod(F.hash("x"), F.lit(parts)).alias("part")).agg(F.min("x").alias("x")).collect()
    stand_in = {row["part"]: row["x"] for row in buckets}
    lookup = F.array(*[F.lit(stand_in[index]) for index in range(parts)])
    return data.repartition(parts, F.get(lookup, part))


def arrow_batches(data: DataFrame) -> RDD[bytes]:
    """Returns the rows of a classic DataFrame as an RDD of Arrow record batches, serialised without their schema.

    Spark has this RDD for `toPandas` only (`Dataset.toArrowBatchRdd`). `mapInArrow` could not return tensors, and
    `DataFrame.rdd` pickles rows. As with `DataFrame.rdd`, executors do not see the settings of the session.
    """
    batches = cast(Any, data)._jdf.toArrowBatchRdd().toJavaRDD()
    return RDD(batches, data.sparkSession.sparkContext, NoOpSerializer())


def frame_of_batches(spark: SparkSession, batches: RDD[bytes], schema: T.StructType) -> DataFrame:
    """Returns a classic DataFrame from record batches as `arrow_batches` has them.

    Spark has the function for SparkR (`SQLUtils.toDataFrame`).
    """
    jvm: Any = spark.sparkContext._jvm
    session = cast(Any, spark)._jsparkSession
    java_rdd = cast(Any, batches)._reserialize(NoOpSerializer())._jrdd
    java_schema = session.parseDataType(schema.json())
    return DataFrame(jvm.org.apache.spark.sql.api.r.SQLUtils.toDataFrame(java_rdd, java_schema, session), spark)


def uses_pandas() -> bool:
    """Whether scoring UDFs use pandas, which executors then need: UDFs on Arrow arrays exist since pyspark 4.1."""
    return not hasattr(F, "arrow_udf")


def arrow_udf(
    score: Callable[[Iterator[tuple[pa.Array, ...]]], Iterator[pa.Array]],
    kind: str,
    inputs: Sequence[TensorSpec],
    *,
    for_sql: bool = False,
) -> Any:
    """Returns a UDF that maps batches of columns to batches of results.

    `score` gets Arrow arrays, one per column; `kind` is the SQL type of the result. A packed input may be given as its
    source columns. `for_sql` says that SQL calls the UDF, whose columns do not come through `for_pandas`.
    """

    # Spark reads from these annotations what the UDF takes. With one input, it passes arrays instead of tuples.
    def score_arrow(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        return score(_in_order(batch, inputs) for batch in batches)

    def score_pandas(batches: Iterator[Any]) -> Iterator[Any]:
        for result in score(from_pandas(batch, inputs, for_sql=for_sql) for batch in batches):
            table = pa.RecordBatch.from_struct_array(result) if pa.types.is_struct(result.type) else result
            yield table.to_pandas()

    native: Any = getattr(F, "arrow_udf", None)
    if native is not None:
        return native(score_arrow, kind)
    # pyspark advises annotations, which would need pandas at import time in every executor.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="In Python 3.6\\+ and Spark 3.0\\+")
        return pandas_udf(score_pandas, kind, PandasUDFType.SCALAR_ITER)


def for_pandas(column: Column, kind: T.DataType) -> Column:
    """Returns a column with timestamps as microseconds, if scoring uses pandas; `arrow_udf` converts them back.

    pandas would have the timestamps in local time, and in nanoseconds, which span only 600 years.
    """
    return as_microseconds(column, kind) if uses_pandas() and has_timestamps(kind) else column


def has_timestamps(kind: T.DataType) -> bool:
    """Whether a type is or holds timestamps; timestamps without a time zone do not count."""
    return "timestamp" in kind.simpleString().replace("timestamp_ntz", "")


def as_microseconds(column: Column, kind: T.DataType) -> Column:
    """Returns a column in which timestamps, on any level of its type, are microseconds since 1970."""
    if not has_timestamps(kind):
        return column
    if isinstance(kind, T.ArrayType):
        element_type = kind.elementType

        def of_element(element: Column) -> Column:
            return as_microseconds(element, element_type)

        return F.transform(column, of_element)
    if isinstance(kind, T.StructType):
        fields = [as_microseconds(column[field.name], field.dataType).alias(field.name) for field in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    return F.unix_micros(column)


def from_pandas(batch: Any, inputs: Sequence[TensorSpec], *, for_sql: bool = False) -> tuple[pa.Array, ...]:
    """Returns the columns of a batch as Arrow arrays, as they were before pyspark converted them to pandas.

    In a UDF `for_sql`, numbers and text in place of times stay numbers and text, which scoring refuses.
    """
    columns = _in_order(batch, inputs)
    if len(columns) == len(inputs):
        kinds = [kind_of(spec).arrow(spec) for spec in inputs]
    else:
        # Source columns of packed inputs are numbers, which need no type.
        kinds = []
        for spec in inputs:
            kinds += [None] * len(spec.sources) if spec.sources else [kind_of(spec).arrow(spec)]
    return tuple(_array(column, kind, for_sql) for column, kind in zip(columns, kinds, strict=True))


def _in_order(batch: Any, inputs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """Returns the columns of a batch in the order of the specs; packed inputs may be given as their source columns.

    The columns of a batch are one per spec, in the same order, or the user's columns in the order of the fit.
    """
    columns = batch if isinstance(batch, tuple) else (batch,)
    positions = positions_of(inputs)
    if len(columns) == len(positions):
        return tuple(columns[position] for position in positions)
    if len(columns) == len(inputs):
        return columns
    names = [name for spec in inputs for name in spec.sources or (spec.column,)]
    expected = [name for _, name in sorted(zip(positions, names, strict=True))]
    raise ColumnError(
        f"the model takes {len(expected)} columns, and got {len(columns)}",
        hint=f"give it {', '.join(expected)}, in this order",
    )


def _array(column: Any, kind: pa.DataType | None, for_sql: bool) -> pa.Array:
    """Converts a pandas series, or a frame with a struct's fields, in which a row of nulls is a null struct."""
    if column.ndim == 1:
        return _array_of_series(column, kind, for_sql)
    names = list(column.columns)
    # The struct may be an ML vector although the model was fitted on arrays.
    field_types = _FIELD_TYPES
    if kind is not None and pa.types.is_struct(kind):
        field_types = {field.name: field.type for field in kind}
    fields = [_array(column[name], field_types.get(name), for_sql) for name in names]
    return pa.StructArray.from_arrays(fields, names=names, mask=reduce(pc.and_, (field.is_null() for field in fields)))


def _array_of_series(column: Any, kind: pa.DataType | None, for_sql: bool) -> pa.Array:
    """Converts a pandas series.

    Its times are microseconds, which `for_pandas` has made, or timestamps of a UDF `for_sql`, which pandas has in the
    session's time zone.
    """
    if kind is None:
        return pa.Array.from_pandas(column)
    if has_times(kind):
        if for_sql and pa.types.is_temporal(kind) and any(isinstance(value, str) for value in column):
            return pa.Array.from_pandas(column)
        if column.dtype.kind == "M" and has_instants(kind):
            return values_as(kind, column, zone_in_udf("UTC"))
        with suppress(TypeError):  # Microseconds are no times of pandas.
            times = values_as(kind, column, timezone.utc)
            # Nulls alone need no zone, which this task may lack.
            needs_zone = has_instants(kind) and times.null_count < len(times)
            return values_as(kind, column, zone_in_udf("UTC")) if needs_zone else times
        if for_sql:  # These are numbers in place of times.
            return pa.Array.from_pandas(column)
    for candidate in (kind, _in_microseconds(kind)):
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return pa.Array.from_pandas(column, type=candidate).cast(kind)
    return pa.Array.from_pandas(column)


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """Returns a type as `for_pandas` changes it: timestamps are microseconds."""
    if pa.types.is_list(kind):
        return pa.list_(_in_microseconds(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _in_microseconds(field.type)) for field in kind])
    return pa.int64() if pa.types.is_timestamp(kind) else kind
