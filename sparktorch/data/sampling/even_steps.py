"""Columns that order the rows of a series: whether their steps are even, and the values that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Steps", "after_uneven", "steps_of", "typed"]

_DAY = 86_400_000_000  # microseconds
_NO_REST = np.iinfo(np.int64).min
_ROWS = 1 << 20  # of many groups, looked at together

Int64 = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """A column as whole numbers on a scale on which its steps are even, but for some.

    Attributes:
        counts: The values, int64 of shape `(rows,)`.
        step: The usual step between two rows.
        uneven: Places of the rows that are not one step after the one before, int64.
        values: Returns the values that have some counts, of the column's type.
    """

    counts: Int64
    step: int
    uneven: Int64
    values: Callable[[Int64], pa.Array]

    def after(self, place: int, rows: int) -> pa.Array:
        """Returns the values of as many rows after the one at `place`."""
        return self.values(self.counts[place] + self.step * np.arange(1, rows + 1))


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

    def even(self, firsts: Int64) -> npt.NDArray[np.bool_]:
        """Returns which groups of three rows or more, that begin at `firsts`, have even steps."""
        steps = np.diff(self.counts)
        found: npt.NDArray[np.bool_] = (steps[firsts] > 0) & (steps[firsts] % self.least == 0)
        found &= self.rest[firsts] != _NO_REST
        found[_bent(self.counts, firsts)] = False
        changed = np.flatnonzero(np.diff(self.rest))
        found[_of_both(changed, changed + 1, firsts)] = False
        return found


def _of_both(rows: Int64, others: Int64, firsts: Int64) -> Int64:
    """Returns the groups that have both rows of some pairs."""
    one, other = (np.searchsorted(firsts, of, side="right") - 1 for of in (rows, others))
    return np.unique(one[one == other])


def _bent(counts: Int64, firsts: Int64) -> Int64:
    """Returns the groups, by the numbers of their first rows, in which steps differ."""
    steps = np.diff(counts)
    bends = np.flatnonzero(steps[1:] != steps[:-1]) + 1  # rows whose next step is another one
    return _of_both(bends - 1, bends + 1, firsts)


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
    found = []
    for counts, least, values, rest in _scales(column):
        if rest[0] == _NO_REST or (rest != rest[0]).any():
            continue
        steps = np.diff(counts)
        sizes, times = np.unique(steps, return_counts=True)
        usual = int(sizes[times.argmax()])
        uneven = steps != usual if usual > 0 and usual % least == 0 else np.ones(len(steps), bool)
        found.append(Steps(counts, usual, np.flatnonzero(uneven) + 1, partial(values, int(rest[0]))))
    return min(found, key=lambda steps: len(steps.uneven))  # the first of several


def after_uneven(place: Int64, firsts: Int64, kind: tuple[str, str]) -> Int64:
    """Returns the numbers of the rows that do not follow the one before in their group by an even step.

    Args:
        place: The order of the rows as int64, ascending in each group: integers, days or microseconds.
        firsts: The number of the first row of each group.
        kind: SQL type and time zone of the order.
    """
    bent, ends = _bent(place, firsts), np.append(firsts[1:], len(place))
    found = [np.empty(0, np.int64)]
    parts = 1 + int((ends - firsts)[bent].sum()) // _ROWS
    for some in np.array_split(bent, parts) if len(bent) else ():
        sizes = (ends - firsts)[some]
        begins = np.cumsum(sizes) - sizes
        rows = np.repeat(firsts[some] - begins, sizes) + np.arange(sizes.sum())
        even = [scale.even(begins) for scale in _scales(typed(place[rows], kind))]
        each = some[~np.logical_or.reduce(even)]  # few: those with gaps
        found += [firsts[of] + steps_of(typed(place[firsts[of] : ends[of]], kind)).uneven for of in each]
    return np.concatenate(found)


def typed(place: Int64, kind: tuple[str, str]) -> pa.Array:
    """Returns int64 values of an order as a column of its SQL type, in its time zone."""
    sql, zone = kind
    if sql == "date":
        return pa.array(place.astype(np.int32)).cast(pa.date32())
    if sql.startswith("timestamp"):
        return pa.array(place).cast(pa.timestamp("us", zone if sql == "timestamp" else None))
    return pa.array(place)


def _scales(column: pa.Array) -> Iterator[_Scale]:
    """Yields a column's values on the scales of its type; those of longer steps come first."""
    kind = column.type
    whole = np.zeros(len(column), np.int64)
    if pa.types.is_integer(kind):
        yield _Scale(_in_order(column), 1, lambda _, counts: pa.array(counts).cast(kind), whole)
        return
    if pa.types.is_date(kind):
        instants = _in_order(column) * _DAY

        def dates(rest: int, found: Int64) -> pa.Array:
            return pa.array(((found + rest) // _DAY).astype(np.int32)).cast(pa.date32()).cast(kind)

        yield from _months(instants, dates)
        yield _Scale(instants, _DAY, dates, whole)
        return

    def moments(rest: int, found: Int64) -> pa.Array:
        return pa.array(found + rest).cast(pa.timestamp("us", kind.tz)).cast(kind)

    def local(rest: int, found: Int64) -> pa.Array:
        if kind.tz is None:
            return moments(rest, found)
        wall = pa.array(found + rest).cast(pa.timestamp("us"))
        there = pc.assume_timezone(wall, kind.tz, ambiguous="earliest", nonexistent="latest")
        return there.cast(pa.timestamp("us", kind.tz)).cast(kind)

    instants = _in_order(column)
    wall = instants if kind.tz is None else _clock(column, local)
    yield from _months(wall, local)
    yield _Scale(wall, _DAY, local, whole)
    yield _Scale(instants, 1, moments, whole)


def _clock(column: pa.Array, local: Callable[[int, Int64], pa.Array]) -> Int64:
    """Returns the local times of a column; one that clocks skip, such as a midnight, is that of most other rows."""
    wall = _in_order(pc.local_timestamp(column))
    times = wall % _DAY
    if (times == times[0]).all():
        return wall
    each, counts = np.unique(times, return_counts=True)
    usual = wall - times + each[counts.argmax()]
    return np.where(_in_order(local(0, usual)) == _in_order(column), usual, wall)


def _months(instants: Int64, values: Callable[[int, Int64], pa.Array]) -> Iterator[_Scale]:
    """Yields the scales of months, of which the rest is the time since the first, or before the end of the last day."""
    times = instants.view("datetime64[us]")
    months = times.astype("datetime64[M]")
    for later, least, most in ((0, 0, 28 * _DAY), (1, -_DAY, 0)):  # the first 28 days, and the last one
        ahead = np.timedelta64(later, "M")
        rest = (times - (months + ahead).astype("datetime64[us]")).view(np.int64)

        def back(rest: int, counts: Int64, ahead: np.timedelta64 = ahead) -> pa.Array:
            return values(rest, (counts.view("datetime64[M]") + ahead).astype("datetime64[us]").view(np.int64))

        yield _Scale(months.view(np.int64), 1, back, np.where((least <= rest) & (rest < most), rest, _NO_REST))
