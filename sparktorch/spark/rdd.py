"""Turns DataFrames into RDDs of tensors and back, by way of Arrow instead of Python's rows. On classic Spark only."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark import RDD
from pyspark.ml.linalg import Vector, VectorUDT
from pyspark.sql import DataFrame, Row
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from sparktorch.base.config import at_least
from sparktorch.data.columns import InputOptions, TensorSpec
from sparktorch.data.convert.checks import refuse_nulls
from sparktorch.data.convert.tensors import to_arrow, to_numpy
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import arrow_batches, frame_of_batches
from sparktorch.spark.frame.encoding import column_of, kept_as, plan_inputs
from sparktorch.spark.frame.first_row import measured
from sparktorch.spark.frame.kinds import SQL_TYPES, element_of
from sparktorch.spark.session import check_running, is_connect, session_of

__all__ = ["dataframe_of", "is_rdd", "moved", "tensor_rdd", "to_dataframe"]

Tensors = dict[str, torch.Tensor]

# Spark's `createDataFrame` converts values of these types.
_SPARK_VALUES = (Vector, datetime.date)
# Spark lacks the first type of each pair.
_WIDER = {
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

# Where elements are rows, this number of elements is converted at a time.
_ROWS = 1024


def tensor_rdd(
    data: DataFrame | RDD[Any],
    columns: Sequence[str] | None = None,
    batch_size: int | None = None,
    *,
    dtypes: Mapping[str, str] | None = None,
) -> RDD[Tensors]:
    """Returns the rows of a DataFrame as an RDD of batches: dicts of tensors by column name.

    A partition's rows stay in their partition and in their order. They come from the JVM as Arrow, and the tensors
    share its memory where the types allow: change them in place only where a copy would do.

    Example:
        >>> rows = [(1.0, [1.0, 2.0]), (2.0, [3.0, 4.0])]
        >>> data = spark.createDataFrame(rows, "y double, x array<double>").coalesce(1)
        >>> sparktorch.tensor_rdd(data).map(lambda batch: batch["x"].T @ batch["x"]).first()
        tensor([[10., 14.],
                [14., 20.]], dtype=torch.float64)

    Args:
        data: A DataFrame of classic Spark; or an RDD, as `to_dataframe` takes it.
        columns: The columns: numbers, booleans (as int8), nested arrays of numbers of one length, ML vectors; by
            default all columns.
        batch_size: Rows of a batch; the last batch of a partition may have fewer. `None` takes Spark's own batches, of
            at most `spark.sql.execution.arrow.maxRecordsPerBatch` rows, which saves a copy.
        dtypes: The dtype by column; by default the column's dtype.

    Returns:
        An RDD of dicts of tensors of shape `(rows, ...)`.

    Raises:
        ConfigError: The DataFrame is one of Spark Connect, which has no RDDs, or a dtype does not suit its column.
        ColumnError: A column is missing or cannot become a tensor. In a task: a row holds a null, or its length differs
            from the length of the partition's first row.
    """
    if batch_size is not None:
        at_least("batch_size", batch_size, 1)
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(f"columns is {columns!r}, and not a list of names", hint="pass ['x', ...]", param="columns")
    frame = dataframe_of(data, "tensor_rdd")
    if is_connect(frame.sparkSession):
        raise ConfigError(
            "Spark Connect has no RDDs",
            hint="sparktorch.run(function, df) gives ranks the rows as tensors there, by context.loader",
        )
    column_names = ColumnNames.of(frame)
    names = list(frame.columns if columns is None else columns)
    dtype_of: dict[str, str] = {}
    for name in names:
        dtype = _dtype(column_names.type_of(name))
        if dtype:
            dtype_of[name] = dtype
    dtype_of.update(dtypes or {})
    specs = plan_inputs(column_names, names, InputOptions(dtypes=dtype_of))
    encoded = frame.select(*[column_of(column_names, spec) for spec in specs])
    schema = to_arrow_schema(encoded.schema)
    return arrow_batches(encoded).mapPartitions(partial(_tensors, specs, schema, batch_size))


def to_dataframe(rdd: RDD[Any], schema: T.StructType | str | None = None) -> DataFrame:
    """Returns the elements of an RDD as a DataFrame, by way of Arrow.

    - Dicts and tuples with tensors are batches, as `tensor_rdd` returns them: a tensor of shape `(rows, ...)` gives
      each row a number, or nested arrays. Of types that Spark lacks, uint8 becomes smallint, and 16-bit floats become
      float.
    - Other elements are one row each: dicts of numbers, strings and NumPy arrays; or, with a schema, tuples of its
      columns, or the value of its only column.
    - Spark's `Row`s, and elements with ML vectors, dates or timestamps, go through Spark's `createDataFrame`.

    Args:
        rdd: The RDD.
        schema: Schema of the DataFrame, as a type or DDL string; by default, the names and types of the first element.

    Raises:
        ConfigError: There is no schema, and the RDD is empty or its first element has no names; or the schema does not
            name columns.
        ColumnError: In a task: an element lacks columns of the schema, or has other columns.
    """
    spark = session_of(rdd)
    first = None if schema is not None else next(iter(rdd.take(1)), None)
    if isinstance(first, Row):
        return spark.createDataFrame(rdd)
    if schema is None and not (isinstance(first, Mapping) and all(isinstance(name, str) for name in first)):
        what = "the RDD is empty" if first is None else f"the first element of the RDD is a {type(first).__name__}"
        raise ConfigError(
            f"{what}, and nothing names its columns",
            hint="pass schema=, such as 'x array<float>, y float', or make the elements dicts by column name",
            param="schema",
        )
    if schema is None and any(isinstance(value, _SPARK_VALUES) for value in (first or {}).values()):

        def as_row(element: Mapping[str, Any]) -> Row:
            return Row(**element)

        return spark.createDataFrame(rdd.map(as_row))
    columns: Any = schema
    if schema is None:
        columns = from_arrow_schema(_record_batch([first], None).schema)
    elif isinstance(schema, str):
        columns = T._parse_datatype_string(schema)
    if not isinstance(columns, T.StructType) or len(set(columns.names)) < len(columns.names):
        raise ConfigError(
            f"schema is {schema!r}, and not one of columns with a name each", hint="such as 'x float'", param="schema"
        )
    if any(_needs_spark(field.dataType) for field in columns):
        return spark.createDataFrame(rdd, columns)
    return frame_of_batches(spark, rdd.mapPartitions(partial(_to_messages, to_arrow_schema(columns))), columns)


def dataframe_of(data: Any, caller: str) -> DataFrame:
    """Returns a DataFrame as it is, and an RDD as a DataFrame; the message about anything else names the caller."""
    converted = to_dataframe(data) if is_rdd(data) else data
    if not hasattr(converted, "sparkSession"):
        type_name = f"{type(data).__module__.partition('.')[0]}'s {type(data).__name__}"
        raise ConfigError(
            f"{caller} takes a DataFrame of Spark's, and got {type_name}", hint=_how_to_convert(data), param="dataset"
        )
    frame: DataFrame = converted
    check_running(frame.sparkSession)
    return frame


def _how_to_convert(data: Any) -> str:
    """Returns how to make a DataFrame from what a user gave."""
    if isinstance(data, str | os.PathLike):
        return "spark.read.parquet(it), or as its format is"
    if data is None:
        return "pass the rows; a function that returns none may be what made it"
    if hasattr(type(data), "agg") and "Group" in type(data).__name__:
        return "aggregate the groups first, by agg(...)"
    return "it.to_spark()" if type(data).__module__.startswith("pyspark.pandas") else "spark.createDataFrame(it)"


def is_rdd(data: Any) -> bool:
    """Whether a value is an RDD."""
    return isinstance(data, RDD)


def moved(rdd: RDD[Any]) -> RDD[Any]:
    """Shuffles the elements of each partition, in their order, to the partition of the same number."""

    def with_partition(partition: int, elements: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return ((partition, element) for element in elements)

    def partition_of_key(partition: int) -> int:
        return partition

    return rdd.mapPartitionsWithIndex(with_partition).partitionBy(rdd.getNumPartitions(), partition_of_key).values()


def _needs_spark(kind: T.DataType) -> bool:
    """Whether Spark, not Arrow, converts values of a type: vectors, and times, which have the session's time zone."""
    return isinstance(element_of(kind)[0], T.UserDefinedType | T.DatetimeType)


