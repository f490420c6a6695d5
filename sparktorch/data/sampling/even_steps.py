"""Columns that order the rows of a series: whether their steps are even, and the values that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.base.no_op import no_op

__all__ = ["Steps", "after_uneven", "steps_of", "typed"]

_DAY = 86_400_000_000  # The number of microseconds in a day.
_NO_REST = np.iinfo(np.int64).min  # The rest of a value that a scale does not have.
_ROWS = 1 << 20  # About this number of rows, of many groups, is looked at in one go.

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Steps(NamedTuple):
    """A column as whole numbers on a scale on which most of its steps are even.

    Attributes:
        counts: The values as whole numbers, int64 of shape `(rows,)`.
        step: The usual step between two rows.
        uneven: Numbers of the rows that are not one step after the row before, int64.
        values: Converts whole numbers back to values of the column's type.
    """

    counts: Int64
    step: int
    uneven: Int64
    values: Callable[[Int64], pa.Array]

    def after(self, row: int, rows: int) -> pa.Array:
        """Returns the values of the `rows` rows that follow a row."""
        return self.values(self.counts[row] + self.step * np.arange(1, rows + 1))


class _Scale(NamedTuple):
    """Values as whole numbers, such as months, and a rest for each value, such as the time since the month began.

    Attributes:
        counts: The whole number of each value.
        divisor: An even step is a multiple of it.
        values: Converts a rest and whole numbers back to values.
        rest: The rest of each value, `_NO_REST` for a value that is not on the scale. All values of a series with even
            steps have the same rest.
    """

    counts: Int64
    divisor: int
    values: Callable[[int, Int64], pa.Array]
    rest: Int64

    def measure(self, rows: _Rows) -> _Measure:
        """Returns the steps of each group on this scale."""
        uneven = np.zeros(len(self.counts), np.bool_)
        # A group fits a scale on which all its values have the same rest.
        fits = np.ones(len(rows.firsts), np.bool_)
        rest_of_first = self.rest[rows.firsts][rows.group]
        fits[rows.group[(self.rest == _NO_REST) | (self.rest != rest_of_first)]] = False
        if not fits.any():
            return _Measure(np.zeros_like(rows.firsts), uneven, fits)
        steps = np.diff(self.counts)[rows.follows]
        group = rows.group[1:][rows.follows]
        # Each group has one step less than it has rows, so the first step of group `i` is at `firsts[i] - i`.
        usual = _most_frequent(steps, group, rows.firsts - np.arange(len(rows.firsts)))
        has_no_even_step = (usual <= 0) | (usual % self.divisor != 0)
        uneven[1:][rows.follows] = has_no_even_step[group] | (steps != usual[group])
        return _Measure(usual, uneven, fits)


class _Measure(NamedTuple):
    """The steps of groups on a scale.

    Attributes:
        usual: The usual step of each group.
        uneven: Whether each row is not the usual step after the row before it in its group.
        fits: Whether the values of each group are on the scale.
    """

    usual: Int64
    uneven: Mask
    fits: Mask


class _Rows:
    """Which rows belong to which group.

    Attributes:
        firsts: The number of each group's first row.
        group: The number of each row's group.
        follows: Whether each row, from the second on, is in the group of the row before.
    """

    def __init__(self, sizes: Int64) -> None:
        """Takes the number of rows of each group, at least two."""
        self.firsts = np.cumsum(sizes) - sizes
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.follows = self.group[1:] == self.group[:-1]


def _most_frequent(values: Int64, group: Int64, firsts: Int64) -> Int64:
    """Returns the most frequent value of each group, the smallest if there are several; groups begin at `firsts`."""
    first = values[firsts]
    if (values == first[group]).all():
        return first
    order = np.lexsort((values, group))
    values = values[order]
    group = group[order]
    # Now equal values of a group are adjacent; `begins` is where each value begins.
    begins = np.flatnonzero(np.append(True, (values[1:] != values[:-1]) | (group[1:] != group[:-1])))
    times = np.diff(np.append(begins, len(values)))
    values = values[begins]
    group = group[begins]
    # In this order, the first value of each group is its most frequent one.
    best_first = np.lexsort((values, -times, group))
    first_of_groups = np.flatnonzero(np.append(True, np.diff(group[best_first]) > 0))
    most_frequent: Int64 = values[best_first[first_of_groups]]
    return most_frequent


def _groups_with_bends(counts: Int64, firsts: Int64) -> Int64:
    """Returns the numbers of the groups in which steps differ; groups begin at `firsts`."""
    steps = np.diff(counts)
    # A bend is a row after which the step differs from the step before it.
    bends = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    # It counts only if both steps are within one group.
    group_before = np.searchsorted(firsts, bends - 1, side="right") - 1
    group_after = np.searchsorted(firsts, bends + 1, side="right") - 1
    return np.unique(group_before[group_before == group_after])


def _as_integers(column: pa.Array) -> Int64:
    """Returns a column of integers, dates or timestamps as int64, in days or microseconds."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz))
    elif pa.types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32())
    return np.asarray(column.cast(pa.int64()))


