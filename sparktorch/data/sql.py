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


def arrow_type(sql: str) -> pa.DataType:
    """Returns Arrow's type for one of Spark's, such as `array<struct<a:int,b:string>>`.

    Raises:
        ValueError: It is none that a column for a callable can have.
    """
    try:
        kind, rest = _first(sql)
    except (TypeError, KeyError):  # something else stands where a word or a name should
        kind, rest = None, sql
    if kind is None or rest:
        raise ValueError(f"{sql!r} is no type of a column that a callable can take")
    return kind


def _first(sql: str) -> tuple[pa.DataType, str]:
    """Returns the type that a text begins with, and what comes behind it."""
    word = _WORD.match(sql)[0]  # type: ignore[index]
    rest = sql[len(word) + 1 :]  # without the bracket
    if word == "array":
        kind, rest = _first(rest)
        return pa.list_(kind), rest[1:]
    if word != "struct":
        return _PLAIN[word], sql[len(word) :]
    fields = []
    while not rest.startswith(">"):
        name = _NAME.match(rest)[1]  # type: ignore[index]
        kind, rest = _first(rest[len(name) + 1 :])
        rest = rest.removeprefix(",")
        fields.append((name[1:-1].replace("``", "`") if name.startswith("`") else name, kind))
    return pa.struct(fields), rest[1:]
