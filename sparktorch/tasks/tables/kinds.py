"""Which columns of a table are inputs, and of which kind: categories, times or numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyspark.sql import types as T

from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC

__all__ = ["DRAWN", "ROLES", "Kinds", "TableParams", "is_number", "kinds_of_columns", "ordered"]

ROLES = ("labelCol", "labelCols", "weightCol", "validationIndicatorCol", "idCol", "groupCol")
DRAWN = re.compile(r"_[0-9a-f]{12}_rand$")  # Spark's CrossValidator and TrainValidationSplit mark rows in such columns.
_TIMES = (T.DateType, T.TimestampType, T.TimestampNTZType)


@dataclass(frozen=True, kw_only=True)
class TableParams:
    """The Params that say what is learned of a table.

    Attributes:
        inputs: The input columns; `None` for all that have no other role.
        categorical: The columns of categories; `None` where these are chosen by their types.
        numeric: The columns of numbers, likewise.
        labels: The columns to predict.
        validation: The column that marks rows which validate, if there is one.
        roles: All columns that are no inputs by what Params say of them.
        min_count: The fewest rows of a category.
        max_categories: The most categories of a column.
        max_integer_categories: The most distinct values of a column of integers that are categories, too.
    """

    inputs: list[str] | None
    categorical: list[str] | None
    numeric: list[str] | None
    labels: list[str]
    validation: str | None
    roles: list[str]
    min_count: int
    max_categories: int
    max_integer_categories: int

    @classmethod
    def of(cls, estimator: Any) -> TableParams:
        """Returns those of an estimator."""
        p = Values(estimator)
        columns = [p[role] for role in ROLES if p[role]]
        return cls(
            inputs=p["inputCols"],
            categorical=p["categoricalCols"],
            numeric=p["numericCols"],
            labels=p["labelCols"] or [p["labelCol"]],
            validation=p["validationIndicatorCol"] or None,
            roles=[name for one in columns for name in ([one] if isinstance(one, str) else one)],
            min_count=p["minCount"],
            max_categories=p["maxCategories"],
            max_integer_categories=p["maxIntegerCategories"],
        )

    @property
    def chooses_kinds(self) -> bool:
        """Whether the estimator decides which columns are categories."""
        return self.categorical is None and self.numeric is None


class Kinds(NamedTuple):
    """The input columns by kind; of times, the parts that become categories."""

    categorical: list[str]
    times: dict[str, list[str]]
    numeric: list[str]


def kinds_of_columns(params: TableParams, names: ColumnNames) -> Kinds:
    """Returns the input columns by kind; refuses names that contradict each other, and types that it cannot take."""
    with_role = {column for name in params.roles for column in names.called(name)}
    free = [name for name in names.schema.names if name not in with_role and not DRAWN.search(name)]
    named = _by_column(names, [*(params.categorical or ()), *(params.numeric or ())])
    inputs = _by_column(names, params.inputs or ())
    free_names = [name for column, name in (inputs or _by_column(names, free)).items() if column not in named]
    numbers = [name for name in free_names if is_number(names.type_of(name))]
    numeric = numbers if params.numeric is None else params.numeric
    categorical_names = [name for name in free_names if name not in numbers]
    categorical_names = categorical_names if params.categorical is None else params.categorical
    _check_inputs(params, names, named, inputs, [*numeric, *categorical_names])
    kinds = Kinds([], {}, numeric)
    for name in categorical_names:
        kind = names.type_of(name)
        if isinstance(kind, _TIMES):
            kinds.times[name] = ["month", "weekday", *([] if isinstance(kind, T.DateType) else ["hour"])]
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
    params: TableParams,
    names: ColumnNames,
    named: Mapping[str, str],
    inputs: Mapping[str, str],
    used_names: Sequence[str],
) -> None:
    """Refuses inputs that one Param names and another leaves out, and the label among them."""
    outside = [name for column, name in named.items() if inputs and column not in inputs]
    if outside:
        name = min(outside)
        raise ColumnError(
            f"column {name!r} is not among inputCols", hint="name it there, or leave that out", column=name
        )
    labels = [name for column, name in _by_column(names, params.labels).items() if column in inputs or column in named]
    if labels:
        name = min(labels)
        hint = "leave it out: a model would only repeat it"
        raise ColumnError(f"the label {name!r} is among the input columns", hint=hint, column=name)
    columns = _by_column(names, used_names)
    unused = [name for column, name in inputs.items() if column not in columns]
    if unused:
        name = min(unused)
        raise ColumnError(
            f"column {name!r} is among inputCols, and in neither categoricalCols nor numericCols",
            hint="name it in one of them, or leave it out of inputCols",
            column=name,
        )


def ordered(params: TableParams, names: ColumnNames, kinds: Kinds) -> list[str]:
    """Returns the input columns in the order of `inputCols`, or of the table."""
    input_names = {*kinds.categorical, *kinds.times, *kinds.numeric}
    order = [*(params.inputs or names.schema.names), *(params.categorical or ()), *(params.numeric or ())]
    return [name for name in dict.fromkeys(order) if name in input_names]


def _by_column(names: ColumnNames, called: Iterable[str]) -> dict[str, str]:
    """Returns names by the columns that they stand for: the first of each."""
    by_column: dict[str, str] = {}
    for name in called:
        by_column.setdefault(names.sql(name), name)
    return by_column


def is_number(kind: T.DataType) -> bool:
    """Whether a column of the type holds numbers."""
    return isinstance(kind, NUMERIC) and not isinstance(kind, T.BooleanType)
