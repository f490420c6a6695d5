"""The rows of one rank as a data set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparktorch.base.batch import RankDataset
from sparktorch.data.dataset.rows import StoredRows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.plan import Numbers, RankOrder, SamplingPlan, mix_words
from sparktorch.data.sampling.row_keys import RowKeys

__all__ = ["Int64", "RowNumbers", "Schedule", "Shard", "at"]

Int64 = npt.NDArray[np.int64]
RowNumbers = Numbers | range

_AHEAD_ROWS = 1 << 15  # from here on, ordering an epoch takes longer than to start a thread


@dataclass(frozen=True)
class Schedule:
    """What a rank trains when.

    Attributes:
        plan: The order of all rows.
        first: The position of the rank's first row.
        rows: Number of the rank's rows.
        epochs: How many epochs are trained.
        seeded: Whether something random is done to the rows of a step, for which it has a seed of its own.
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
        """Returns when the steps from `start` to `stop` are, with the seed of this rank's part of each."""
        if not self.seeded:
            return [StepContext(epoch, 0)] * (stop - start)
        seeds = mix_words(self.plan.seed, epoch, np.arange(start, stop, dtype=np.int64), self.first) >> np.uint64(1)
        return [StepContext(epoch, seed) for seed in seeds.tolist()]

    def worth_ahead(self, epoch: int) -> bool:
        """Whether that epoch will be trained, and has so many rows that it is worth a thread to order them."""
        return epoch < self.epochs and self.rows >= _AHEAD_ROWS


class Shard(RankDataset):
    """The rows of one rank: training rows addressed by position, validation rows in key order.

    Attributes:
        rows: Number of training rows.
        validation_rows: Number of validation rows.
        dropped: Number of rows that were left out because they hold nulls.
        fingerprint: Of all rows, whatever their order.
        bytes: Size of the rows.
        storage: Where rows are: on "disk", in "memory", or on the "device".
    """

    def __init__(self, stored: StoredRows, row_keys: RowKeys, *, dropped: int) -> None:
        """Takes rows, the order in which they arrived, and the number of those that were left out."""
        self.rows, self.validation_rows = row_keys.count - row_keys.held_out, row_keys.held_out
        self.fingerprint, self.dropped, self.bytes = row_keys.fingerprint, dropped, stored.bytes
        self.storage = "disk" if stored.on_disk else "memory"
        self._stored = stored
        self._order, self._validation_order = row_keys.orders()

    @property
    def on_disk(self) -> bool:
        """Whether the rows are on disk."""
        return self._stored.on_disk

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the plan of the training, and its number of epochs."""
        seeded = self._stored.columns.preprocess is not None
        self._schedule = Schedule(plan, first, self.rows, epochs, seeded=seeded)

    @abstractmethod
    def to(self, device: str) -> None:
        """Has batches come on a device."""

    @abstractmethod
    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""

    @abstractmethod
    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""

    def close(self) -> None:
        """Ends threads and frees what is on disk; closing twice is fine."""
        self._stored.close()


def at(order: RowNumbers, places: Numbers) -> Numbers:
    """Returns the rows at those places of an order."""
    return places + order.start if isinstance(order, range) else order[places]
