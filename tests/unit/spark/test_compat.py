"""What pyspark 4.0 and older hand to a scoring function becomes what was sent, in the time zone that the task knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import TaskContext

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError
from sparktorch.spark.compat import from_pandas
from sparktorch.spark.zone import zone_in_udf

DAY = date(2020, 1, 31)
MICROSECOND = 1_600_000_000_000_001  # a timestamp, as `for_pandas` sends it

VECTOR = "struct<type:tinyint,size:int,indices:array<int>,values:array<double>>"

CASES: dict[str, list[Any]] = {
    "boolean": [True, None],
    "binary": [b"a", None],
    "date": [DAY, None],
    "timestamp": [MICROSECOND, None],
    "array<bigint>": [[1, None], None],
    "array<array<string>>": [[["a"], [], None], None],
    "array<struct<a:int,t:timestamp>>": [[{"a": 1, "t": MICROSECOND}]],
    "struct<size:string,data:double>": [{"size": "xl", "data": 1.5}, None],
    "struct<indices:array<bigint>,t:timestamp>": [{"indices": [1], "t": MICROSECOND}],
}


def in_pandas(column: pa.Array) -> Any:
    """Returns a column as pyspark's workers have it."""
    if not pa.types.is_struct(column.type):
        return column.to_pandas(date_as_object=True)
    fields = zip(column.flatten(), column.type, strict=True)
    return pd.concat([values.to_pandas(date_as_object=True).rename(field.name) for values, field in fields], axis=1)


def sent_back(column: pa.Array, spec: TensorSpec) -> pa.Array:
    """Returns what a scoring function is given for a column."""
    (found,) = from_pandas(in_pandas(column), [spec])
    return found


@pytest.mark.parametrize("sql", CASES)
def test_a_column_for_a_callable_has_its_type_and_values_whatever_pandas_makes_of_it(sql: str) -> None:
    kind = arrow_type(sql)
    column = pa.array(CASES[sql], arrow_type(sql.replace("timestamp", "bigint")))
    found = sent_back(column, TensorSpec(name="x0", column="c", dtype="float32", kind="any", sql=sql))
    assert found.type == kind
    assert found.equals(column.cast(kind))


@pytest.mark.parametrize("sql", ["timestamp", "date", "timestamp_ntz", "array<timestamp>"])
def test_a_function_in_sql_refuses_numbers_and_text_for_times(sql: str) -> None:
    spec = TensorSpec(name="x0", column="c", dtype="float32", kind="any", sql=sql)
    for value in (1_704_164_645_250, *(() if "array" in sql else ("2024-01-02",))):
        (column,) = from_pandas(pd.Series([[value] if "array" in sql else value, None]), [spec], for_sql=True)
        with pytest.raises(ColumnError, match="but the model was fitted on"):
            kind_of(spec).as_fitted(column, spec)


@pytest.mark.parametrize(("zone", "hour"), [("UTC", 3), ("America/New_York", 8)])
def test_a_function_in_sql_gets_timestamps_that_pandas_has_in_the_sessions_time_zone(zone: str, hour: int) -> None:
    task = TaskContext._getOrCreate()
    task._localProperties = {"spark.sql.session.timeZone": zone, "spark.sql.execution.id": "1"}
    try:
        at = pd.Series(pd.to_datetime(["2024-01-02 03:00", None]))
        lists = pd.Series([[pd.Timestamp("2024-01-02 03:00")], None])
        for sql, column in {"timestamp": at, "array<timestamp>": lists, "timestamp_ntz": at}.items():
            (found,) = from_pandas(column, [TensorSpec(name="x0", column="c", dtype="float32", kind="any", sql=sql)])
            expected = (
                pd.Timestamp("2024-01-02 03:00") if sql.endswith("ntz") else pd.Timestamp(f"2024-01-02 {hour}:00Z")
            )
            value = found[0].as_py()
            assert [value[0] if isinstance(value, list) else value, found[1].as_py()] == [expected, None]
    finally:
        TaskContext._setTaskContext(None)


