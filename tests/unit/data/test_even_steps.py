"""Which columns of integers, dates and timestamps have even steps, and what follows them."""

from __future__ import annotations

from datetime import date, datetime

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


@pytest.mark.parametrize("moved_to", ["03:00", "03:30"])  # by pandas, and by Spark
def test_a_time_of_the_day_that_clocks_skip_is_no_uneven_step(moved_to: str) -> None:
    zone = "America/New_York"
    nights = [f"2024-03-{day:02} {moved_to if day == 10 else '02:30'}" for day in range(5, 20)]
    column = pa.array(pd.DatetimeIndex(nights).tz_localize(zone).astype(f"datetime64[us, {zone}]"))
    for rows in (*range(2, 5), *range(7, 15)):
        assert not len(steps_of(column[:rows]).uneven)
    places = np.asarray(column.cast(pa.int64()))
    others = np.asarray(pa.array(pd.date_range("2024-03-01", periods=40, tz=zone).as_unit("us")).cast(pa.int64()))
    both = np.concatenate([others, places, np.delete(places, 8)])
    firsts = np.array([0, len(others), len(others) + len(places)])
    assert after_uneven(both, firsts, ("timestamp", zone)).tolist() == [firsts[2] + 8]


def test_a_forecast_of_a_time_that_clocks_skip_is_where_spark_has_it() -> None:
    zone = "America/New_York"
    nights = pd.DatetimeIndex([f"2024-03-{day:02} 02:30" for day in (7, 8, 9)]).tz_localize(zone)
    (first, second) = after(pa.array(nights.astype(f"datetime64[us, {zone}]")), 2).to_pylist()
    assert (first.strftime("%d %H:%M"), second.strftime("%d %H:%M")) == ("10 03:30", "11 02:30")


def test_many_groups_with_gaps_are_looked_at_together_and_count_as_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, rows, beats = 4_000, 40, []
    numbers = np.tile(np.delete(np.arange(rows + 1), 20), groups)
    monkeypatch.setattr("sparktorch.data.sampling.even_steps._ROWS", 10_000)
    monkeypatch.setattr("sparktorch.data.sampling.even_steps.steps_of", None)  # of one group
    found = after_uneven(numbers, rows * np.arange(groups), ("date", "UTC"), moved=lambda: beats.append(1))
    assert found.tolist() == (rows * np.arange(groups) + 20).tolist()
    assert len(beats) == 17


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