def steps_of(column: pa.Array) -> Steps:
    """Returns the steps of an ascending column, on the scale on which the fewest are uneven.

    Integers step by a number, dates by days or by calendar months, and timestamps by a duration, by days of the local
    calendar if they have a time zone, or by months. Months are counted from one of their first 28 days, or from their
    last. The column has two values at least.
    """
    rows = _Rows(np.array([len(column)]))
    candidates = []
    for scale in _scales(column, rows):
        measure = scale.measure(rows)
        if measure.fits[0]:
            values = partial(scale.values, int(scale.rest[0]))
            candidates.append(Steps(scale.counts, int(measure.usual[0]), np.flatnonzero(measure.uneven), values))
    # If several scales have the fewest uneven steps, `min` takes the first, which has the longest steps.
    return min(candidates, key=lambda steps: len(steps.uneven))


def after_uneven(order: Int64, firsts: Int64, kind: tuple[str, str], moved: Callable[[], object] = no_op) -> Int64:
    """Returns the numbers of the rows that do not follow the row before in their group by an even step.

    Args:
        order: The order of the rows, ascending in each group: integers, days or microseconds, int64.
        firsts: The number of the first row of each group.
        kind: SQL type and time zone of the order.
        moved: It is called after each million of rows, to report progress.
    """
    # In all other groups, all steps are the same.
    groups = _groups_with_bends(order, firsts)
    if not len(groups):
        return np.empty(0, np.int64)
    sizes = np.append(firsts[1:], len(order)) - firsts
    uneven_rows = []
    for groups_at_once in np.array_split(groups, 1 + int(sizes[groups].sum()) // _ROWS):
        rows = _Rows(sizes[groups_at_once])
        # The number of each of these rows among all rows.
        numbers = (firsts[groups_at_once] - rows.firsts)[rows.group] + np.arange(len(rows.group))
        uneven = np.zeros(len(numbers), np.bool_)
        fewest = np.full(len(groups_at_once), np.iinfo(np.int64).max)
        for scale in _scales(typed(order[numbers], kind), rows):
            measure = scale.measure(rows)
            count = np.add.reduceat(measure.uneven, rows.firsts, dtype=np.int64)
            better = measure.fits & (count < fewest)  # The first of several scales wins.
            fewest = np.where(better, count, fewest)
            uneven = np.where(better[rows.group], measure.uneven, uneven)
        uneven_rows.append(numbers[uneven])
        moved()
    return np.concatenate(uneven_rows)


def typed(order: Int64, kind: tuple[str, str]) -> pa.Array:
    """Returns int64 values of an order as a column of its SQL type, in its time zone."""
    sql, zone = kind
    if sql == "date":
        return pa.array(order.astype(np.int32)).cast(pa.date32())
    if sql.startswith("timestamp"):
        return pa.array(order).cast(pa.timestamp("us", zone if sql == "timestamp" else None))
    return pa.array(order)


def _scales(column: pa.Array, rows: _Rows) -> Iterator[_Scale]:
    """Yields the values of groups on each scale for their type; scales with longer steps come first."""
    kind = column.type
    no_rest = np.zeros(len(column), np.int64)
    if pa.types.is_integer(kind):

        def integers(rest: int, counts: Int64) -> pa.Array:
            return pa.array(counts).cast(kind)

        yield _Scale(_as_integers(column), 1, integers, no_rest)
        return
    if pa.types.is_date(kind):
        instants = _as_integers(column) * _DAY

        def dates(rest: int, counts: Int64) -> pa.Array:
            return pa.array(((counts + rest) // _DAY).astype(np.int32)).cast(pa.date32()).cast(kind)

        yield from _months(instants, dates)
        yield _Scale(instants, _DAY, dates, no_rest)
        return

    def timestamps(rest: int, counts: Int64) -> pa.Array:
        return pa.array(counts + rest).cast(pa.timestamp("us", kind.tz)).cast(kind)

    def local_timestamps(rest: int, counts: Int64) -> pa.Array:
        if kind.tz is None:
            return timestamps(rest, counts)
        instants, _ = _instants(counts + rest, kind.tz)
        return pa.array(instants).cast(pa.timestamp("us", kind.tz)).cast(kind)

    instants = _as_integers(column)
    local_times = instants if kind.tz is None else _local_times(column, rows)
    yield from _months(local_times, local_timestamps)
    yield _Scale(local_times, _DAY, local_timestamps, no_rest)
    yield _Scale(instants, 1, timestamps, no_rest)


def _instants(local_times: Int64, zone: str) -> tuple[Int64, Int64]:
    """Returns the instants of local times, as Spark reads them, and as pandas may read them.

    They differ for times that clocks skip. Where clocks go from two to three, 02:30 is 03:30 to Spark, and 03:00 to
    `nonexistent="shift_forward"` of pandas.
    """
    times = pa.array(local_times).cast(pa.timestamp("us"))
    # For a skipped time, these are the last instant before clocks change, and the first one after it.
    before = _as_integers(pc.assume_timezone(times, zone, ambiguous="earliest", nonexistent="earliest"))
    after = _as_integers(pc.assume_timezone(times, zone, ambiguous="earliest", nonexistent="latest"))
    offset = _as_integers(pc.local_timestamp(pa.array(before).cast(pa.timestamp("us", zone)))) - before
    return np.where(before == after, after, local_times - offset), after


def _local_times(column: pa.Array, rows: _Rows) -> Int64:
    """Returns the local times of groups, with the usual time of day of a group where clocks skip it.

    So a daily series at midnight is even where a day begins at one, because its clocks skip midnight.
    """
    local_times = _as_integers(pc.local_timestamp(column))
    time_of_day = local_times % _DAY
    if (time_of_day == time_of_day[rows.firsts][rows.group]).all():
        return local_times
    usual_time_of_day = _most_frequent(time_of_day, rows.group, rows.firsts)[rows.group]
    usual = local_times - time_of_day + usual_time_of_day
    # If the usual time of the day, which clocks may skip, is the same instant, it stands for the local time.
    spark_instants, pandas_instants = _instants(usual, column.type.tz)
    instants = _as_integers(column)
    return np.where((spark_instants == instants) | (pandas_instants == instants), usual, local_times)


def _months(instants: Int64, values: Callable[[int, Int64], pa.Array]) -> Iterator[_Scale]:
    """Yields two scales of months, because a monthly series counts from the beginning of a month or from its end.

    The rest is the time since the month began, within its first 28 days, or the time until it ends, within its last
    day.
    """
    times = instants.view("datetime64[us]")
    months = times.astype("datetime64[M]")
    for months_ahead, least, most in ((0, 0, 28 * _DAY), (1, -_DAY, 0)):
        ahead = np.timedelta64(months_ahead, "M")
        rest = (times - (months + ahead).astype("datetime64[us]")).view(np.int64)

        def month_times(rest: int, counts: Int64, ahead: np.timedelta64 = ahead) -> pa.Array:
            return values(rest, (counts.view("datetime64[M]") + ahead).astype("datetime64[us]").view(np.int64))

        yield _Scale(months.view(np.int64), 1, month_times, np.where((least <= rest) & (rest < most), rest, _NO_REST))