def _dtype(kind: T.DataType) -> str:
    """Returns the dtype of a column's numbers; empty for other types."""
    element, _ = element_of(kind)
    if isinstance(element, VectorUDT):
        return "float64"
    dtype_of_sql = {sql: dtype for dtype, sql in SQL_TYPES.items()} | {"boolean": "int8"}
    return dtype_of_sql.get(str(kept_as(element)), "")


def _tensors(
    specs: Sequence[TensorSpec], schema: pa.Schema, size: int | None, messages: Iterable[bytes]
) -> Iterator[Tensors]:
    """Yields the tensors of a partition's Arrow batches, which come without their schema."""
    batches = (pa.ipc.read_record_batch(pa.py_buffer(message), schema) for message in messages)
    # The lengths that the first row shows.
    measured_specs: list[TensorSpec] = []
    row = 0
    for batch in _resize(batches, size):
        if not batch.num_rows:
            continue
        measured_specs = measured_specs or [measured(spec, batch) for spec in specs]
        tensors = {}
        for spec, column in zip(measured_specs, batch.columns, strict=True):
            refuse_nulls(column, spec, first_row=row)
            tensors[spec.column] = _tensor(to_numpy(column, spec, first_row=row))
        yield tensors
        row += batch.num_rows


def _resize(batches: Iterable[pa.RecordBatch], size: int | None) -> Iterator[pa.RecordBatch]:
    """Yields the rows in batches of `size` rows, and the rest in a smaller one; copies only rows that are joined."""
    if size is None:
        yield from batches
        return
    rest: list[pa.RecordBatch] = []
    for batch in batches:
        rows = pa.Table.from_batches([*rest, batch])
        end = rows.num_rows - rows.num_rows % size
        for start in range(0, end, size):
            yield from rows.slice(start, size).combine_chunks().to_batches()
        rest = rows.slice(end).to_batches()
    if rest:
        yield from pa.Table.from_batches(rest).combine_chunks().to_batches()


