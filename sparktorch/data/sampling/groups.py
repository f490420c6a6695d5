"""Which rows are a sample: whole groups, or windows of them, as arithmetic on the sorted rows of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.no_op import no_op
from sparktorch.data.columns import Columns, Window
from sparktorch.data.sampling.even_steps import after_uneven, typed
from sparktorch.data.sampling.plan import Numbers
from sparktorch.data.sampling.row_keys import RowKeys
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError, counted

__all__ = ["GroupKeys", "Samples"]

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_TOP_BIT = torch.iinfo(torch.int64).min


class Samples:
    """The samples of a rank, by number: training samples first, in the order of their positions.

    Each is a run of rows in the order of groups. The last one is a placeholder: the first sample again or, without any,
    the last row, as often as a window has rows.

    Attributes:
        count: Number of samples, without the placeholder.
        starts: Where each sample begins among the ordered rows, int64 of shape `(count + 1,)`.
        sizes: Number of rows of each, int64 of the same shape.
    """

    def __init__(self, rows: Numbers | range, starts: Int64, sizes: Int64) -> None:
        """Takes row numbers in the order of groups, at least one, and the samples with their placeholder."""
        self.count, self.starts, self.sizes = len(starts) - 1, starts, sizes
        self._rows = rows

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the numbers of the rows of some samples, and the number of rows of each, both int64 on the CPU."""
        numbers = index.numpy()
        sizes = self.sizes[numbers]
        positions = _runs(self.starts[numbers], sizes).clip(max=len(self._rows) - 1)
        return torch.from_numpy(self._row_numbers(positions)), torch.from_numpy(sizes)

    def means(self, values: npt.NDArray[np.float32], *, skipped: int) -> npt.NDArray[np.float64]:
        """Returns the mean of the rows' values in each sample but for its first `skipped` rows, float64.

        `values` are by row number; rows that several samples share are added once.
        """
        sums = np.append(0, np.cumsum(values[self._row_numbers(np.arange(len(self._rows)))], dtype=np.float64))
        starts, sizes = self.starts[: self.count], self.sizes[: self.count]
        means: npt.NDArray[np.float64] = (sums[starts + sizes] - sums[starts + skipped]) / (sizes - skipped)
        return means

    def only(self, numbers: Numbers) -> tuple[Samples, Int64]:
        """Returns some samples, renumbered, and the numbers of the rows that they refer to, each once."""
        numbers = np.append(numbers, self.count)
        starts, sizes = self.starts[numbers], self.sizes[numbers]
        order = np.argsort(starts, kind="stable")
        first = starts[order]
        last = np.maximum.accumulate(np.minimum(first + sizes[order], len(self._rows)))
        # A run begins with a row that no sample before has.
        begins = np.append(True, first[1:] > last[:-1])
        ends = np.append(begins[1:], True)
        lengths = last[ends] - first[begins]
        run = np.cumsum(begins) - 1
        moved = np.empty_like(starts)
        moved[order] = first + (np.cumsum(lengths) - lengths - first[begins])[run]
        return Samples(range(int(lengths.sum())), moved, sizes), self._row_numbers(_runs(first[begins], lengths))

    def _row_numbers(self, positions: Int64) -> Int64:
        if isinstance(self._rows, range):
            return positions + self._rows.start
        return self._rows[positions].astype(np.int64)


