"""Which columns of a table are inputs, and of which kind: categories, times or numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import types as T

from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC

__all__ = [
    "CROSS_VALIDATION_COLUMN",
    "ROLE_PARAMS",
    "Kinds",
    "chooses_kinds",
    "is_number",
    "kinds_of_columns",
    "order_inputs",
]

ROLE_PARAMS = ("labelCol", "labelCols", "weightCol", "validationIndicatorCol", "idCol", "groupCol")
# Spark's CrossValidator and TrainValidationSplit draw a number for each row into a column with such a name.
CROSS_VALIDATION_COLUMN = re.compile(r"_[0-9a-f]{12}_rand$")
_TIMES = (T.DateType, T.TimestampType, T.TimestampNTZType)


class Kinds(NamedTuple):
    """The input columns by kind.

    Attributes:
        categorical: The columns of categories.
        times: The columns of dates and timestamps, each with the parts that become categories, such as "month".
        numeric: The columns of numbers.
    """

    categorical: list[str]
    times: dict[str, list[str]]
    numeric: list[str]


def chooses_kinds(p: Values) -> bool:
    """Whether the estimator decides which columns are categories."""
    return p["categoricalCols"] is None and p["numericCols"] is None


def kinds_of_columns(p: Values, names: ColumnNames) -> Kinds:
    """Returns the input columns by kind; refuses names that contradict each other, and types that it cannot take."""
    role_columns = {column for param in ROLE_PARAMS for name in _listed(p[param]) for column in names.called(name)}
    columns_without_role = [
        name for name in names.schema.names if name not in role_columns and not CROSS_VALIDATION_COLUMN.search(name)
    ]
    explicitly_named = _by_column(names, [*(p["categoricalCols"] or ()), *(p["numericCols"] or ())])
    chosen_inputs = _by_column(names, p["inputCols"] or ())
    candidates = chosen_inputs or _by_column(names, columns_without_role)
    # The type decides the kind of an input that neither categoricalCols nor numericCols names.
    unassigned = [name for column, name in candidates.items() if column not in explicitly_named]
    numeric_by_type = [name for name in unassigned if is_number(names.type_of(name))]
    other_by_type = [name for name in unassigned if name not in numeric_by_type]
    numeric = numeric_by_type if p["numericCols"] is None else p["numericCols"]
    categorical_or_time = other_by_type if p["categoricalCols"] is None else p["categoricalCols"]
    _check_inputs(p, names, explicitly_named, chosen_inputs, [*numeric, *categorical_or_time])
    kinds = Kinds(categorical=[], times={}, numeric=numeric)
    for name in categorical_or_time:
        kind = names.type_of(name)
        if isinstance(kind, T.DateType):
            kinds.times[name] = ["month", "weekday"]
        elif isinstance(kind, _TIMES):
            kinds.times[name] = ["month", "weekday", "hour"]
        elif isinstance(kind, (T.StringType, *NUMERIC)):
            kinds.categorical.append(name)
        else:
            hint = "leave it out: inputCols names the columns to take"
            what = f"column {name!r} is {kind.simpleString()}, neither text, number, boolean, date nor timestamp"
            raise ColumnError(what, hint=hint, column=name)
    check_numbers(names, numeric)
    if not any(kinds):
        hint = "its other columns are the inputs: text, numbers, booleans, dates and timestamps"
        raise ColumnError("the table has no column but the label and those that have another role", hint=hint)
    return kinds


def _check_inputs(
    p: Values,
    names: ColumnNames,
    explicitly_named: Mapping[str, str],
    chosen_inputs: Mapping[str, str],
    used: Sequence[str],
) -> None:
    """Refuses the label among the inputs, and columns about which two Params contradict each other.

    Args:
        p: The Params.
        names: The columns of the table.
        explicitly_named: The names in `categoricalCols` and `numericCols`, by column.
        chosen_inputs: The names in `inputCols`, by column.
        used: The names of all columns that have a kind.
    """
    numeric = _by_column(names, p["numericCols"] or ())
    in_both = [name for column, name in _by_column(names, p["categoricalCols"] or ()).items() if column in numeric]
    if in_both:
        name = min(in_both)
        what = f"column {name!r} is in categoricalCols and in numericCols"
        raise ColumnError(what, hint="name it in one of them", column=name)
    outside = [name for column, name in explicitly_named.items() if chosen_inputs and column not in chosen_inputs]
    if outside:
        name = min(outside)
        raise ColumnError(
            f"column {name!r} is not among inputCols", hint="name it there, or leave inputCols out", column=name
        )
    labels = [
        name
        for column, name in _by_column(names, p["labelCols"] or [p["labelCol"]]).items()
        if column in chosen_inputs or column in explicitly_named
    ]
    if labels:
        name = min(labels)
        hint = "leave it out: a model would only repeat it"
        raise ColumnError(f"the label {name!r} is among the input columns", hint=hint, column=name)
    used_columns = _by_column(names, used)
    unused = [name for column, name in chosen_inputs.items() if column not in used_columns]
    if unused:
        name = min(unused)
        raise ColumnError(
            f"column {name!r} is among inputCols, and in neither categoricalCols nor numericCols",
            hint="name it in one of them, or leave it out of inputCols",
            column=name,
        )


def order_inputs(p: Values, names: ColumnNames, kinds: Kinds) -> list[str]:
    """Returns the input columns in the order of `inputCols`, or of the table."""
    inputs = {*kinds.categorical, *kinds.times, *kinds.numeric}
    order = [*(p["inputCols"] or names.schema.names), *(p["categoricalCols"] or ()), *(p["numericCols"] or ())]
    return [name for name in dict.fromkeys(order) if name in inputs]


def _listed(value: Any) -> Sequence[str]:
    """Returns the columns that a Param names: one, several, or none."""
    return [value] if isinstance(value, str) else value or []


def _by_column(names: ColumnNames, called: Iterable[str]) -> dict[str, str]:
    """Maps each column to the first of the names that refer to it."""
    by_column: dict[str, str] = {}
    for name in called:
        by_column.setdefault(names.sql(name), name)
    return by_column


def is_number(kind: T.DataType) -> bool:
    """Whether a column of the type holds numbers."""
    return isinstance(kind, NUMERIC) and not isinstance(kind, T.BooleanType)