def _tensor(values: Any) -> torch.Tensor:
    """Returns an array as a tensor that shares the array's memory, which may be Arrow's and read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(values))


def _to_messages(schema: pa.Schema, elements: Iterable[Any]) -> Iterator[bytes]:
    """Yields the elements of a partition as Arrow record batches, serialised without their schema."""
    for are_batches, group in groupby(elements, _is_batch):
        while chunk := list(islice(group, 1 if are_batches else _ROWS)):
            yield _record_batch(chunk, schema).serialize().to_pybytes()


def _is_batch(element: Any) -> bool:
    """Whether an element is a batch of rows, not one row: it has tensors."""
    if isinstance(element, Mapping):
        values: Iterable[Any] = element.values()
    else:
        values = element if isinstance(element, tuple) else ()
    return any(isinstance(value, torch.Tensor) for value in values)


def _record_batch(elements: list[Any], schema: pa.Schema | None) -> pa.RecordBatch:
    """Returns one batch, or several rows, as a record batch, cast to a schema if there is one."""
    names = list(elements[0]) if schema is None else schema.names
    if _is_batch(elements[0]):
        batch = _by_name(elements[0], names)
        columns = {name: to_arrow(_widen(batch[name])) for name in names}
    else:
        rows = [_by_name(element, names) for element in elements]
        columns = {name: _column([row[name] for row in rows]) for name in names}
    rows_of = {name: len(column) for name, column in columns.items()}
    if len(set(rows_of.values())) > 1:
        raise ColumnError(f"a batch has other numbers of rows in its columns: {rows_of}")
    if schema is None:
        return pa.RecordBatch.from_pydict(columns)
    for name, column in columns.items():
        if column.null_count and not schema.field(name).nullable:
            raise ColumnError("the column has null values, and the schema says NOT NULL", column=name)
    return pa.RecordBatch.from_arrays([columns[name].cast(schema.field(name).type) for name in names], schema=schema)


def _by_name(element: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns the values of an element by column name; refuses an element with other columns."""
    if isinstance(element, Mapping):
        if element.keys() == set(names):
            return element
        content = ", ".join(map(repr, element))
    else:
        values = element if isinstance(element, tuple) else (element,)
        if len(values) == len(names):
            return dict(zip(names, values, strict=True))
        content = f"{len(values)} values"
    raise ColumnError(
        f"an element has {content}, and the columns are {', '.join(map(repr, names))}",
        hint="give all elements the same keys, or pass schema=, and map them to dicts of its columns",
    )


def _widen(values: Any) -> np.ndarray[Any, Any]:
    """Returns a tensor or an array as an array whose type Spark has."""
    tensor = torch.as_tensor(values).detach().cpu()
    return np.asarray(tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)).numpy())


def _column(values: list[Any]) -> pa.Array:
    """Returns the values of some rows as a column."""
    # NumPy arrays of one shape are converted at once.
    if isinstance(values[0], np.ndarray) and values[0].ndim and len({np.shape(value) for value in values}) == 1:
        stacked = np.stack(values)
        return to_arrow(_widen(stacked) if stacked.dtype.kind in "uf" else stacked)
    return pa.array([value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in values])
