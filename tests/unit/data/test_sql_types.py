"""Types in Spark's words, read where there is no Spark."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparktorch.data.convert.sql_types import arrow_type


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("tinyint", pa.int8()),
        ("timestamp_ntz", pa.timestamp("us")),
        ("array<array<double>>", pa.list_(pa.list_(pa.float64()))),
        ("struct<>", pa.struct([])),
        (
            "array<struct<a:int,b:array<struct<c:string>>,d:boolean>>",
            pa.list_(pa.struct({"a": pa.int32(), "b": pa.list_(pa.struct({"c": pa.string()})), "d": pa.bool_()})),
        ),
        ("struct<`my-field`:int,`a:b,``>`:date>", pa.struct({"my-field": pa.int32(), "a:b,`>": pa.date32()})),
    ],
)
def test_a_type_is_read_however_deep(sql: str, expected: pa.DataType) -> None:
    assert arrow_type(sql) == expected


@pytest.mark.parametrize("sql", ["", "map<string,int>", "array<interval day>", "array<int"])
def test_what_is_no_such_type_is_refused(sql: str) -> None:
    with pytest.raises(ValueError, match="is no type of a column that a callable can take"):
        arrow_type(sql)
