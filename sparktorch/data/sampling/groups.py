"""Which rows make up a sample, a whole group or a window of one, as arithmetic on the sorted rows of a rank."""

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

    A sample is a run of rows in the order of groups. After the last sample comes a placeholder: the first sample again
    or, if there is none, the last row, repeated for each row of a window.

    Attributes:
        count: Number of samples, without the placeholder.
        starts: Where each sample begins among the ordered rows, int64 of shape `(count + 1,)`.
        sizes: Number of rows in each sample, int64 of shape `(count + 1,)`.
    """

    def __init__(self, rows: Numbers | range, starts: Int64, sizes: Int64) -> None:
        """Takes row numbers in the order of groups, at least one, and the samples with their placeholder."""
        self.count = len(starts) - 1
        self.starts = starts
        self.sizes = sizes
        self._rows = rows

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the row numbers of some samples, and the number of rows in each sample, both int64 on the CPU."""
        numbers = index.numpy()
        sizes = self.sizes[numbers]
        # A placeholder that repeats the last row would go on beyond it.
        positions = _runs(self.starts[numbers], sizes).clip(max=len(self._rows) - 1)
        return torch.from_numpy(self._row_numbers(positions)), torch.from_numpy(sizes)

    def means(self, values: npt.NDArray[np.float32], *, skipped: int) -> npt.NDArray[np.float64]:
        """Returns the mean of the values of the rows in each sample, without its first `skipped` rows, float64.

        `values` are by row number. Differences of cumulated sums give the means, so that a row that several samples
        share is added once.
        """
        sums = np.append(0, np.cumsum(values[self._row_numbers(np.arange(len(self._rows)))], dtype=np.float64))
        starts, sizes = self.starts[: self.count], self.sizes[: self.count]
        means: npt.NDArray[np.float64] = (sums[starts + sizes] - sums[starts + skipped]) / (sizes - skipped)
        return means

    def only(self, numbers: Numbers) -> tuple[Samples, Int64]:
        """Returns some samples and the placeholder, renumbered, and the numbers of all their rows, each once."""
        numbers = np.append(numbers, self.count)
        starts = self.starts[numbers]
        sizes = self.sizes[numbers]
        order = np.argsort(starts, kind="stable")
        first = starts[order]
        last = np.maximum.accumulate(np.minimum(first + sizes[order], len(self._rows)))
        # Samples that overlap or touch are one run: a run begins with a sample that begins after all before have ended.
        begins = np.append(True, first[1:] > last[:-1])
        ends = np.append(begins[1:], True)
        lengths = last[ends] - first[begins]
        run_of_sample = np.cumsum(begins) - 1
        # The runs come one after the other, so the rows of a run move by the same distance.
        distances = np.cumsum(lengths) - lengths - first[begins]
        new_starts = np.empty_like(starts)
        new_starts[order] = first + distances[run_of_sample]
        return Samples(range(int(lengths.sum())), new_starts, sizes), self._row_numbers(_runs(first[begins], lengths))

    def _row_numbers(self, positions: Int64) -> Int64:
        """Returns the numbers of rows by their positions in the order of groups."""
        if isinstance(self._rows, range):
            return positions + self._rows.start
        return self._rows[positions].astype(np.int64)


