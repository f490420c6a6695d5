"""Which columns of integers, dates and timestamps have even steps, and what follows them."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sparktorch.data.sampling.even_steps import after_uneven, steps_of


def after(column: pa.Array, rows: int) -> pa.Array:
    steps = steps_of(column)
    assert not len(steps.uneven)
    found = steps.after(len(column) - 1, rows)
    assert found.type == column.type
    return found


@pytest.mark.parametrize(
    "frequency", ["15min", "h", "90min", "12h", "D", "7D", "W", "MS", "ME", "QS", "QE", "YS", "2ME"]
)
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"])
@pytest.mark.parametrize("rows", [3, 24])
def test_times_go_on_as_the_calendar_of_pandas_does(frequency: str, zone: str | None, rows: int) -> None:
    every = pd.date_range("2024-03-08", periods=rows + 60, freq=frequency, tz=zone)  # into and out of summer time
    column = pa.array(every[:rows].astype(f"datetime64[us{f', {zone}' if zone else ''}]"))
    assert after(column, 60).to_pylist() == every[rows:].to_pydatetime().tolist()


@pytest.mark.parametrize(
    ("zone", "skipped"),
    [("Africa/Cairo", "2024-04-26"), ("Asia/Beirut", "2024-03-31"), ("America/Sao_Paulo", "2018-11-04")],
)
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_day_without_a_midnight_begins_when_its_clocks_do(zone: str, skipped: str, before: int) -> None:
    midnights = pa.array(pd.date_range(pd.Timestamp(skipped) - pd.Timedelta(days=before), periods=12).to_pydatetime())
    days = pc.assume_timezone(midnights, zone, nonexistent="latest")
    assert days[before].as_py().hour == 1
    for rows in range(2, 11):
        assert after(days[:rows], 12 - rows).equals(days[rows:])


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint16()])
def test_integers_go_on_by_their_step(kind: pa.DataType) -> None:
    assert after(pa.array([10, 13, 16], kind), 2).to_pylist() == [19, 22]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
def test_dates_go_on_by_days_or_by_months(kind: pa.DataType) -> None:
    days = pa.array([date(2024, 2, 27), date(2024, 2, 28)]).cast(kind)
    assert after(days, 2).to_pylist() == [date(2024, 2, 29), date(2024, 3, 1)]
    july = pa.array([date(2024, 7, 1), date(2024, 8, 1), date(2024, 9, 1)]).cast(kind)  # 31 days each
    assert after(july, 2).to_pylist() == [date(2024, 10, 1), date(2024, 11, 1)]


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1, 2, 3, 5, 6], [3]),
        ([1, 2, 2, 3], [2]),
        ([1, 1], [1]),
        ([0, 2, 3, 4, 9, 10], [1, 4]),
        ([datetime(2024, 1, 1), datetime(2024, 1, 2), datetime(2024, 1, 3, 1)], [2]),
        ([date(2024, 1, 1), date(2024, 2, 1), date(2024, 4, 1), date(2024, 5, 1)], [2]),
        ([date(2024, 1, 31), date(2024, 2, 29), date(2024, 4, 30), date(2024, 5, 31)], [2]),
    ],
)
def test_uneven_steps_are_told_by_the_row_after_them(values: list[object], places: list[int]) -> None:
    assert steps_of(pa.array(values)).uneven.tolist() == places


@pytest.mark.parametrize("day", [29, 30])
def test_days_that_not_all_months_have_are_no_even_steps(day: int) -> None:
    months = pa.array([date(2024, month, day) for month in range(3, 8)])
    assert len(steps_of(months).uneven)


def test_of_many_groups_those_with_gaps_alone_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    zone, looked = "Europe/Berlin", []
    starts = [pd.Timestamp("2024-01-01") + pd.Timedelta(days=place) for place in range(200)]
    times = [pd.date_range(start, periods=100, freq="D", tz=zone) for start in starts]
    times += [pd.date_range("2024-01-31", periods=100, freq=frequency, tz=zone) for frequency in ("ME", "MS", "h")]
    times += [times[0].delete(50), pd.date_range("2024-01-01", periods=2, tz=zone)]
    places = [np.asarray(of.as_unit("us").asi8) for of in times]
    firsts = np.cumsum([0, *map(len, places[:-1])])

    def look(column: pa.Array) -> Any:
        looked.append(len(column))
        return steps_of(column)

    monkeypatch.setattr("sparktorch.data.sampling.even_steps.steps_of", look)
    found = after_uneven(np.concatenate(places), firsts, ("timestamp", zone))
    assert found.tolist() == [firsts[-2] + 50]
    assert looked == [99]


@pytest.mark.parametrize("rows", [50, 1 << 20])
@pytest.mark.parametrize("frequency", ["h", "D", "MS", "ME"])
@pytest.mark.parametrize("zone", ["UTC", "Africa/Cairo", "America/New_York"])
def test_groups_have_the_uneven_steps_that_each_has_alone(
    frequency: str, zone: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.data.sampling.even_steps._ROWS", rows)
    draw, places, want, start = np.random.default_rng(0), [], [], 0
    for _ in range(40):
        times = pd.date_range("2024-03-01", periods=draw.integers(2, 60), freq=frequency)
        times = times.tz_localize(zone, nonexistent="shift_forward", ambiguous=True)
        times = times.delete(draw.integers(0, len(times), draw.integers(0, 2))) if len(times) > 3 else times
        column = pa.array(times.astype(f"datetime64[us, {zone}]"))
        places.append(np.asarray(column.cast(pa.int64())))
        want += (start + steps_of(column).uneven).tolist()
        start += len(column)
    firsts = np.cumsum([0, *map(len, places[:-1])])
    assert after_uneven(np.concatenate(places), firsts, ("timestamp", zone)).tolist() == want
