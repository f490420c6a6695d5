"""Columns that order the rows of a series: whether their steps are even, and the values that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Steps", "after_uneven", "steps_of", "typed"]

_DAY = 86_400_000_000  # microseconds

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
    for counts, least, values in _scales(column):
        steps = np.diff(counts)
        sizes, times = np.unique(steps, return_counts=True)
        usual = int(sizes[times.argmax()])
        uneven = steps != usual if usual > 0 and usual % least == 0 else np.ones(len(steps), bool)
        found.append(Steps(counts, usual, np.flatnonzero(uneven) + 1, values))
    return min(found, key=lambda steps: len(steps.uneven))  # the first of several


def after_uneven(place: Int64, firsts: Int64, kind: tuple[str, str]) -> Int64:
    """Returns the numbers of the rows that do not follow the one before in their group by an even step.

    Args:
        place: The order of the rows as int64, ascending in each group: integers, days or microseconds.
        firsts: The number of the first row of each group.
        kind: SQL type and time zone of the order.
    """
    steps = np.diff(place)
    bends = np.flatnonzero(steps[1:] != steps[:-1]) + 1  # rows whose next step is another one
    before, after = (np.searchsorted(firsts, bends + ahead, side="right") - 1 for ahead in (-1, 1))
    found = [np.empty(0, np.int64)]
    for group in np.unique(before[before == after]):  # few: months, local days, and gaps
        first, end = firsts[group], np.append(firsts, len(place))[group + 1]
        found.append(first + steps_of(typed(place[first:end], kind)).uneven)
    return np.concatenate(found)


def typed(place: Int64, kind: tuple[str, str]) -> pa.Array:
    """Returns int64 values of an order as a column of its SQL type, in its time zone."""
    sql, zone = kind
    if sql == "date":
        return pa.array(place.astype(np.int32)).cast(pa.date32())
    if sql.startswith("timestamp"):
        return pa.array(place).cast(pa.timestamp("us", zone if sql == "timestamp" else None))
    return pa.array(place)


def _scales(column: pa.Array) -> Iterator[tuple[Int64, int, Callable[[Int64], pa.Array]]]:
    """Yields a column's counts on the scales of its type, what divides a step, and what makes values of counts.

    Those of longer steps come first.
    """
    kind = column.type
    if pa.types.is_integer(kind):
        yield _in_order(column), 1, lambda counts: pa.array(counts).cast(kind)
        return
    if pa.types.is_date(kind):
        instants = _in_order(column) * _DAY

        def dates(found: Int64) -> pa.Array:
            return pa.array((found // _DAY).astype(np.int32)).cast(pa.date32()).cast(kind)

        yield from _months(instants, dates)
        yield instants, _DAY, dates
        return

    def moments(found: Int64) -> pa.Array:
        return pa.array(found).cast(pa.timestamp("us", kind.tz)).cast(kind)

    def local(found: Int64) -> pa.Array:
        if kind.tz is None:
            return moments(found)
        wall = pa.array(found).cast(pa.timestamp("us"))
        there = pc.assume_timezone(wall, kind.tz, ambiguous="earliest", nonexistent="latest")
        return there.cast(pa.timestamp("us", kind.tz)).cast(kind)

    instants = _in_order(column)
    wall = instants if kind.tz is None else _clock(column, local)
    yield from _months(wall, local)
    yield wall, _DAY, local
    yield instants, 1, moments


def _clock(column: pa.Array, local: Callable[[Int64], pa.Array]) -> Int64:
    """Returns the local times of a column; one that clocks skip, such as a midnight, is that of most other rows."""
    wall = _in_order(pc.local_timestamp(column))
    times, counts = np.unique(wall % _DAY, return_counts=True)
    if len(times) == 1:
        return wall
    usual = wall - wall % _DAY + times[counts.argmax()]
    return np.where(_in_order(local(usual)) == _in_order(column), usual, wall)


def _months(
    instants: Int64, values: Callable[[Int64], pa.Array]
) -> Iterator[tuple[Int64, int, Callable[[Int64], pa.Array]]]:
    """Yields the scale of months, if all instants, in microseconds, are the same time of the same day in one."""
    times = instants.view("datetime64[us]")
    months = times.astype("datetime64[M]")
    for ahead, least, most in ((0, 0, 28 * _DAY), (1, -_DAY, 0)):  # the first 28 days, and the last one
        rest = (times - (months + ahead).astype("datetime64[us]")).view(np.int64)
        if (rest == rest[0]).all() and least <= rest[0] < most:

            def back(counts: Int64, ahead: int = ahead, rest: int = int(rest[0])) -> pa.Array:
                return values((counts.view("datetime64[M]") + ahead).astype("datetime64[us]").view(np.int64) + rest)

            yield months.view(np.int64), 1, back
