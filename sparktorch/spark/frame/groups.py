"""Encodes the columns that group rows, and that order the rows in a group."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import GROUP, ORDER, Groups, TensorSpec
from sparktorch.errors import ColumnError
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.kinds import INTEGRAL
from sparktorch.spark.frame.refusals import unsuitable

__all__ = ["check_group", "group_columns"]

_NESTED = (T.ArrayType, T.MapType, T.StructType)


def group_columns(names: ColumnNames, groups: Groups | None, inputs: Sequence[TensorSpec]) -> list[Column]:
    """Returns the encoded column of groups, and of the order in a group if there is one; no columns without groups.

    A group is null where its column is null. A `ColumnError` says that a column is missing or cannot order rows, or
    that windows cannot have one of the inputs.
    """
    if groups is None:
        return []
    if groups.window is not None:
        _refuse_uneven(inputs)
    # Without a column of groups, all rows are one group.
    group = F.lit(0).cast("long")
    if groups.group is not None:
        check_group(names, groups.group)
        column = names.column(groups.group)
        group = F.when(column.isNotNull(), F.xxhash64(column))
    encoded = [group.alias(GROUP)]
    if groups.order is not None:
        encoded.append(_order_column(names, groups.order).alias(ORDER))
    return encoded


def check_group(names: ColumnNames, name: str) -> None:
    """Refuses a nested column of groups: its hash leaves out nulls, so that different groups would become one."""
    data_type = names.type_of(name)
    if isinstance(data_type, _NESTED):
        hint = f"make a string of it, as to_json({names.sql(name)}) does"
        raise unsuitable(data_type, name, "and groups are told apart by a value", hint)


def _refuse_uneven(specs: Sequence[TensorSpec]) -> None:
    """Refuses inputs from which windows cannot be made, because their rows are no tensors of one shape."""
    for spec in specs:
        if spec.ragged or spec.layout == "sparse_csr":
            raise ColumnError(
                f"column {spec.column!r} is {spec.layout}, and the rows of a window become one tensor",
                hint="leave inputLayouts out",
                column=spec.column,
            )


def _order_column(names: ColumnNames, name: str) -> Column:
    """Returns a column that orders rows as int64: whole numbers, days of dates, microseconds of timestamps."""
    data_type = names.type_of(name)
    column = names.column(name)
    if isinstance(data_type, T.DateType):
        return F.unix_date(column).cast("long")
    if isinstance(data_type, T.TimestampType):
        return F.unix_micros(column)
    if isinstance(data_type, T.TimestampNTZType):
        # A cast to a timestamp would need a time zone, in which a clock that is set back repeats an hour.
        minutes = F.unix_date(column.cast("date")).cast("long") * 1440 + F.hour(column) * 60 + F.minute(column)
        return minutes * 60_000_000 + (F.extract(F.lit("SECOND"), column) * 1_000_000).cast("long")
    if isinstance(data_type, INTEGRAL):
        return column.cast("long")
    hint = f"cast({names.sql(name)} as timestamp), or as date or bigint"
    raise unsuitable(data_type, name, "and rows are ordered by whole numbers, dates or timestamps", hint)