class GroupKeys(RowKeys):
    """The keys of rows that belong to groups, with what sorts them."""

    def __init__(self, storage: RowStorage, columns: Columns) -> None:
        """Starts without rows, whose groups `columns` describe."""
        super().__init__(storage, by_key=False)
        assert columns.groups is not None
        self._groups, self._validation, self._drops = columns.groups, columns.validation, columns.drop_nulls
        self._group, self._order = storage.spool(np.int64), storage.spool(np.int64)
        self._dropped_group, self._dropped_order = storage.spool(np.int64), storage.spool(np.int64)
        self._end: tuple[int, int] = (0, torch.iinfo(torch.int64).min)
        self.facts = {"groups": 0, "short": 0, "largest": 0, "rows": 0, "gaps": 0, "marked": 0}

    def append_to_groups(self, group: Int64, order: Int64) -> None:
        """Appends the group of each row of a batch, and what orders the row in its group."""
        if not len(group):
            return
        group_before, order_before = self._end
        groups, orders = np.append(np.uint64(group_before), group.view(np.uint64)), np.append(order_before, order)
        same = groups[1:] == groups[:-1]
        ordered = (groups[1:] > groups[:-1]) | (same & (orders[1:] >= orders[:-1]))
        self._in_order = self._in_order and bool(ordered.all())
        self._end = int(groups[-1]), int(orders[-1])
        self._group.append(group)
        self._order.append(order)

    def append_dropped(self, group: Int64, order: Int64) -> None:
        """Appends group and order of rows that were dropped: their steps are even, and no window goes across them."""
        self._dropped_group.append(group)
        self._dropped_order.append(order)

    def _follow(self, key: npt.NDArray[np.uint64], held_out: Mask) -> bool:
        return True  # Groups and their order alone order the rows.

    def samples(self, moved: Callable[[], object] = no_op) -> Samples:
        """Returns the samples of the rows, and ends appending; `moved` is called for what counts as progress.

        Raises:
            ColumnError: Two rows of a group have the same order, or one of several rows of a whole group validates.
        """
        if not self.count:
            return self._make_samples(range(1), np.empty(0, np.int64), np.empty(0, np.int64), 0)
        group, order, marks = self._group.finish(), self._order.finish(), self._marks.finish()
        rows: Numbers | range = range(self.count)
        if not self._in_order:
            # Two stable sorts: by the order, and then by the group, which flipping its top bit reads as unsigned.
            sorted_rows = torch.from_numpy(order).sort(stable=True).indices
            sorted_rows = sorted_rows[(torch.from_numpy(group)[sorted_rows] ^ _TOP_BIT).sort(stable=True).indices]
            rows = sorted_rows.numpy().astype(np.int32 if self.count < 1 << 31 else np.int64)
            group, order, marks = group[rows], order[rows], marks[rows]
        same = group[1:] == group[:-1]
        self._check(same, order, marks)
        firsts = np.append(0, np.flatnonzero(~same) + 1)
        sizes = np.diff(np.append(firsts, self.count))
        self.facts |= {"groups": len(sizes), "largest": int(sizes.max())}
        self.facts |= {"rows": self.count, "marked": int(marks.sum())}
        window = self._groups.window
        if window is None:
            starts, held_out = firsts, marks[firsts]
        else:
            self.facts["short"] = int((sizes < window.rows).sum())
            gaps = np.empty(0, np.int64)
            if window.even is not None:
                gaps = self._gaps(group, order, firsts, partial(after_uneven, kind=window.even, moved=moved))
            starts, held_out = _windows(window, firsts, sizes, marks, gaps)
            sizes = np.broadcast_to(np.int64(window.rows), len(starts))  # A broadcast array takes no memory.
        if held_out.any():  # Training samples come first.
            chosen = np.argsort(held_out, kind="stable")
            starts, sizes = starts[chosen], sizes[chosen]
        return self._make_samples(rows, starts, sizes, int(held_out.sum()))

    def _make_samples(self, rows: Numbers | range, starts: Int64, sizes: Int64, held_out: int) -> Samples:
        self._trained = len(starts) - held_out
        window = self._groups.window
        start, size = (starts[0], sizes[0]) if len(starts) else (len(rows) - 1, 1)
        starts = np.append(starts, start)
        sizes = np.append(sizes, size) if window is None else np.broadcast_to(np.int64(window.rows), len(starts))
        self._samples = Samples(rows, starts, sizes)
        return self._samples

    def orders(self) -> tuple[Numbers | range, Numbers | range]:
        """Returns the numbers of the training and of the validation samples."""
        return range(self._trained), range(self._trained, self._samples.count)

    def _gaps(self, group: Int64, order: Int64, firsts: Int64, uneven: Callable[[Int64, Int64], Int64]) -> Int64:
        """Returns the rows that follow an uneven step, or a dropped row; refuses them, unless rows are dropped."""
        window = self._groups.window
        assert window is not None
        assert window.even is not None
        groups = np.append(group, self._dropped_group.finish()).view(np.uint64)
        orders = np.append(order, self._dropped_order.finish())
        dropped = len(orders) > len(order)
        gaps = _breaks(groups, orders, len(order), uneven) if dropped else uneven(order, firsts)
        self.facts["gaps"] = len(gaps)
        if len(gaps) and not self._drops:
            before, after = (typed(order[gaps[:1] + ahead], window.even)[0].as_py() for ahead in (-1, 0))
            raise ColumnError(
                f"column {self._groups.order!r} has {counted(len(gaps), 'uneven step', 'uneven steps')}: in a group, "
                f"after {before} comes {after}",
                hint="add the rows that are missing, or set nullPolicy='drop', which leaves out windows across a gap",
                column=self._groups.order,
                code="ST-SERIES",
            )
        return gaps

    def _check(self, same: Mask, order: Int64, marks: Mask) -> None:
        """Refuses rows of a group with the same order, or with other marks for validation.

        `same` says whether a row, from the second on, has the group of the row before.
        """
        groups = self._groups
        twice = int((same & (order[1:] == order[:-1])).sum()) if groups.order is not None else 0
        if twice:
            scope = f"in a group of column {groups.group!r}" if groups.group else "in the rows"
            raise ColumnError(
                f"{counted(twice, 'value', 'values')} of column {groups.order!r} {'is' if twice == 1 else 'are'} there "
                f"twice {scope}",
                hint="the order of a group's rows must be known: aggregate or drop duplicates, or name a finer column",
                column=groups.order,
                code="ST-SERIES",
            )
        mixed = int((same & (marks[1:] != marks[:-1])).sum()) if groups.window is None else 0
        if mixed:
            raise ColumnError(
                f"column {self._validation!r} marks some rows of a group and not others, {mixed} times",
                hint=f"a group trains or validates as a whole: derive the mark from {groups.group!r}, as by its hash",
                column=self._validation,
                code="ST-GROUPS",
            )


