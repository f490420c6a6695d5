"""Converts Spark SQL types, as in `TensorSpec.sql`, to Arrow types without Spark."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pyarrow as pa

__all__ = ["NUMBERS", "arrow_type", "empty_value"]

NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double")

_WORD = re.compile(r"\w+")
_NAME = re.compile(r"(`(?:[^`]|``)*`|\w+):")
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
    "timestamp": pa.timestamp("us"),
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


class _NoTypeError(Exception):
    """The text is not a supported type."""


def arrow_type(sql: str) -> pa.DataType:
    """Returns the Arrow type of a Spark SQL type; a `ValueError` says that `preprocess` does not support it."""
    try:
        kind, rest = _first(sql)
    except _NoTypeError:
        kind, rest = None, sql
    if kind is None or rest:
        raise ValueError(f"{sql!r} is no type of a column that a callable can take")
    return kind


def _first(sql: str) -> tuple[pa.DataType, str]:
    """Returns the type at the start of a text, and the rest of the text."""
    word, rest = _taken(_WORD, sql)
    if word in _PLAIN:
        return _PLAIN[word], rest
    if word not in ("array", "struct") or not rest.startswith("<"):
        raise _NoTypeError
    rest = rest[1:]
    if word == "array":
        kind, rest = _first(rest)
        return pa.list_(kind), _closed(rest)
    fields = []
    while not rest.startswith(">"):
        name, rest = _taken(_NAME, rest)
        kind, rest = _first(rest)
        rest = rest.removeprefix(",")
        name = name[:-1]  # without the colon
        fields.append((name[1:-1].replace("``", "`") if name.startswith("`") else name, kind))
    return pa.struct(fields), _closed(rest)


def _taken(pattern: re.Pattern[str], sql: str) -> tuple[str, str]:
    """Returns the match at the start of a text, and the rest of the text."""
    found = pattern.match(sql)
    if found is None:
        raise _NoTypeError
    return found[0], sql[found.end() :]


def _closed(sql: str) -> str:
    """Returns the text after its leading `>`."""
    if not sql.startswith(">"):
        raise _NoTypeError
    return sql[1:]
