"""Errors for columns of unsuitable types, with hints on what to do."""

from __future__ import annotations

from pyspark.sql import types as T

from sparktorch.errors import ColumnError
from sparktorch.spark.column_names import quoted_name

__all__ = ["as_numbers", "no_boolean", "no_label", "no_number", "no_tensor", "unsuitable"]

_PREPROCESS = "give a preprocess that makes tensors of it"
_TABULAR = "TabularClassifier and TabularRegressor take such columns as they are; or "
# In these texts, {0} is the column in SQL, {1} its seconds since 1970, and {2} its name.
_TIME = (
    "take what matters as a number: a difference, timestampdiff(second, earlier, {0}), or a part, hour({0}); seconds "
    "since 1970, {1}, want inputDtypes={{{2!r}: 'float64'}}, for float32 rounds them to 128 s; "
    + _TABULAR
    + _PREPROCESS
)
# What to do with columns of a type that is no number.
_HINTS: tuple[tuple[type[T.DataType], str], ...] = (
    (
        T.StringType,
        "numbers as text, as a CSV file read without its schema has them: cast({0} as double), or as bigint, which "
        "keeps all digits; categories: index them with StringIndexer; text: " + _PREPROCESS,
    ),
    (
        T.DateType,
        "take what matters as a number: a difference, datediff({0}, earlier), days since 1970, unix_date({0}), or a "
        "part, month({0}); " + _TABULAR + _PREPROCESS,
    ),
    (T.TimestampType, _TIME.replace("{1}", "cast({0} as double)")),
    (T.TimestampNTZType, _TIME.replace("{1}", "cast(cast({0} as timestamp) as double)")),
    (
        T.DayTimeIntervalType,
        "take its length in seconds, cast(cast({0} as interval second) as decimal(18, 6)); extract is one field of it",
    ),
    (T.YearMonthIntervalType, "take its length in months, cast(cast({0} as interval month) as int)"),
    (T.MapType, "take its values by key, {0}['key'], or as an array, map_values({0})"),
    (T.StructType, "name its fields, {0}.field, as columns of their own, or " + _PREPROCESS),
)


def no_tensor(data_type: T.DataType, name: str) -> ColumnError:
    """Returns the error for an input that cannot become a tensor."""
    sql = _sql(name)
    hint = "inputs are numbers, booleans, (nested) arrays of them, ML vectors or bytes"
    if isinstance(data_type, T.BinaryType):
        hint = f"set inputLayouts={{{name!r}: 'image'}} for JPEG or PNG, or 'raw' and inputDtypes for tensors"
    elif isinstance(data_type, T.ArrayType):
        cast = as_numbers(data_type, sql)
        hint = f"{_PREPROCESS}, or take a number of each element, transform({sql}, x -> ...)"
        if cast:
            hint = f"{cast}; words or categories: {_PREPROCESS}"
    elif isinstance(data_type, T.UserDefinedType) and data_type.module() == "pyspark.mllib.linalg":
        hint = f"it is a vector of spark.mllib: MLUtils.convertVectorColumnsToML(df, {name!r}) makes one of spark.ml"
    else:
        for spark_type, text in _HINTS:
            if isinstance(data_type, spark_type):
                hint = text.format(sql, "", name)
                break
    return unsuitable(data_type, name, "which cannot become a tensor", hint)


def as_numbers(data_type: T.DataType, sql: str, dtype: str = "double") -> str:
    """Returns the hint for numbers as text, or for lists of numbers as text; empty for other types.

    `sql` is the column in SQL, and `dtype` the SQL type that the text is cast to.
    """
    while isinstance(data_type, T.ArrayType):
        data_type = data_type.elementType
        dtype = f"array<{dtype}>"
    return f"numbers as text: cast({sql} as {dtype})" if isinstance(data_type, T.StringType) else ""


def no_label(data_type: T.DataType, name: str, *, classes: bool) -> ColumnError:
    """Returns the error for a label that is not a number or, unless `classes`, an array of numbers."""
    if classes:
        hint = "labels are the numbers 0, 1, ... of their classes"
        if isinstance(data_type, T.StringType):
            indexed = f"{name}_index"
            hint = (
                f"numbers of classes as text: cast({_sql(name)} as double); names: "
                f"StringIndexer(inputCol={name!r}, outputCol={indexed!r}).fit(df).transform(df), then "
                f"labelCol={indexed!r}; IndexToString turns predictions back"
            )
        elif isinstance(data_type, T.ArrayType | T.UserDefinedType):
            hint += "; TorchEstimator trains on several labels in a row"
        return unsuitable(data_type, name, "", hint, must="a number")
    hint = as_numbers(data_type, _sql(name))
    hint = f"{hint}, or as bigint for classes" if hint else "make a number of it before fit"
    return unsuitable(data_type, name, "", hint, must="a number or an array of numbers")


def no_number(data_type: T.DataType, name: str, hint: str = "") -> ColumnError:
    """Returns the error for a column that must be a number."""
    if not hint and not isinstance(data_type, T.ArrayType):
        hint = as_numbers(data_type, _sql(name))
    return unsuitable(data_type, name, "", hint, must="a number")


def no_boolean(data_type: T.DataType, name: str) -> ColumnError:
    """Returns the error for a column that must be boolean."""
    hint = "true marks validation rows"
    if isinstance(data_type, T.NumericType | T.StringType):
        hint = f"cast it: cast({_sql(name)} as boolean)"
    return unsuitable(data_type, name, "", hint, must="boolean")


def unsuitable(data_type: T.DataType, name: str, why: str, hint: str, *, must: str = "") -> ColumnError:
    """Returns the error for a column whose type does not suit; it says `why`, or what the column `must` be."""
    problem = f"must be {must}, but is {data_type.simpleString()}" if must else f"is {data_type.simpleString()}, {why}"
    return ColumnError(f"column {name!r} {problem}", hint=hint, column=name, code="ST-COLUMN-TYPE")


def _sql(name: str) -> str:
    """Returns a column name in SQL, quoted if needed."""
    return name if name.replace(".", "_").isidentifier() else quoted_name(name)