class GroupKeys(RowKeys):
    """The keys of rows that belong to groups, with the group of each row, and its order in the group.

    For each batch come `append`, `append_to_groups` and perhaps `append_dropped`; then once `samples`, and then
    `orders`.

    Attributes:
        facts: The counts of `Shard.groups`.
    """

    def __init__(self, storage: RowStorage, columns: Columns) -> None:
        """Starts without rows; `columns` describe the groups."""
        super().__init__(storage, by_key=False)
        assert columns.groups is not None
        self._groups = columns.groups
        self._validation = columns.validation
        self._allows_gaps = columns.drop_nulls
        self._group = storage.spool(np.int64)
        self._order = storage.spool(np.int64)
        self._dropped_group = storage.spool(np.int64)
        self._dropped_order = storage.spool(np.int64)
        # The group, read as unsigned, and the order of the last row.
        self._last_row: tuple[int, int] = (0, torch.iinfo(torch.int64).min)
        self.facts = {"groups": 0, "short": 0, "largest": 0, "rows": 0, "gaps": 0, "marked": 0}

    def append_to_groups(self, group: Int64, order: Int64) -> None:
        """Appends the group of each row of a batch, and the number that orders the row in its group."""
        if not len(group):
            return
        last_group, last_order = self._last_row
        groups = np.append(np.uint64(last_group), group.view(np.uint64))
        orders = np.append(last_order, order)
        same = groups[1:] == groups[:-1]
        ordered = (groups[1:] > groups[:-1]) | (same & (orders[1:] >= orders[:-1]))
        self._in_order = self._in_order and bool(ordered.all())
        self._last_row = int(groups[-1]), int(orders[-1])
        self._group.append(group)
        self._order.append(order)

    def append_dropped(self, group: Int64, order: Int64) -> None:
        """Appends group and order of rows that were dropped: they count for even steps, and no window has them."""
        self._dropped_group.append(group)
        self._dropped_order.append(order)

    def _continues_order(self, key: npt.NDArray[np.uint64], held_out: Mask) -> bool:
        return True  # Groups and their order alone order the rows.

    def samples(self, moved: Callable[[], object] = no_op) -> Samples:
        """Returns the samples of the rows, and ends appending; `moved` is called when there is progress.

        Raises:
            ColumnError: Two rows of a group have the same order, only some rows of a whole group are marked for
                validation, or a group has an uneven step.
        """
        if not self.count:
            return self._with_placeholder(range(1), np.empty(0, np.int64), np.empty(0, np.int64), 0)
        group, order, marks = self._group.finish(), self._order.finish(), self._marks.finish()
        rows: Numbers | range = range(self.count)
        if not self._in_order:
            # Two stable sorts: by the order, and then by the group. Flipping its top bit sorts groups as unsigned.
            sorted_rows = torch.from_numpy(order).sort(stable=True).indices
            sorted_rows = sorted_rows[(torch.from_numpy(group)[sorted_rows] ^ _TOP_BIT).sort(stable=True).indices]
            rows = sorted_rows.numpy().astype(np.int32 if self.count < 1 << 31 else np.int64)
            group, order, marks = group[rows], order[rows], marks[rows]
        same = group[1:] == group[:-1]
        self._check(same, order, marks)
        firsts = np.append(0, np.flatnonzero(~same) + 1)
        sizes = np.diff(np.append(firsts, self.count))
        self.facts["groups"] = len(sizes)
        self.facts["largest"] = int(sizes.max())
        self.facts["rows"] = self.count
        self.facts["marked"] = int(marks.sum())
        window = self._groups.window
        if window is None:
            starts = firsts
            held_out = marks[firsts]
        else:
            self.facts["short"] = int((sizes < window.rows).sum())
            gaps = np.empty(0, np.int64)
            if window.even is not None:
                gaps = self._gaps(group, order, firsts, partial(after_uneven, kind=window.even, moved=moved))
            starts, held_out = _windows(window, firsts, sizes, marks, gaps)
            sizes = np.broadcast_to(np.int64(window.rows), len(starts))  # A broadcast array takes no memory.
        if held_out.any():  # Training samples come first.
            training_first = np.argsort(held_out, kind="stable")
            starts = starts[training_first]
            sizes = sizes[training_first]
        return self._with_placeholder(rows, starts, sizes, int(held_out.sum()))

    def _with_placeholder(self, rows: Numbers | range, starts: Int64, sizes: Int64, held_out: int) -> Samples:
        """Returns the samples with their placeholder; the last `held_out` samples are for validation."""
        self._training_samples = len(starts) - held_out
        window = self._groups.window
        placeholder_size = sizes[0] if len(starts) else 1
        starts = np.append(starts, starts[0] if len(starts) else len(rows) - 1)
        if window is None:
            sizes = np.append(sizes, placeholder_size)
        else:
            sizes = np.broadcast_to(np.int64(window.rows), len(starts))
        self._samples = Samples(rows, starts, sizes)
        return self._samples

    def orders(self) -> tuple[Numbers | range, Numbers | range]:
        """Returns the numbers of the training and of the validation samples."""
        return range(self._training_samples), range(self._training_samples, self._samples.count)

    def _gaps(self, group: Int64, order: Int64, firsts: Int64, uneven: Callable[[Int64, Int64], Int64]) -> Int64:
        """Returns the rows that follow an uneven step or a dropped row; refuses such rows unless rows are dropped.

        `uneven` returns the rows after uneven steps, for the order of rows and the first row of each group.
        """
        window = self._groups.window
        assert window is not None
        assert window.even is not None
        groups = np.append(group, self._dropped_group.finish()).view(np.uint64)
        orders = np.append(order, self._dropped_order.finish())
        has_dropped = len(orders) > len(order)
        gaps = _gaps_among_dropped(groups, orders, len(order), uneven) if has_dropped else uneven(order, firsts)
        self.facts["gaps"] = len(gaps)
        if len(gaps) and not self._allows_gaps:
            before, after = typed(order[[gaps[0] - 1, gaps[0]]], window.even).to_pylist()
            raise ColumnError(
                f"column {self._groups.order!r} has {counted(len(gaps), 'uneven step', 'uneven steps')}: in a group, "
                f"after {before} comes {after}",
                hint="add the rows that are missing, or set nullPolicy='drop', which leaves out windows across a gap",
                column=self._groups.order,
                code="ST-SERIES",
            )
        return gaps

    def _check(self, same: Mask, order: Int64, marks: Mask) -> None:
        """Refuses rows of a group that have the same order, or different marks for validation.

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


def _gaps_among_dropped(
    groups: npt.NDArray[np.uint64], orders: Int64, count: int, uneven_rows: Callable[[Int64, Int64], Int64]
) -> Int64:
    """Returns the numbers of the kept rows before which a row of the group was dropped, or a step was uneven.

    The first `count` groups and orders belong to kept rows, in their order; the others belong to dropped rows.
    """
    by_order = np.lexsort((orders, groups))
    groups, orders = groups[by_order], orders[by_order]
    firsts = np.append(0, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
    uneven = np.zeros(len(by_order), np.bool_)
    uneven[uneven_rows(orders, firsts)] = True
    kept_rows = np.flatnonzero(by_order < count)
    apart = (np.diff(kept_rows) > 1) | (np.diff(np.cumsum(uneven)[kept_rows]) > 0)
    return np.flatnonzero(apart & (groups[kept_rows[1:]] == groups[kept_rows[:-1]])) + 1


def _windows(window: Window, firsts: Int64, sizes: Int64, marks: Mask, gaps: Int64) -> tuple[Int64, Mask]:
    """Returns where windows begin, and which of them are for validation.

    - The last window of a group ends with the group, so that its newest rows are trained or validated.
    - The rows of a horizon are either all marked for validation, or none of them is.
    - No window has a gap between two of its rows; `gaps` are the numbers of the rows after a gap.
    """
    counts = ((sizes - window.rows) // window.step + 1).clip(min=0)
    starts = np.repeat(firsts + (sizes - window.rows) % window.step, counts)
    starts += window.step * (np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts))
    marked = np.append(0, np.cumsum(marks))
    marked_rows = marked[starts + window.rows] - marked[starts + window.context]
    used = (marked_rows == 0) | (marked_rows == window.horizon)
    if len(gaps):
        # As many gaps are before the last row of such a window as before its first row.
        gaps_before_first = np.searchsorted(gaps, starts, side="right")
        gaps_before_last = np.searchsorted(gaps, starts + window.rows - 1, side="right")
        used &= gaps_before_first == gaps_before_last
    return starts[used], marked_rows[used] > 0


def _runs(starts: Int64, sizes: Int64) -> Int64:
    """Returns the numbers in runs of consecutive numbers, one run after the other, from their starts and sizes."""
    offsets = np.cumsum(sizes) - sizes
    return np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()))
