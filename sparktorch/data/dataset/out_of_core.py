"""A shard on disk: the rows of several consecutive steps, a window, are read at once.

The rank reads them itself, and has the system read the next window ahead. A thread of its own that read them would pass
the GIL to and fro for each run of rows, which took four times as long as reading it from the system's cache.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch
from sparktorch.data.dataset.base import AHEAD_BATCHES, CHUNK_ROWS, Int64, RowNumbers, Shard, at
from sparktorch.data.dataset.device_transfer import moved
from sparktorch.data.dataset.folds import Folds
from sparktorch.data.dataset.prefetch import ByEpoch, ahead
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.plan import RankOrder, SamplingPlan
from sparktorch.data.sampling.row_keys import RowKeys

__all__ = ["OutOfCoreShard"]


class OutOfCoreShard(Shard):
    """The rows of a rank, all of them on disk."""

    def __init__(
        self, stored: Rows, row_keys: RowKeys, *, dropped: int, budget: int, folds: Folds | None = None
    ) -> None:
        """Sets the rows on disk, and the budget for rows in memory, in bytes.

        A window uses at most half of `budget`, but holds at least one step. Batches decoded in advance use as much.
        """
        super().__init__(stored, row_keys, dropped=dropped, folds=folds)
        self._budget = budget
        self._device = torch.device("cpu")
        self._class_weights: Sequence[float] | None = None
        self._orders = ByEpoch(self._make_order)
        self._weights = ByEpoch(self._make_weights)

    def to(self, device: str) -> None:
        """Sets the device of the batches; the rows stay on disk."""
        self._device = torch.device(device)

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs of the next training."""
        self._weights.clear()
        self._orders.clear()
        super().place(first, plan, epochs=epochs)
        step_bytes = self._stored.item_bytes * self.rows / plan.steps
        self._window = min(plan.block, max(1, int(self._budget / 2 // max(step_bytes, 1))))

    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""
        sums = np.zeros(classes)
        for start in range(0, len(self._order), CHUNK_ROWS):
            numbers = self._order[start : start + CHUNK_ROWS]
            sums += self._stored.load(numbers, inputs=False).weight_by_class(torch.arange(len(numbers)), classes)
        found: list[float] = sums.tolist()
        return found

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times that of its class, one per class; `None`: its weight."""
        self._class_weights = weights

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        return torch.from_numpy(self._weights[epoch])

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(self._orders[epoch].step_rows())

    def epoch(self, epoch: int, *, min_rows: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of the epoch from step `first` on."""
        order = self._orders[epoch]
        for known in (self._orders, self._weights):
            known.forget(epoch)
        if self._schedule.worth_ahead(epoch + 1):
            self._weights.begin(epoch + 1)
        return self._ahead(self._batches(order, min_rows, first), self._window)

    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields the validation rows in at least `batches` batches of at most `size` rows."""
        return self._ahead(self._validation_batches(size, batches), 1)

    def close(self) -> None:
        """Ends threads and frees rows on disk; can be called twice."""
        self._weights.close()
        self._orders.close()
        super().close()

    def _ahead(self, batches: Generator[Batch], depth: int) -> Generator[Batch]:
        """Returns batches on the device; a thread decodes them, where that is needed."""
        if self._stored.decodes:
            batches = ahead(batches, min(depth, AHEAD_BATCHES), size=attrgetter("nbytes"), most=self._budget // 2)
        return moved(batches, self._device)

    def select(self, places: torch.Tensor) -> Batch:
        """Returns training rows by number, in key order; int64 of shape `(rows,)`."""
        return self._load(self._order, places.numpy()).take(torch.arange(len(places)), min_rows=0)

    def _batches(self, order: RankOrder, min_rows: int, first: int) -> Generator[Batch]:
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
        rows = self._load(self._order, position - self._schedule.first)
        index = torch.from_numpy(np.argsort(step, kind="stable"))
        ends = np.cumsum(np.bincount(step, minlength=len(contexts))).tolist()
        for start, end, context in zip([0, *ends[:-1]], ends, contexts, strict=True):
            yield rows.take(index[start:end], min_rows=min_rows, context=context)

    def _validation_batches(self, size: int, batches: int) -> Generator[Batch]:
        count = len(self._validation_order)
        for start in range(0, max(count, batches * size), size):
            taken = np.arange(min(start, count), min(start + size, count), dtype=np.int64)
            rows = self._load(self._validation_order, taken)
            yield rows.take(torch.arange(len(taken)), min_rows=1 if batches else 0)

    def _load(self, order: RowNumbers, places: Int64) -> Rows:
        rows = self._stored.load(at(order, places))
        if self._class_weights is not None:
            rows.weigh_classes(self._class_weights)
        return rows

    def _make_order(self, epoch: int) -> RankOrder:
        return self._schedule.order(epoch)

    def _make_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        order, steps = self._orders[epoch], self._schedule.plan.steps
        if self._stored.columns.weight is None and self._class_weights is None:
            return order.step_rows().astype(np.float64)
        sums = np.zeros(steps)
        for number in range(order.windows):
            position, step = order.window(number)
            rows = self._stored.load(at(self._order, position - self._schedule.first), inputs=False)
            if self._class_weights is not None:
                rows.weigh_classes(self._class_weights)
            sums += np.bincount(step, rows.loss_weights(torch.arange(len(step))), steps)
        return sums