def _breaks(
    groups: npt.NDArray[np.uint64], orders: Int64, count: int, after_uneven: Callable[[Int64, Int64], Int64]
) -> Int64:
    """Returns the numbers of kept rows that do not follow the one kept before by an even step, dropped rows included.

    The first `count` groups and orders are those of kept rows, in their order; the others are of dropped ones.
    """
    by_order = np.lexsort((orders, groups))
    groups, orders = groups[by_order], orders[by_order]
    firsts = np.append(0, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
    uneven = np.zeros(len(by_order), np.bool_)
    uneven[after_uneven(orders, firsts)] = True
    kept_rows = np.flatnonzero(by_order < count)
    is_break = (np.diff(kept_rows) > 1) | (np.diff(np.cumsum(uneven)[kept_rows]) > 0)
    return np.flatnonzero(is_break & (groups[kept_rows[1:]] == groups[kept_rows[:-1]])) + 1


def _windows(window: Window, firsts: Int64, sizes: Int64, marks: Mask, gaps: Int64) -> tuple[Int64, Mask]:
    """Returns where windows begin whose horizons validate as a whole, or not at all, and which ones do.

    One ends with the last row of its group, so that the newest rows are trained, or validate. No window has a gap
    before one of its rows but the first; `gaps` are the numbers of rows that have.
    """
    counts = ((sizes - window.rows) // window.step + 1).clip(min=0)
    starts = np.repeat(firsts + (sizes - window.rows) % window.step, counts)
    starts += window.step * (np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts))
    marked = np.append(0, np.cumsum(marks))
    marked_rows = marked[starts + window.rows] - marked[starts + window.context]
    valid = (marked_rows == 0) | (marked_rows == window.horizon)
    if len(gaps):
        valid &= np.searchsorted(gaps, starts, side="right") == np.searchsorted(gaps, starts + window.rows - 1, "right")
    return starts[valid], marked_rows[valid] > 0


def _runs(starts: Int64, sizes: Int64) -> Int64:
    """Returns the numbers in runs that start there and are so long, one run after the other."""
    offsets = np.cumsum(sizes) - sizes
    return np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()))
