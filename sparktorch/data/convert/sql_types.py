"""Converts Spark SQL types, as in `TensorSpec.sql`, to Arrow types without Spark; timestamps have the time zone UTC."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pyarrow as pa

__all__ = ["NUMBERS", "arrow_type", "empty_value"]

NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double")

_TOKEN = re.compile(r"`(?:[^`]|``)*`|\w+|\S")
_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def empty_value(kind: pa.DataType) -> Any:
    """Returns the empty value of an Arrow type: 0, an empty string or list, or the first day of 1970."""
    if pa.types.is_struct(kind):
        return {field.name: empty_value(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return []
    if pa.types.is_temporal(kind):
        return datetime(1970, 1, 1)
    if pa.types.is_primitive(kind):
        return kind.to_pandas_dtype()(0).item()
    return b"" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else ""


def arrow_type(sql: str) -> pa.DataType:
    """Returns the Arrow type of a Spark SQL type; a `ValueError` says that `preprocess` does not support it."""
    rest = _TOKEN.findall(sql)[::-1]  # The first token is last, where `pop` takes it.
    try:
        kind = _pop_type(rest)
    except (KeyError, IndexError):  # A word is unknown, or the text ends early.
        kind = None
    if kind is None or rest:
        raise ValueError(f"{sql!r} is no type of a column that a callable can take")
    return kind


def _pop_type(rest: list[str]) -> pa.DataType:
    """Removes the tokens of a type from the end of a list, and returns the type."""
    word = rest.pop()
    if word not in ("array", "struct"):
        return _PLAIN[word]
    fields = []
    rest.pop()  # It is "<".
    while rest[-1] != ">":
        name = ""
        if word == "struct":
            name = rest.pop()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            rest.pop()  # It is ":".
        fields.append((name, _pop_type(rest)))
        if rest[-1] == ",":
            rest.pop()
    rest.pop()  # It is ">".
    return pa.list_(fields[0][1]) if word == "array" else pa.struct(fields)
