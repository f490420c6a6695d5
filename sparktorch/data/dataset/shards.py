"""Shards: in host or device memory, where each batch is taken on request, or on disk."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch
from sparktorch.base.devices import free_bytes, is_host
from sparktorch.data.dataset.base import AHEAD_BATCHES, CHUNK_ROWS, Int64, RowNumbers, Shard, row_numbers_at
from sparktorch.data.dataset.prefetch import ByEpoch
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.plan import RankOrder, SamplingPlan, by_step

__all__ = ["InMemoryShard", "OutOfCoreShard"]

_STEPS = 4096  # The ends of this number of steps are Python numbers at a time.
_DEVICE_SHARE = 0.25  # Rows may take this part of an accelerator's free memory.


@dataclass(frozen=True)
class _Order:
    """The order of one epoch.

    Attributes:
        index: The row numbers, sorted by step, and within a step by position, int64 of shape `(rows,)`.
        ends: Where each step ends in `index`, int64 of shape `(steps,)`.
    """

    index: torch.Tensor
    ends: Int64


class InMemoryShard(Shard):
    """The rows of a rank, all of them in memory."""

    def __init__(self, stored: Rows, *args: Any, **options: Any) -> None:
        """Takes the arguments of `Shard`, and loads the rows."""
        super().__init__(stored, *args, **options)
        stored.finish()

    def to(self, device: str) -> None:
        """Sets the device of the batches.

        The rows, validation rows included, move to an accelerator if they need at most a quarter of its free memory:
        the rest is for the module and its activations. Otherwise, and if rows are decoded or passed to `preprocess`,
        they stay on the host, and each batch is copied while the previous one is trained.
        """
        super().to(device)
        if is_host(device) or self._stored.decodes or self.bytes > free_bytes(device) * _DEVICE_SHARE:
            self.storage = "memory"
        else:
            self._stored.to(self._device)
            self.storage = "device"

    def inputs(self, fold: int, size: int) -> Generator[tuple[torch.Tensor, ...]]:
        """Yields the inputs of the rows of a fold, in the order of `Folds.members`, at most `size` rows at a time."""
        assert self.folds is not None
        index = torch.from_numpy(self.folds.members(fold))
        parts = -(-len(index) // size)
        if parts:
            # Parts of equal sizes avoid a tiny last batch.
            for part in index.tensor_split(parts):
                yield self._stored.inputs(part)

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times the weight of its class; `None`: to its weight."""
        self._stored.weigh_classes(weights)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        order = self._orders[epoch]
        rows = self.step_rows(epoch).numpy()
        sums = np.empty(len(rows))
        # About `CHUNK_ROWS` rows are read at a time.
        steps_at_once = max(1, CHUNK_ROWS * len(rows) // max(1, len(order.index)))
        for start in range(0, len(rows), steps_at_once):
            stop = min(start + steps_at_once, len(rows))
            index = order.index[order.ends[start] - rows[start] : order.ends[stop - 1]]
            step_of_row = np.repeat(np.arange(stop - start), rows[start:stop])
            sums[start:stop] = np.bincount(step_of_row, self._stored.loss_weights(index), stop - start)
        return torch.from_numpy(sums)

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(np.diff(self._orders[epoch].ends, prepend=0))

    def _batches(self, order: _Order, epoch: int, min_rows: int, first: int) -> Generator[Batch]:
        """Yields the batches from step `first` on; no list is as long as the epoch."""
        for begin in range(first, len(order.ends), _STEPS):
            stop = min(begin + _STEPS, len(order.ends))
            ends = [int(order.ends[begin - 1]) if begin else 0, *order.ends[begin:stop].tolist()]
            contexts = self._rank_steps.contexts(epoch, begin, stop)
            for start, end, context in zip(ends[:-1], ends[1:], contexts, strict=True):
                yield self._stored.take(order.index[start:end], min_rows=min_rows, context=context)

    def _locate(self, order: RowNumbers, positions: Int64, *, inputs: bool = True) -> tuple[Rows, torch.Tensor]:
        return self._stored, torch.from_numpy(row_numbers_at(order, positions))

    def _make_order(self, epoch: int) -> _Order:
        first = self._rank_steps.first
        plan = self._rank_steps.plan
        positions, ends = by_step(plan.steps_of(first, first + self._rank_steps.rows, epoch), plan.steps)
        return _Order(torch.from_numpy(row_numbers_at(self._order, positions)), ends)


class _Window(NamedTuple):
    """The rows of several consecutive steps.

    Attributes:
        positions: The positions of the rows, int64 of shape `(rows,)`.
        steps: The step of each row, counted from the first of these steps, int64 of shape `(rows,)`.
        contexts: The context of each step.
    """

    positions: Int64
    steps: Int64
    contexts: list[StepContext]


class OutOfCoreShard(Shard):
    """The rows of a rank, all of them on disk: the rows of several consecutive steps, a window, are read at once.

    A window uses at most half of the budget for rows in memory, but holds at least one step. The rank reads its rows in
    the training's thread, after it has asked the system to read them ahead. A thread that read windows ahead would pass
    the GIL to and fro for each run of rows, which took four times as long as reading from the system's cache.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `Shard`."""
        super().__init__(*args, **options)
        self._weights = ByEpoch(self._make_weights)
        self._by_epoch.append(self._weights)

    def schedule(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs for the next training."""
        super().schedule(first, plan, epochs=epochs)
        step_bytes = self._stored.item_bytes * self.rows / plan.steps
        self._window_steps = min(plan.block, max(1, int(self._budget / 2 // max(step_bytes, 1))))
        self._depth = min(self._window_steps, AHEAD_BATCHES)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        return torch.from_numpy(self._weights[epoch])

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(self._orders[epoch].step_rows())

    def _batches(self, order: RankOrder, epoch: int, min_rows: int, first: int) -> Generator[Batch]:
        """Yields batches window by window."""
        windows = self._windows(order, first)
        window = next(windows, None)
        while window is not None:
            next_window = next(windows, None)
            # The system reads the next window while this one is trained.
            if next_window is not None:
                self._stored.prefetch(row_numbers_at(self._order, next_window.positions - self._rank_steps.first))
            yield from self._steps(window, min_rows)
            window = next_window

    def _windows(self, order: RankOrder, first: int) -> Iterator[_Window]:
        """Yields the windows from step `first` on; a block of the plan that exceeds the budget has several windows."""
        plan = self._rank_steps.plan
        for number in range(first // plan.block, order.windows):
            begin = number * plan.block
            end = min(begin + plan.block, plan.steps)
            positions, steps = order.window(number)
            for start in range(max(first, begin), end, self._window_steps):
                stop = min(start + self._window_steps, end)
                inside = (steps >= start) & (steps < stop)
                contexts = self._rank_steps.contexts(order.epoch, start, stop)
                yield _Window(positions[inside], steps[inside] - start, contexts)

    def _steps(self, window: _Window, min_rows: int) -> Generator[Batch]:
        """Reads the rows of a window at once, and yields a batch per step."""
        rows, _ = self._locate(self._order, window.positions - self._rank_steps.first)
        index = torch.from_numpy(np.argsort(window.steps, kind="stable"))
        ends = np.cumsum(np.bincount(window.steps, minlength=len(window.contexts))).tolist()
        for start, end, context in zip([0, *ends[:-1]], ends, window.contexts, strict=True):
            yield rows.take(index[start:end], min_rows=min_rows, context=context)

    def _locate(self, order: RowNumbers, positions: Int64, *, inputs: bool = True) -> tuple[Rows, torch.Tensor]:
        rows = self._stored.load(row_numbers_at(order, positions), inputs=inputs)
        if self._class_weights is not None:
            rows.weigh_classes(self._class_weights)
        return rows, torch.arange(len(positions))

    def _make_order(self, epoch: int) -> RankOrder:
        first = self._rank_steps.first
        return RankOrder(self._rank_steps.plan, first, first + self._rank_steps.rows, epoch)

    def _make_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        """Returns this rank's weight in each step, float64 of shape `(steps,)`."""
        order: RankOrder = self._orders[epoch]
        if self._stored.columns.weight is None and self._class_weights is None:
            return order.step_rows().astype(np.float64)
        count = self._rank_steps.plan.steps
        sums = np.zeros(count)
        for number in range(order.windows):
            positions, steps = order.window(number)
            rows, index = self._locate(self._order, positions - self._rank_steps.first, inputs=False)
            sums += np.bincount(steps, rows.loss_weights(index), count)
        return sums
