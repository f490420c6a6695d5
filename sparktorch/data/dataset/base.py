"""The rows of one rank as a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch, RankDataset
from sparktorch.data.dataset.folds import Folds
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.groups import GroupKeys
from sparktorch.data.sampling.plan import Numbers, RankOrder, SamplingPlan, mix_words
from sparktorch.data.sampling.row_keys import RowKeys

__all__ = ["AHEAD_BATCHES", "CHUNK_ROWS", "Int64", "RowNumbers", "Schedule", "Shard", "at"]

Int64 = npt.NDArray[np.int64]
RowNumbers = Numbers | range

AHEAD_BATCHES = 4  # decoded in advance
CHUNK_ROWS = 1 << 16  # whose weights are read at a time
_AHEAD_ROWS = 1 << 15  # from this size on, ordering an epoch takes longer than starting a thread


@dataclass(frozen=True)
class Schedule:
    """The steps in which a rank trains its rows: `rows` of them, from position `first` on, by the plan of all ranks.

    With `seeded`, each step has a seed of its own, for `preprocess`.
    """

    plan: SamplingPlan
    first: int
    rows: int
    epochs: int = 1
    seeded: bool = False

    def order(self, epoch: int) -> RankOrder:
        """Returns the order of the rank's rows in that epoch."""
        return RankOrder(self.plan, self.first, self.first + self.rows, epoch)

    def contexts(self, epoch: int, start: int, stop: int) -> list[StepContext]:
        """Returns the contexts of the steps from `start` to `stop`; seeds differ between steps and between ranks."""
        if not self.seeded:
            return [StepContext(epoch, 0)] * (stop - start)
        seeds = mix_words(self.plan.seed, epoch, np.arange(start, stop, dtype=np.int64), self.first) >> np.uint64(1)
        return [StepContext(epoch, seed) for seed in seeds.tolist()]

    def worth_ahead(self, epoch: int) -> bool:
        """Whether an epoch will be trained and has enough rows to order them in a thread."""
        return epoch < self.epochs and self.rows >= _AHEAD_ROWS


class Shard(RankDataset):
    """The rows of one rank: training rows addressed by position, validation rows in key order.

    Where rows have groups, samples stand for rows: whole groups, or windows of them.

    Attributes:
        dropped: Number of rows dropped because of a null, NaN or infinity.
        fingerprint: Sum of the keys of the training rows, modulo 2**64; independent of their order.
        bytes: Size of the rows in bytes.
        storage: Where the rows are: "disk", "memory" or "device".
        folds: The folds of the rows; `None` if they have none.
        groups: Numbers of `groups`, of those too `short` for a window, of the rows of the `largest`, of all `rows`, of
            those `marked` for validation, and of the `gaps` between them; `None` without groups.
    """

    def __init__(self, stored: Rows, row_keys: RowKeys, *, dropped: int, folds: Folds | None = None) -> None:
        """Sets the rows, their keys in order of arrival, the number of dropped rows, and the folds."""
        self.fingerprint, self.dropped, self.bytes = row_keys.fingerprint, dropped, stored.bytes
        self.storage = "disk" if stored.on_disk else "memory"
        self.varies = stored.varies
        self._stored = stored
        self._order, self._validation_order = self._all_orders = row_keys.orders()
        self.rows, self.validation_rows = len(self._order), len(self._validation_order)
        self.groups = row_keys.facts if isinstance(row_keys, GroupKeys) else None
        self._all_keys = row_keys.fingerprint
        self.folds = folds

    @property
    def on_disk(self) -> bool:
        """Whether the rows are on disk."""
        return self._stored.on_disk

    def leave_out(self, fold: int | None) -> None:
        """Makes the training and validation rows those outside of a fold, in the same order; `None`: all rows."""
        self._order, self._validation_order = self._all_orders
        self.fingerprint = self._all_keys
        if fold is not None:
            assert self.folds is not None
            assert not self.on_disk
            self._order, self._validation_order = (self.folds.without(order, fold) for order in self._all_orders)
            self.fingerprint = (self._all_keys - self.folds.counts.get(fold, (0, 0, 0))[2]) % 2**64
        self.rows, self.validation_rows = len(self._order), len(self._validation_order)

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs of the next training."""
        seeded = self._stored.columns.preprocess is not None
        self._schedule = Schedule(plan, first, self.rows, epochs, seeded=seeded)

    @abstractmethod
    def to(self, device: str) -> None:
        """Sets the device of the batches."""

    @abstractmethod
    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""

    @abstractmethod
    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times that of its class, one per class; `None`: its weight."""

    @abstractmethod
    def select(self, places: torch.Tensor) -> Batch:
        """Returns training rows by number, in key order; int64 of shape `(rows,)`."""

    def close(self) -> None:
        """Ends threads and frees rows on disk; can be called twice."""
        self._stored.close()


def at(order: RowNumbers, places: Numbers) -> Numbers:
    """Returns the row numbers at some positions of an order."""
    return places + order.start if isinstance(order, range) else order[places]
