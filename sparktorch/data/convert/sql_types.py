"""Types in Spark's words, as the specs of columns for a callable keep them, where there is no Spark."""

from __future__ import annotations

import re

import pyarrow as pa

__all__ = ["arrow_type"]

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


class _NoTypeError(Exception):
    """Something else stands where a type should."""


def arrow_type(sql: str) -> pa.DataType:
    """Returns Arrow's type for one of Spark's, such as `array<struct<a:int,b:string>>`.

    Raises:
        ValueError: It is none that a column for a callable can have.
    """
    try:
        kind, rest = _first(sql)
    except _NoTypeError:
        kind, rest = None, sql
    if kind is None or rest:
        raise ValueError(f"{sql!r} is no type of a column that a callable can take")
    return kind


def _first(sql: str) -> tuple[pa.DataType, str]:
    """Returns the type that a text begins with, and what comes behind it."""
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
    """Returns what a text begins with, and what comes behind it."""
    found = pattern.match(sql)
    if found is None:
        raise _NoTypeError
    return found[0], sql[found.end() :]


def _closed(sql: str) -> str:
    """Returns what comes behind the bracket that a text begins with."""
    if not sql.startswith(">"):
        raise _NoTypeError
    return sql[1:]
