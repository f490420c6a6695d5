"""A shard in host or device memory: each batch is taken on request."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch

from sparktorch.base.batch import Batch
from sparktorch.base.devices import free_bytes, is_host
from sparktorch.data.dataset.base import AHEAD_BATCHES, CHUNK_ROWS, Int64, RowNumbers, Shard, at
from sparktorch.data.dataset.device_transfer import moved
from sparktorch.data.dataset.folds import Folds
from sparktorch.data.dataset.prefetch import ByEpoch, ahead
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.sampling.plan import SamplingPlan, by_step
from sparktorch.data.sampling.row_keys import RowKeys

__all__ = ["InMemoryShard"]

_STEPS = 4096  # whose places are Python numbers at a time
_DEVICE_SHARE = 0.25  # of an accelerator's free memory, for rows


@dataclass(frozen=True)
class _Order:
    """One epoch's row numbers, sorted by step and within a step by position, and the end of each step in them."""

    index: torch.Tensor
    ends: Int64


class InMemoryShard(Shard):
    """The rows of a rank, all of them in memory."""

    def __init__(
        self, stored: Rows, row_keys: RowKeys, *, dropped: int, budget: int, folds: Folds | None = None
    ) -> None:
        """Loads the rows; batches decoded in advance use at most half of `budget` bytes, or one batch if larger."""
        super().__init__(stored, row_keys, dropped=dropped, folds=folds)
        self._rows, self._budget = stored.finish(), budget
        self._validation_index = _index(self._validation_order)
        self._orders = ByEpoch(self._make_order)
        self._device = self._rows.device

    def to(self, device: str) -> None:
        """Sets the device of the batches.

        The rows, validation rows included, move to an accelerator if they need at most a quarter of its free memory:
        the rest is for the module and its activations. Otherwise, and if rows are decoded or passed to `preprocess`,
        they stay on the host, and each batch is copied while the previous one is trained.
        """
        self._device = torch.device(device)
        if is_host(device) or self._stored.decodes or self.bytes > free_bytes(device) * _DEVICE_SHARE:
            self.storage = "memory"
        else:
            self._rows.to(self._device)
            self.storage = "device"

    def leave_out(self, fold: int | None) -> None:
        """Makes the training and validation rows those outside of a fold, in the same order; `None`: all rows."""
        super().leave_out(fold)
        self._validation_index = _index(self._validation_order)
        last = None if fold is None or self.folds is None else self.folds.last_without(fold)
        self._rows.last = self._rows.count - 1 if last is None else last

    def inputs(self, fold: int, size: int) -> Generator[tuple[torch.Tensor, ...]]:
        """Yields the inputs of the rows of a fold, in the order of `Folds.members`, at most `size` rows at a time."""
        assert self.folds is not None
        index = torch.from_numpy(self.folds.members(fold))
        parts = -(-len(index) // size)
        for part in index.tensor_split(parts) if parts else ():  # equal sizes avoid a tiny last batch
            yield self._rows.inputs(part)

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs of the next training."""
        self._orders.clear()
        super().place(first, plan, epochs=epochs)

    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""
        sums: list[float] = self._rows.weight_by_class(_index(self._order), classes).tolist()
        return sums

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times that of its class, one per class; `None`: its weight."""
        self._rows.weigh_classes(weights)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        order, rows = self._orders[epoch], self.step_rows(epoch).numpy()
        found = np.empty(len(rows))
        some = max(1, CHUNK_ROWS * len(rows) // max(1, len(order.index)))  # bounds the rows at a time
        for start in range(0, len(rows), some):
            stop = min(start + some, len(rows))
            index = order.index[order.ends[start] - rows[start] : order.ends[stop - 1]]
            step = np.repeat(np.arange(stop - start), rows[start:stop])
            found[start:stop] = np.bincount(step, self._rows.loss_weights(index), stop - start)
        return torch.from_numpy(found)

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(np.diff(self._orders[epoch].ends, prepend=0))

    def epoch(self, epoch: int, *, min_rows: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of the epoch from step `first` on."""
        order = self._orders[epoch]
        self._orders.forget(epoch)
        if self._schedule.worth_ahead(epoch + 1):
            self._orders.begin(epoch + 1)
        return self._coming(self._batches(order, epoch, first, min_rows), AHEAD_BATCHES)

    def _batches(self, order: _Order, epoch: int, first: int, min_rows: int) -> Generator[Batch]:
        """Yields the batches from step `first` on; no list holds a number of every step."""
        for begin in range(first, len(order.ends), _STEPS):
            stop = min(begin + _STEPS, len(order.ends))
            ends = [int(order.ends[begin - 1]) if begin else 0, *order.ends[begin:stop].tolist()]
            contexts = self._schedule.contexts(epoch, begin, stop)
            for start, end, context in zip(ends[:-1], ends[1:], contexts, strict=True):
                yield self._rows.take(order.index[start:end], min_rows=min_rows, context=context)

    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields the validation rows in at least `batches` batches of at most `size` rows."""
        index = self._validation_index
        starts = range(0, max(len(index), batches * size), size)
        taken = (self._rows.take(index[s : s + size], min_rows=1 if batches else 0) for s in starts)
        return self._coming(taken, 1)

    def select(self, places: torch.Tensor) -> Batch:
        """Returns training rows by number, in key order; int64 of shape `(rows,)`."""
        return self._rows.take(_index(self._order)[places], min_rows=0)

    def close(self) -> None:
        """Ends threads; can be called twice."""
        self._orders.close()
        super().close()

    def _coming(self, batches: Generator[Batch], depth: int) -> Generator[Batch]:
        """Returns batches on the device; threads decode and copy them, where that is needed."""
        if self._stored.decodes:
            batches = ahead(batches, depth, size=attrgetter("nbytes"), most=self._budget // 2)
        return batches if self._rows.device == self._device else moved(batches, self._device)

    def _make_order(self, epoch: int) -> _Order:
        first, count, plan = self._schedule.first, self._schedule.rows, self._schedule.plan
        places, ends = by_step(plan.steps_of(first, first + count, epoch), plan.steps)
        return _Order(torch.from_numpy(at(self._order, places)), ends)


def _index(order: RowNumbers) -> torch.Tensor:
    return torch.arange(order.start, order.stop) if isinstance(order, range) else torch.from_numpy(order)
