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

_DAY = 86_400_000_000  # A day has so many microseconds.
_NO_REST = np.iinfo(np.int64).min
_ROWS = 1 << 20  # About so many rows, of many groups, are looked at in one go.

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Steps(NamedTuple):
    """A column as whole numbers on a scale on which its steps are even, but for some.

    Attributes:
        counts: The values, int64 of shape `(rows,)`.
        step: The usual step between two rows.
        uneven: Numbers of the rows that are not one step after the one before, int64.
        values: Returns the values that have some counts, of the column's type.
    """

    counts: Int64
    step: int
    uneven: Int64
    values: Callable[[Int64], pa.Array]

    def after(self, row: int, rows: int) -> pa.Array:
        """Returns the values of as many rows after a row."""
        return self.values(self.counts[row] + self.step * np.arange(1, rows + 1))


class _Scale(NamedTuple):
    """Values as whole numbers, and what these leave out.

    Attributes:
        counts: The whole numbers.
        least: What divides an even step.
        values: Returns the values that have a rest and some counts.
        rest: What counts leave out of each value: one number in a series with even steps, and not `_NO_REST`.
    """

    counts: Int64
    least: int
    values: Callable[[int, Int64], pa.Array]
    rest: Int64

    def measured(self, rows: _Rows) -> tuple[Int64, Mask, Mask]:
        """Returns each group's usual step, which rows are no such step after the one before, and which groups fit.

        A group fits a scale that leaves the same out of all its values.
        """
        fits, uneven = np.ones(len(rows.firsts), np.bool_), np.zeros(len(self.counts), np.bool_)
        fits[rows.group[(self.rest == _NO_REST) | (self.rest != self.rest[rows.firsts][rows.group])]] = False
        if not fits.any():
            return np.zeros_like(rows.firsts), uneven, fits
        steps, group = np.diff(self.counts)[rows.follows], rows.group[1:][rows.follows]
        usual = _most_frequent(steps, group, rows.firsts - np.arange(len(rows.firsts)))
        irregular = (usual <= 0) | (usual % self.least != 0)
        uneven[1:][rows.follows] = irregular[group] | (steps != usual[group])
        return usual, uneven, fits


class _Rows:
    """Which rows belong to which group.

    Attributes:
        firsts: The number of each group's first row.
        group: The number of each row's group.
        follows: Whether each row but the first follows one of its group.
    """

    def __init__(self, sizes: Int64) -> None:
        """Takes the number of rows of each group, at least two."""
        self.firsts = np.cumsum(sizes) - sizes
        self.group = np.repeat(np.arange(len(sizes)), sizes)
        self.follows = self.group[1:] == self.group[:-1]


def _most_frequent(values: Int64, group: Int64, firsts: Int64) -> Int64:
    """Returns the most frequent value of each group, the smallest of several; groups begin at `firsts`."""
    first = values[firsts]
    if (values == first[group]).all():
        return first
    order = np.lexsort((values, group))
    values, group = values[order], group[order]
    begins = np.flatnonzero(np.append(True, (values[1:] != values[:-1]) | (group[1:] != group[:-1])))
    times = np.diff(np.append(begins, len(values)))
    values, group = values[begins], group[begins]
    best = np.lexsort((values, -times, group))
    most_frequent: Int64 = values[best[np.flatnonzero(np.append(True, np.diff(group[best]) > 0))]]
    return most_frequent


def _bent(counts: Int64, firsts: Int64) -> Int64:
    """Returns the groups, by the numbers of their first rows, in which steps differ."""
    steps = np.diff(counts)
    # The step after such a row is another one than the step before it.
    bends = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    # It counts only if both steps are of one group.
    group_before = np.searchsorted(firsts, bends - 1, side="right") - 1
    group_after = np.searchsorted(firsts, bends + 1, side="right") - 1
    return np.unique(group_before[group_before == group_after])


def _in_order(column: pa.Array) -> Int64:
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
    rows, candidates = _Rows(np.array([len(column)])), []
    for scale in _scales(column, rows):
        usual, uneven, fits = scale.measured(rows)
        if fits[0]:
            values = partial(scale.values, int(scale.rest[0]))
            candidates.append(Steps(scale.counts, int(usual[0]), np.flatnonzero(uneven), values))
    # Of several scales with the fewest uneven steps, the first is that of the longest steps.
    return min(candidates, key=lambda steps: len(steps.uneven))


