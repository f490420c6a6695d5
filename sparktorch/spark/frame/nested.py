"""Makes expressions that descend into structs and lists: the inputs of the row key, and the check for unfit rows."""

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

# Spark's optimizer can still walk this number of conditions one within another.
_CHAINED = 50
# Returns the columns within an element of a list.
Within = Callable[[Column], list[Column]]


def hashed(spec: TensorSpec, data_type: T.DataType) -> list[Column]:
    """Returns the expressions of an encoded column that the row key hashes.

    Spark's hash ignores list boundaries and nulls. Where only boundaries or nulls distinguish rows, list sizes and null
    flags are hashed, too.
    """
    column = F.col(spec.name)
    has_free_lists = spec.as_it_is  # The lists may have any lengths, on any level.
    columns = [column]
    if spec.ragged or (has_free_lists and isinstance(data_type, T.ArrayType)):
        columns = [F.size(column), column]
    if spec.sources:
        # These are the same flags as below, without a call for every element.
        if spec.fill is not None:
            columns.append(F.isnull(column))
            columns += [F.isnull(column.getItem(index)) for index in range(len(spec.sources))]
        return columns
    if isinstance(data_type, T.StructType) and not has_free_lists:
        data_type = T.NullType()  # Vectors and images are null as a whole, or not at all.

    def flags_of(value: Column, value_type: T.DataType) -> list[Column]:
        flags = [F.isnull(value)] if spec.takes_nulls else []
        if has_free_lists and isinstance(value_type, T.ArrayType) and value is not column:
            flags.append(F.size(value))
        return flags

    return columns + _within(column, data_type, flags_of, _collect)


def unfit(spec: TensorSpec, data_type: T.DataType, column: Column | None = None) -> Column:
    """Returns a condition that is true for values that are or hold a null, NaN or infinity; it is never null.

    `column` encodes the values; by default it is the column named `spec.name`.
    """
    if column is None:
        column = F.col(spec.name)
    # The size of a dense vector is null, so only the values of vectors are checked.
    if isinstance(data_type, T.StructType) and "values" in data_type.names and not spec.as_it_is:
        column = column["values"]
        data_type = data_type["values"].dataType

    def conditions_of(value: Column, value_type: T.DataType) -> list[Column]:
        if not isinstance(value_type, T.FloatType | T.DoubleType):
            return [value.isNull()]
        return [value.isNull(), F.isnan(value), F.abs(value) == math.inf]

    return any_of(_within(column, data_type, conditions_of, _any))


def any_of(conditions: Sequence[Column]) -> Column:
    """Returns a condition that is true if one of `conditions` is; none of them may be null."""
    if len(conditions) > _CHAINED:
        # A long chain of `or` would overflow the stack of the JVM.
        return F.array_contains(F.array(*conditions), True)
    return reduce(or_, conditions)


def _within(
    value: Column,
    data_type: T.DataType,
    columns_of: Callable[[Column, T.DataType], list[Column]],
    join: Callable[[Column, Within], Column],
) -> list[Column]:
    """Returns the columns that `columns_of` gives for a value, and then for its fields or elements, recursively.

    `join` combines the columns for the elements of a list into one column.
    """
    columns = columns_of(value, data_type)
    if isinstance(data_type, T.StructType):
        for field in data_type.fields:
            columns += _within(value.getField(field.name), field.dataType, columns_of, join)
    elif isinstance(data_type, T.ArrayType):
        element_type = data_type.elementType

        def within(element: Column) -> list[Column]:
            return _within(element, element_type, columns_of, join)

        # Where elements give no columns, there is nothing to join.
        if within(F.lit(None)):
            columns.append(join(value, within))
    return columns


def _collect(lists: Column, within: Within) -> Column:
    """Returns a list with the columns for each element."""

    def of_element(element: Column) -> Column:
        columns = within(element)
        return columns[0] if len(columns) == 1 else F.struct(*columns)

    return F.transform(lists, of_element)


def _any(lists: Column, within: Within) -> Column:
    """Returns whether one of the columns, which are conditions, is true for an element."""

    def of_element(element: Column) -> Column:
        return any_of(within(element))

    return F.exists(lists, of_element)
