"""Which time a value is: with a zone and without, in the zone of this process, and where clocks go back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.convert.values import in_utc, values_as, zone_named
from sparktorch.data.fields.arrow import ArrowColumn
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError, ConfigError

INSTANT = pa.timestamp("us", "UTC")
NEW_YORK = zone_named("America/New_York")
UTC = timezone.utc


def instants(values: Any, zone: Any = UTC, kind: pa.DataType = INSTANT) -> list[Any]:
    results = values_as(kind, values, zone).to_pylist()
    return [None if value is None else value.replace(tzinfo=None) for value in results]


@pytest.mark.parametrize(
    ("value", "utc"),
    [
        ("2024-01-02", datetime(2024, 1, 2)),
        ("2024-01-02T03:04", datetime(2024, 1, 2, 3, 4)),
        ("2024-01-02 03:04:05", datetime(2024, 1, 2, 3, 4, 5)),
        ("2024-01-02T03:04:05.5", datetime(2024, 1, 2, 3, 4, 5, 500_000)),
        ("2024-01-02T03:04:05.123456789Z", datetime(2024, 1, 2, 3, 4, 5, 123_456)),
        ("2024-01-02T03:04:05-0530", datetime(2024, 1, 2, 8, 34, 5)),
        ("2024-01-02 03:04:05 +02", datetime(2024, 1, 2, 1, 4, 5)),
        ("9999-12-31", datetime(9999, 12, 31)),
        (date(2024, 1, 2), datetime(2024, 1, 2)),
        (np.datetime64("2024-01-02T03"), datetime(2024, 1, 2, 3)),
        (pd.Timestamp("2024-01-02 03:04:05.123456789"), datetime(2024, 1, 2, 3, 4, 5, 123_456)),
        (pd.Timestamp("2024-01-02 03:00", tz="Asia/Kolkata"), datetime(2024, 1, 1, 21, 30)),
        *((missing, None) for missing in (None, float("nan"), pd.NaT, pd.NA, np.datetime64("NaT"))),
    ],
)
def test_a_value_is_one_instant(value: Any, utc: datetime | None) -> None:
    assert instants([value]) == [utc]
    assert instants(pd.Series([value, "2024-01-02T03:04:05Z"], dtype=object))[0] == utc


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata"])
def test_a_column_of_pandas_is_read_as_its_values_are(unit: str, zone: str | None) -> None:
    column = pd.Series(pd.to_datetime(["2024-01-02 03:04:05", None, "1969-12-31 23:59:59"])).astype(f"M8[{unit}]")
    column = column.dt.tz_localize(zone) if zone else column
    for outside in (UTC, NEW_YORK):
        assert instants(column, outside) == instants(list(column), outside)
    for kind in (column.dtype, pd.ArrowDtype(pa.timestamp(unit, zone))):
        of_kind = column.astype(kind)
        if zone is None:
            clock = instants(of_kind, NEW_YORK, pa.timestamp("us"))
            assert clock == [datetime(2024, 1, 2, 3, 4, 5), None, datetime(1969, 12, 31, 23, 59, 59)]
            continue
        with pytest.raises(TypeError, match="has a time zone"):
            instants(of_kind, UTC, pa.timestamp("us"))
        assert instants(of_kind, NEW_YORK) == instants(column)


def test_times_without_a_zone_are_in_the_one_that_is_named() -> None:
    assert instants(["2024-01-02 00:00", "2024-07-02"], NEW_YORK) == [datetime(2024, 1, 2, 5), datetime(2024, 7, 2, 4)]
    assert instants(["2024-01-02T00:00Z"], NEW_YORK) == [datetime(2024, 1, 2)]
    # An hour that comes twice is the first one, and one that clocks skip is an hour later, as in Spark.
    twice, never = datetime(2024, 11, 3, 1, 30), datetime(2024, 3, 10, 2, 30)
    assert instants([twice, never], NEW_YORK) == [datetime(2024, 11, 3, 5, 30), datetime(2024, 3, 10, 7, 30)]


def test_dates_and_clocks_without_a_zone_do_not_move() -> None:
    evening = pd.Timestamp("2024-01-02 23:00", tz="America/New_York")
    days = values_as(
        pa.date32(), [evening, "2024-01-02T23:00:00Z", date(2024, 1, 2), datetime(2024, 1, 2, 5)], NEW_YORK
    )
    assert days.to_pylist() == [date(2024, 1, 2)] * 4
    column = pd.Series(pd.to_datetime(["2024-01-02 23:00"]))
    for values in (column, ["2024-01-02 23:00"]):
        assert instants(values, NEW_YORK, pa.timestamp("us")) == [datetime(2024, 1, 2, 23)]


@pytest.fixture
def in_kolkata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_kolkata")
def test_a_row_of_spark_has_times_in_the_zone_of_its_process() -> None:
    spec = TensorSpec(
        name="x0", column="at", dtype="float32", kind="any", sql="struct<at:timestamp,wall:timestamp_ntz>"
    )
    instant = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    row = {"at": datetime.fromtimestamp(instant.timestamp()), "wall": datetime(2024, 1, 2, 3)}  # as `collect` makes it
    assert kind_of(spec).of_value(row, spec).to_pylist() == [{"at": instant, "wall": datetime(2024, 1, 2, 3)}]


@pytest.mark.parametrize("end", [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)])
def test_the_ends_of_the_calendar_are_times_of_this_process(end: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert instants([end], None) == [end]
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("text", ["2024-01-02T03:04:05+25:00", "2024-01-02T03:04.5"])
def test_other_text_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time as ISO 8601 writes it"):
        instants([text])


def test_utc_needs_no_file_and_what_python_does_not_have_is_named() -> None:
    assert {zone_named(name) for name in ("UTC", "Z", "UT", "GMT")} == {UTC}
    assert zone_named("+08:00:00").utcoffset(None) == timedelta(hours=8)
    with pytest.raises(ConfigError, match="'PST' is no time zone that Python has") as refused:
        zone_named("PST")
    assert "America/Los_Angeles" in refused.value.hint


def test_a_number_that_is_none_is_no_null_in_a_row_of_spark() -> None:
    spec = TensorSpec(name="x0", column="s", dtype="float32", kind="any", sql="struct<a:double,b:double>")
    (row,) = kind_of(spec).of_value({"a": float("nan"), "b": None}, spec).to_pylist()
    assert np.isnan(row["a"])
    assert row["b"] is None


@pytest.mark.parametrize(
    ("sql", "right", "wrong"),
    [
        ("array<timestamp>", pa.list_(pa.timestamp("us", "America/New_York")), pa.list_(pa.int64())),
        ("struct<at:timestamp>", pa.struct([("when", INSTANT)]), pa.struct([("at", pa.string())])),
        ("array<date>", pa.list_(pa.null()), pa.list_(INSTANT)),
    ],
)
def test_what_is_no_time_is_refused_at_any_depth(sql: str, right: pa.DataType, wrong: pa.DataType) -> None:
    spec = TensorSpec(name="x0", column="at", dtype="float32", kind="any", sql=sql)
    column = pa.array([None], right)
    assert kind_of(spec).as_fitted(column, spec) is column
    with pytest.raises(ColumnError, match="but the model was fitted on"):
        kind_of(spec).as_fitted(pa.array([None], wrong), spec)


@pytest.mark.parametrize("sql", ["timestamp", "array<timestamp>", "array<struct<a:array<timestamp>,b:string>>"])
def test_whatever_zone_spark_sends_a_callable_gets_utc_at_any_depth(sql: str) -> None:
    instant = datetime(2024, 1, 2, 3, tzinfo=UTC)
    value = {"timestamp": instant, "array<timestamp>": [instant]}.get(sql, [{"a": [instant], "b": "x"}])
    kind = arrow_type(sql)
    spec = TensorSpec(name="x0", column="at", dtype="float32", kind="any", sql=sql, nulls=True)
    for zone in ("UTC", "America/New_York", "+05:30"):
        sent = pa.array([value, None]).cast(_in_zone(kind, zone))
        field = ArrowColumn(spec, RowStorage())
        field.append(sent)
        field.finish()
        (results,) = field.part(0, 2)
        assert in_utc(results.type) == results.type
        assert "tz=UTC" in str(results.type)
        assert results.to_pylist() == [value, None]


def _in_zone(kind: pa.DataType, zone: str) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_in_zone(kind.value_type, zone))
    return pa.timestamp("us", zone) if pa.types.is_timestamp(kind) else kind