def test_numbers_have_the_type_of_their_input_also_where_all_are_null() -> None:
    ids = TensorSpec(name="x0", column="c", dtype="int64")
    assert sent_back(pa.array([1, None]), ids).equals(pa.array([1, None]))
    lists = TensorSpec(name="x0", column="c", dtype="float32", shape=(2,))
    for rows in ([None, None], [[1.5, None], None]):
        column = pa.array(rows, pa.list_(pa.float32()))
        assert sent_back(column, lists).equals(column)


def test_a_function_in_sql_may_get_numbers_of_another_type() -> None:
    ids = TensorSpec(name="x0", column="c", dtype="int64")
    assert sent_back(pa.array([1.5, None]), ids).to_pylist() == [1.5, None]


def test_a_function_in_sql_may_get_vectors_where_the_model_was_fitted_on_arrays() -> None:
    lists = TensorSpec(name="x0", column="c", dtype="float32", shape=(2,))
    vector = {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}
    (found,) = sent_back(pa.array([vector], arrow_type(VECTOR)), lists).to_pylist()
    assert found == vector


def test_a_function_in_sql_takes_its_columns_in_the_order_of_the_user() -> None:
    pair = TensorSpec(name="x0", column="a ... c", dtype="float32", shape=(2,), sources=("a", "c"), places=(0, 2))
    text = TensorSpec(name="x1", column="b", dtype="float32", kind="any", sql="string")
    numbers = [in_pandas(pa.array([value])) for value in (1.5, 2.5)]
    found = from_pandas((numbers[0], in_pandas(pa.array(["word"])), numbers[1]), [pair, text])
    assert [column.to_pylist() for column in found] == [[1.5], [2.5], ["word"]]


@pytest.mark.parametrize("given", [0, 4])
def test_a_function_in_sql_names_its_columns_when_it_gets_another_number(given: int) -> None:
    pair = TensorSpec(name="x0", column="a ... c", dtype="float32", shape=(2,), sources=("a", "c"), places=(0, 2))
    ids = TensorSpec(name="x1", column="b", dtype="int64")
    with pytest.raises(ColumnError, match=f"takes 3 columns, and got {given}\n.*give it a, b, c, in this order"):
        from_pandas((in_pandas(pa.array([1.0])),) * given, [pair, ids])


UTC = timezone.utc


@pytest.fixture
def task() -> Iterator[Callable[[dict[str, str]], None]]:
    def begins(properties: dict[str, str]) -> None:
        TaskContext._getOrCreate()._localProperties = properties

    yield begins
    TaskContext._setTaskContext(None)


def test_outside_of_a_task_the_zone_is_the_callers() -> None:
    assert zone_in_udf("UTC") is UTC


def test_in_a_udf_the_zone_is_the_sessions(task: Callable[[dict[str, str]], None]) -> None:
    summer = datetime(2024, 7, 1)
    for name, hours in {"America/New_York": -4, "+05:30": 5.5, "Z": 0, "GMT-3": -3, "Asia/Kolkata": 5.5}.items():
        task({"spark.sql.execution.id": "1", "spark.sql.session.timeZone": name})
        zone = zone_in_udf("UTC")
        assert zone.utcoffset(summer) == timedelta(hours=hours)
    task({"spark.sql.session.timeZone": "PST", "spark.sql.execution.id": "1"})
    with pytest.raises(ValueError, match="'PST' is no time zone that Python has"):
        zone_in_udf("UTC")


def test_a_task_that_was_sent_no_zone_does_not_guess_its_sessions(task: Callable[[dict[str, str]], None]) -> None:
    for properties in ({}, {"spark.sql.execution.id": "1"}):
        task(properties)
        with pytest.raises(ColumnError, match="does not know that of its session") as refused:
            zone_in_udf("UTC")
        assert "model_config={'time_zone': 'UTC'}" in refused.value.hint
