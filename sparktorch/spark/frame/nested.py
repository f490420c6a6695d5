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

_CHAINED = 50  # Spark's optimizer still walks so many conditions one within another.
Within = Callable[[Column], list[Column]]


def hashed(spec: TensorSpec, kind: T.DataType) -> list[Column]:
    """Returns the expressions of an encoded column that the row key hashes.

    Spark's hash ignores list boundaries and nulls. Where only those distinguish rows, list sizes and null flags are
    hashed, too.
    """
    column = F.col(spec.name)
    free = spec.as_it_is  # Its lists may have any lengths, on any level.
    columns = [F.size(column), column] if spec.ragged or (free and isinstance(kind, T.ArrayType)) else [column]
    if spec.sources:  # These are the same flags as below, without a call for every element.
        null_flags = (F.isnull(column.getItem(index)) for index in range(len(spec.sources)))
        return [*columns, *([] if spec.fill is None else [F.isnull(column), *null_flags])]
    if isinstance(kind, T.StructType) and not free:
        kind = T.NullType()  # Vectors and images are null as a whole, or not at all.

    def flags_of(value: Column, value_type: T.DataType) -> list[Column]:
        flags = [F.isnull(value)] if spec.takes_nulls else []
        if free and isinstance(value_type, T.ArrayType) and value is not column:
            flags.append(F.size(value))
        return flags

    return columns + _within(column, kind, flags_of, _structs)


def unfit(spec: TensorSpec, kind: T.DataType, column: Column | None = None) -> Column:
    """Returns a condition that is true for values that are or hold a null, NaN or infinity; it is never null.

    `column` encodes the values; by default it is the column named `spec.name`.
    """
    column = F.col(spec.name) if column is None else column
    # The size of a dense vector is null, so that its values alone are looked at.
    if isinstance(kind, T.StructType) and "values" in kind.names and not spec.as_it_is:
        column, kind = column["values"], kind["values"].dataType

    def conditions_of(value: Column, value_type: T.DataType) -> list[Column]:
        if not isinstance(value_type, T.FloatType | T.DoubleType):
            return [value.isNull()]
        return [value.isNull(), F.isnan(value), F.abs(value) == math.inf]

    return any_of(_within(column, kind, conditions_of, _any))


def any_of(conditions: Sequence[Column]) -> Column:
    """Returns a condition that is true if one of some conditions is, none of which may be null."""
    if len(conditions) > _CHAINED:
        # A long chain of `or` would overflow the stack of the JVM.
        return F.array_contains(F.array(*conditions), True)
    return reduce(or_, conditions)


def _within(
    value: Column,
    kind: T.DataType,
    columns_of: Callable[[Column, T.DataType], list[Column]],
    join: Callable[[Column, Within], Column],
) -> list[Column]:
    """Returns the columns that `columns_of` gives for a value, and then for its fields or elements, recursively.

    `join` combines the columns for the elements of a list into one column.
    """
    columns = columns_of(value, kind)
    if isinstance(kind, T.StructType):
        for field in kind.fields:
            columns += _within(value.getField(field.name), field.dataType, columns_of, join)
    elif isinstance(kind, T.ArrayType):
        element_type = kind.elementType

        def within(element: Column) -> list[Column]:
            return _within(element, element_type, columns_of, join)

        # Where elements give no columns, there is nothing to join.
        if within(F.lit(None)):
            columns.append(join(value, within))
    return columns


def _structs(lists: Column, within: Within) -> Column:
    def of_element(element: Column) -> Column:
        columns = within(element)
        return columns[0] if len(columns) == 1 else F.struct(*columns)

    return F.transform(lists, of_element)


def _any(lists: Column, within: Within) -> Column:
    def of_element(element: Column) -> Column:
        return any_of(within(element))

    return F.exists(lists, of_element)
