"""A shard on disk: the rows of several consecutive steps, a window, are read at once.

The rank reads them itself, and has the system read the next window ahead. A thread of its own that read them would pass
the GIL to and fro for each run of rows, which took four times as long as reading it from the system's cache.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch
from sparktorch.data.dataset.base import AHEAD_BATCHES, Int64, RowNumbers, Shard, at
from sparktorch.data.dataset.prefetch import ByEpoch
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.plan import RankOrder, SamplingPlan

__all__ = ["OutOfCoreShard"]


class OutOfCoreShard(Shard):
    """The rows of a rank, all of them on disk.

    A window uses at most half of the budget for rows in memory, but holds at least one step.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        """Takes what `Shard` does."""
        super().__init__(*given, **options)
        self._weights = ByEpoch(self._make_weights)
        self._by_epoch.append(self._weights)

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs of the next training."""
        super().place(first, plan, epochs=epochs)
        step_bytes = self._stored.item_bytes * self.rows / plan.steps
        self._window = min(plan.block, max(1, int(self._budget / 2 // max(step_bytes, 1))))
        self._depth = min(self._window, AHEAD_BATCHES)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        return torch.from_numpy(self._weights[epoch])

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(self._orders[epoch].step_rows())

    def _batches(self, order: RankOrder, epoch: int, min_rows: int, first: int) -> Generator[Batch]:
        """Yields batches window by window."""
        windows = self._windows(order, first)
        coming = next(windows, None)
        while coming is not None:
            position, step, contexts = coming
            coming = next(windows, None)
            if coming is not None:
                self._stored.expect(at(self._order, coming[0] - self._schedule.first))
            yield from self._steps(position, step, contexts, min_rows)

    def _windows(self, order: RankOrder, first: int) -> Iterator[tuple[Int64, Int64, list[StepContext]]]:
        """Yields positions, their steps and the contexts of these; a block that exceeds the budget has several."""
        plan = self._schedule.plan
        for number in range(first // plan.block, order.windows):
            begin, end = number * plan.block, min((number + 1) * plan.block, plan.steps)
            position, step = order.window(number)
            for start in range(max(first, begin), end, self._window):
                stop = min(start + self._window, end)
                now = (step >= start) & (step < stop)
                contexts = self._schedule.contexts(order.epoch, start, stop)
                yield position[now], step[now] - start, contexts

    def _steps(self, position: Int64, step: Int64, contexts: list[StepContext], min_rows: int) -> Generator[Batch]:
        """Reads the rows of several steps at once, and yields a batch per step."""
        rows, _ = self._found(self._order, position - self._schedule.first)
        index = torch.from_numpy(np.argsort(step, kind="stable"))
        ends = np.cumsum(np.bincount(step, minlength=len(contexts))).tolist()
        for start, end, context in zip([0, *ends[:-1]], ends, contexts, strict=True):
            yield rows.take(index[start:end], min_rows=min_rows, context=context)

    def _found(self, order: RowNumbers, places: Int64, *, inputs: bool = True) -> tuple[Rows, torch.Tensor]:
        rows = self._stored.load(at(order, places), inputs=inputs)
        if self._class_weights is not None:
            rows.weigh_classes(self._class_weights)
        return rows, torch.arange(len(places))

    def _make_order(self, epoch: int) -> RankOrder:
        first = self._schedule.first
        return RankOrder(self._schedule.plan, first, first + self._schedule.rows, epoch)

    def _make_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        order: RankOrder = self._orders[epoch]
        steps = self._schedule.plan.steps
        if self._stored.columns.weight is None and self._class_weights is None:
            return order.step_rows().astype(np.float64)
        sums = np.zeros(steps)
        for number in range(order.windows):
            position, step = order.window(number)
            rows, index = self._found(self._order, position - self._schedule.first, inputs=False)
            sums += np.bincount(step, rows.loss_weights(index), steps)
        return sums
