"""A shard in host or device memory: each batch is taken on request."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparktorch.base.batch import Batch
from sparktorch.base.devices import free_bytes, is_host
from sparktorch.data.dataset.base import CHUNK_ROWS, Int64, RowNumbers, Shard, at
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.sampling.plan import by_step

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

    def __init__(self, stored: Rows, *given: Any, **options: Any) -> None:
        """Takes what `Shard` does, and loads the rows."""
        super().__init__(stored, *given, **options)
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
        for part in index.tensor_split(parts) if parts else ():  # equal sizes avoid a tiny last batch
            yield self._stored.inputs(part)

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times that of its class, one per class; `None`: its weight."""
        self._stored.weigh_classes(weights)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        order, rows = self._orders[epoch], self.step_rows(epoch).numpy()
        found = np.empty(len(rows))
        some = max(1, CHUNK_ROWS * len(rows) // max(1, len(order.index)))  # bounds the rows at a time
        for start in range(0, len(rows), some):
            stop = min(start + some, len(rows))
            index = order.index[order.ends[start] - rows[start] : order.ends[stop - 1]]
            step = np.repeat(np.arange(stop - start), rows[start:stop])
            found[start:stop] = np.bincount(step, self._stored.loss_weights(index), stop - start)
        return torch.from_numpy(found)

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(np.diff(self._orders[epoch].ends, prepend=0))

    def _batches(self, order: _Order, epoch: int, min_rows: int, first: int) -> Generator[Batch]:
        """Yields the batches from step `first` on; no list holds a number of every step."""
        for begin in range(first, len(order.ends), _STEPS):
            stop = min(begin + _STEPS, len(order.ends))
            ends = [int(order.ends[begin - 1]) if begin else 0, *order.ends[begin:stop].tolist()]
            contexts = self._schedule.contexts(epoch, begin, stop)
            for start, end, context in zip(ends[:-1], ends[1:], contexts, strict=True):
                yield self._stored.take(order.index[start:end], min_rows=min_rows, context=context)

    def _found(self, order: RowNumbers, places: Int64, *, inputs: bool = True) -> tuple[Rows, torch.Tensor]:
        return self._stored, torch.from_numpy(at(order, places))

    def _make_order(self, epoch: int) -> _Order:
        first, count, plan = self._schedule.first, self._schedule.rows, self._schedule.plan
        places, ends = by_step(plan.steps_of(first, first + count, epoch), plan.steps)
        return _Order(torch.from_numpy(at(self._order, places)), ends)
