"""What a value holds through structs and lists: for the key of its row, and for what makes a row unfit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import or_

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import TensorSpec

__all__ = ["hashed", "unfit"]

Within = Callable[[Column], list[Column]]


def hashed(spec: TensorSpec, kind: T.DataType) -> list[Column]:
    """Returns what of a wire column goes into the key of a row.

    Spark's hash knows neither where one list ends and the next begins, nor nulls: where rows could be told
    apart by nothing else, lengths and places of nulls go in, too.

    Args:
        spec: The column.
        kind: Its type on the wire.
    """
    column = F.col(spec.name)
    free = spec.kind == "any"  # its lists may have any lengths, on any level
    columns = [F.size(column), column] if spec.ragged or (free and isinstance(kind, T.ArrayType)) else [column]
    if spec.sources:  # the same flags as below, without a call for every element
        places = (F.isnull(column.getItem(place)) for place in range(len(spec.sources)))
        return [*columns, *([] if spec.fill is None else [F.isnull(column), *places])]
    if spec.kind not in ("any", "number"):
        kind = T.NullType()  # vectors and images are null as a whole, or not at all

    def unknown(value: Column, of: T.DataType) -> list[Column]:
        flags = [F.isnull(value)] if spec.fill is not None else []
        return flags + [F.size(value)] * (free and isinstance(of, T.ArrayType) and value is not column)

    return columns + _within(column, kind, unknown, _structs)


def unfit(spec: TensorSpec, kind: T.DataType, column: Column | None = None) -> Column:
    """Returns whether a wire column is null, or is or holds a null, NaN or infinity; it is never null itself.

    Args:
        spec: The column.
        kind: Its type on the wire.
        column: The expression that sends it; by default the column of its wire name.
    """
    column = F.col(spec.name) if column is None else column
    if spec.kind in ("number", "vector") and isinstance(kind, T.StructType):  # the size of a dense one is null
        column, kind = column["values"], kind["values"].dataType

    def bad(value: Column, of: T.DataType) -> list[Column]:
        if not isinstance(of, T.FloatType | T.DoubleType):
            return [value.isNull()]
        return [value.isNull(), F.isnan(value), F.abs(value) == math.inf]

    return reduce(or_, _within(column, kind, bad, _any))


def _within(
    value: Column,
    kind: T.DataType,
    found: Callable[[Column, T.DataType], list[Column]],
    joined: Callable[[Column, Within], Column],
) -> list[Column]:
    """Returns what is found of a value, and then of what it holds.

    Args:
        value: The value.
        kind: Its type.
        found: Returns what there is to say of a value itself.
        joined: Makes one column of what is found of the elements of a list.
    """
    columns = found(value, kind)
    if isinstance(kind, T.StructType):
        for field in kind.fields:
            columns += _within(value.getField(field.name), field.dataType, found, joined)
    elif isinstance(kind, T.ArrayType) and _within(F.lit(None), kind.elementType, found, joined):
        columns.append(joined(value, lambda element: _within(element, kind.elementType, found, joined)))
    return columns


def _structs(lists: Column, within: Within) -> Column:
    def one(element: Column) -> Column:
        columns = within(element)
        return columns[0] if len(columns) == 1 else F.struct(*columns)

    return F.transform(lists, one)


def _any(lists: Column, within: Within) -> Column:
    return F.exists(lists, lambda element: reduce(or_, within(element)))
