"""Expressions that descend into structs and lists: the inputs of the row key, and the check for unfit rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import TensorSpec

__all__ = ["any_of", "hashed", "unfit"]

_CHAINED = 50  # conditions that Spark's optimizer still walks one within another
Within = Callable[[Column], list[Column]]


def hashed(spec: TensorSpec, kind: T.DataType) -> list[Column]:
    """Returns the expressions of an encoded column that the row key hashes.

    Spark's hash ignores list boundaries and nulls. Where only those distinguish rows, list sizes and null flags are
    hashed, too.
    """
    column = F.col(spec.name)
    free = spec.as_it_is  # its lists may have any lengths, on any level
    columns = [F.size(column), column] if spec.ragged or (free and isinstance(kind, T.ArrayType)) else [column]
    if spec.sources:  # the same flags as below, without a call for every element
        places = (F.isnull(column.getItem(place)) for place in range(len(spec.sources)))
        return [*columns, *([] if spec.fill is None else [F.isnull(column), *places])]
    if isinstance(kind, T.StructType) and not free:
        kind = T.NullType()  # vectors and images are null as a whole, or not at all

    def unknown(value: Column, of: T.DataType) -> list[Column]:
        flags = [F.isnull(value)] if spec.takes_nulls else []
        return flags + [F.size(value)] * (free and isinstance(of, T.ArrayType) and value is not column)

    return columns + _within(column, kind, unknown, _structs)


def unfit(spec: TensorSpec, kind: T.DataType, column: Column | None = None) -> Column:
    """Returns a condition that is true for values that are or hold a null, NaN or infinity; it is never null.

    `column` encodes the values; by default it is the column named `spec.name`.
    """
    column = F.col(spec.name) if column is None else column
    if isinstance(kind, T.StructType) and "values" in kind.names and not spec.as_it_is:  # dense vectors have no size
        column, kind = column["values"], kind["values"].dataType

    def bad(value: Column, of: T.DataType) -> list[Column]:
        if not isinstance(of, T.FloatType | T.DoubleType):
            return [value.isNull()]
        return [value.isNull(), F.isnan(value), F.abs(value) == math.inf]

    return any_of(_within(column, kind, bad, _any))


def any_of(conditions: Sequence[Column]) -> Column:
    """Returns a condition that is true if one of them is; none is null. Flat: a chain of `or` overflows the stack."""
    return F.array_contains(F.array(*conditions), True) if len(conditions) > _CHAINED else reduce(or_, conditions)


def _within(
    value: Column,
    kind: T.DataType,
    found: Callable[[Column, T.DataType], list[Column]],
    joined: Callable[[Column, Within], Column],
) -> list[Column]:
    """Returns the columns that `found` gives for a value, and then for its fields or elements, recursively.

    `joined` combines the columns for the elements of a list into one column.
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
    return F.exists(lists, lambda element: any_of(within(element)))