def after_uneven(order: Int64, firsts: Int64, kind: tuple[str, str], moved: Callable[[], object] = no_op) -> Int64:
    """Returns the numbers of the rows that do not follow the one before in their group by an even step.

    Args:
        order: The order of the rows as int64, ascending in each group: integers, days or microseconds.
        firsts: The number of the first row of each group.
        kind: SQL type and time zone of the order.
        moved: It is called for each million of rows, which count as progress.
    """
    bent, ends = _bent(order, firsts), np.append(firsts[1:], len(order))
    uneven_rows = [np.empty(0, np.int64)]
    parts = 1 + int((ends - firsts)[bent].sum()) // _ROWS
    if not len(bent):
        return np.empty(0, np.int64)
    for groups_at_once in np.array_split(bent, parts):
        rows = _Rows((ends - firsts)[groups_at_once])
        numbers = (firsts[groups_at_once] - rows.firsts)[rows.group] + np.arange(len(rows.group))
        uneven, fewest = np.zeros(len(numbers), np.bool_), np.full(len(groups_at_once), np.iinfo(np.int64).max)
        for scale in _scales(typed(order[numbers], kind), rows):
            _, uneven_on_scale, fits = scale.measured(rows)
            count = np.add.reduceat(uneven_on_scale, rows.firsts, dtype=np.int64)
            better = fits & (count < fewest)  # The first of several scales wins.
            fewest = np.where(better, count, fewest)
            uneven = np.where(better[rows.group], uneven_on_scale, uneven)
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
    """Yields the values of groups on the scales of their type; those of longer steps come first."""
    kind = column.type
    no_rests = np.zeros(len(column), np.int64)
    if pa.types.is_integer(kind):

        def integers(rest: int, counts: Int64) -> pa.Array:
            return pa.array(counts).cast(kind)

        yield _Scale(_in_order(column), 1, integers, no_rests)
        return
    if pa.types.is_date(kind):
        instants = _in_order(column) * _DAY

        def dates(rest: int, counts: Int64) -> pa.Array:
            return pa.array(((counts + rest) // _DAY).astype(np.int32)).cast(pa.date32()).cast(kind)

        yield from _months(instants, dates)
        yield _Scale(instants, _DAY, dates, no_rests)
        return

    def moments(rest: int, counts: Int64) -> pa.Array:
        return pa.array(counts + rest).cast(pa.timestamp("us", kind.tz)).cast(kind)

    def local(rest: int, counts: Int64) -> pa.Array:
        if kind.tz is None:
            return moments(rest, counts)
        return pa.array(_instants(counts + rest, kind.tz)[0]).cast(pa.timestamp("us", kind.tz)).cast(kind)

    instants = _in_order(column)
    wall = instants if kind.tz is None else _clock(column, rows)
    yield from _months(wall, local)
    yield _Scale(wall, _DAY, local, no_rests)
    yield _Scale(instants, 1, moments, no_rests)


def _instants(wall: Int64, zone: str) -> tuple[Int64, Int64]:
    """Returns the instants of local times, with those that clocks skip moved as Spark does, and as pandas may do.

    Where clocks go from two to three, 02:30 is 03:30 to Spark, and 03:00 to `nonexistent="shift_forward"` of pandas.
    """
    times = pa.array(wall).cast(pa.timestamp("us"))
    ends, begins = (
        _in_order(pc.assume_timezone(times, zone, ambiguous="earliest", nonexistent=side))
        for side in ("earliest", "latest")
    )
    offset = _in_order(pc.local_timestamp(pa.array(ends).cast(pa.timestamp("us", zone)))) - ends
    return np.where(ends == begins, begins, wall - offset), begins


def _clock(column: pa.Array, rows: _Rows) -> Int64:
    """Returns the local times of groups; one that clocks skip, such as a midnight, is that of a group's other days."""
    wall = _in_order(pc.local_timestamp(column))
    times = wall % _DAY
    if (times == times[rows.firsts][rows.group]).all():
        return wall
    usual = wall - times + _most_frequent(times, rows.group, rows.firsts)[rows.group]
    moved, begins = _instants(usual, column.type.tz)
    instants = _in_order(column)
    return np.where((moved == instants) | (begins == instants), usual, wall)


def _months(instants: Int64, values: Callable[[int, Int64], pa.Array]) -> Iterator[_Scale]:
    """Yields the scales of months, of which the rest is the time since the first, or before the end of the last day."""
    times = instants.view("datetime64[us]")
    months = times.astype("datetime64[M]")
    # Rows of a monthly series are at one time of the first 28 days, or at one time of the last day of a month.
    for later, least, most in ((0, 0, 28 * _DAY), (1, -_DAY, 0)):
        ahead = np.timedelta64(later, "M")
        rest = (times - (months + ahead).astype("datetime64[us]")).view(np.int64)

        def back(rest: int, counts: Int64, ahead: np.timedelta64 = ahead) -> pa.Array:
            return values(rest, (counts.view("datetime64[M]") + ahead).astype("datetime64[us]").view(np.int64))

        yield _Scale(months.view(np.int64), 1, back, np.where((least <= rest) & (rest < most), rest, _NO_REST))
