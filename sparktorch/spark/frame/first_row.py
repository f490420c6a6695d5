"""Reads the sample row, and the lengths and sizes that it shows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import or_

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.data.convert.checks import RowFilter
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, failure_in
from sparktorch.spark.compat import as_microseconds, has_timestamps
from sparktorch.spark.frame.encoding import kept_as
from sparktorch.spark.frame.nested import any_of, unfit

__all__ = ["first_row", "measured"]

# The first rows are read in these numbers, until one of the rows is usable.
_HEADS = (1, 64, 4096)


def first_row(data: DataFrame, columns: Columns, *, filled: bool) -> pa.RecordBatch:
    """Returns the sample row, the first usable row, as a record batch; `filled` says that ranks fill null inputs."""
    schema = data.schema
    conditions = []
    for spec in columns.tensors:
        # Labels and weights are never filled.
        is_never_filled = filled and spec not in columns.inputs
        drop = is_never_filled or (columns.drop_nulls and not spec.nulls)
        condition = _unfit(spec, schema[spec.name].dataType, drop=drop)
        if condition is not None:
            conditions.append(condition)
    rows = data.where(~any_of(conditions)) if conditions else data
    for count in _HEADS:
        head = _head(rows, count, schema)
        # Bytes, which Spark cannot check, may still hold NaN or infinity.
        fit = RowFilter(columns).rows_of(head, first_row=0) if columns.drop_nulls else head
        if fit.num_rows:
            return fit.slice(0, 1)
        if head.num_rows < count:
            break
    what = "no row without nulls, NaN, infinity or empty lists" if conditions else "no rows"
    raise ColumnError(f"the DataFrame has {what}", hint="check the filter or the path it comes from", code="ST-NO-ROWS")


def _head(rows: DataFrame, count: int, schema: T.StructType) -> pa.RecordBatch:
    """Returns the first rows as a record batch, as the ranks get them, except that timestamps are in UTC."""
    timed = {field.name: field.dataType for field in schema.fields if has_timestamps(field.dataType)}
    if timed:
        # pyspark would return timestamps in the time zone of this process.
        rows = rows.withColumns({name: as_microseconds(F.col(name), data_type) for name, data_type in timed.items()})
    try:
        # `head` reads one partition first; `limit(1).toArrow()` would run a task on each of them.
        head = rows.head(count)
    except (PySparkException, Py4JError) as error:  # pyspark 3.5 does not convert errors of Py4J.
        raise failure_in(str(error)) or error from None
    values = [row.asDict(recursive=True) for row in head]
    fields = [(field.name, arrow_type(str(kept_as(field.dataType)))) for field in schema.fields]
    return pa.RecordBatch.from_pylist(values, pa.schema(fields))


def _unfit(spec: TensorSpec, data_type: T.DataType, *, drop: bool) -> Column | None:
    """Returns a condition, never null, that is true for values unusable in the sample row; `None` if all are usable.

    A value is unusable if the ranks `drop` or reject it, or if it does not show the column's shape.
    """
    column = F.col(spec.name)
    needs_shape = 0 in spec.levels
    conditions = []
    if drop:
        conditions.append(unfit(spec, data_type))
    elif spec.fill is not None and needs_shape:
        conditions.append(_has_null_list(column, data_type))
    if spec.ragged and needs_shape:
        conditions.append(F.coalesce(F.size(column) == 0, F.lit(False)))
    return reduce(or_, conditions) if conditions else None


def _has_null_list(column: Column, data_type: T.DataType) -> Column:
    """Returns a condition that is true for values that are null or hold a null list."""
    if isinstance(data_type, T.ArrayType) and isinstance(data_type.elementType, T.ArrayType):
        element_type = data_type.elementType

        def is_or_holds_null(element: Column) -> Column:
            return _has_null_list(element, element_type)

        return column.isNull() | F.exists(column, is_or_holds_null)
    return column.isNull()


def measured(spec: TensorSpec, sample: pa.RecordBatch) -> TensorSpec:
    """Returns the spec with the lengths and sizes that the sample row shows; the ranks check every row."""
    if spec.sources or not spec.levels:
        return _with_levels(spec, ())
    value = sample.column(spec.name)[0].as_py()
    if spec.resize:
        return spec
    lengths = () if value is None else kind_of(spec).sizes_of(value, spec)
    if spec.layout == "image" and lengths:
        return replace(spec, shape=lengths)
    if value is None or len(lengths) < len(spec.levels) or 0 in lengths:
        if 0 not in spec.levels:
            return _with_levels(spec, spec.levels)
        raise ColumnError(
            f"column {spec.column!r} is {'null' if value is None else 'empty'} in the first row",
            hint="drop such rows before fit, or set nullPolicy",
            column=spec.column,
            code="ST-NULL",
        )
    return _with_levels(spec, lengths)


def _with_levels(spec: TensorSpec, levels: tuple[int, ...]) -> TensorSpec:
    """Returns the spec for lists with the lengths `levels`; they are its shape, too, unless `inputShapes` has one."""
    if spec.sources:
        return spec
    if spec.lists is None:
        return replace(spec, shape=levels)
    if math.prod(levels) != spec.width:
        subject = "each element of a row" if spec.ragged else "a row"
        raise ColumnError(
            f"{subject} of column {spec.column!r} holds {math.prod(levels)} values, inputShapes says "
            f"{list(spec.shape)}, which are {spec.width}",
            hint="the ranks reshape each row, they neither pad nor cut it",
            column=spec.column,
            code="ST-SHAPE",
        )
    return replace(spec, lists=None if levels == spec.shape else levels)
