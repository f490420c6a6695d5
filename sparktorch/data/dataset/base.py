"""The rows of one rank as a data set: what shards in memory and on disk have in common, and folds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.base.batch import Batch, RankDataset
from sparktorch.data.columns import FOLD
from sparktorch.data.dataset.prefetch import ByEpoch, on_device, read_ahead
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import StepContext
from sparktorch.data.sampling.groups import GroupKeys
from sparktorch.data.sampling.plan import Numbers, SamplingPlan, mix_words
from sparktorch.data.sampling.row_keys import RowKeys

__all__ = ["AHEAD_BATCHES", "CHUNK_ROWS", "Folds", "Int64", "RankSteps", "RowNumbers", "Shard", "row_numbers_at"]

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
RowNumbers = Numbers | range

AHEAD_BATCHES = 4  # This number of batches is decoded in advance.
CHUNK_ROWS = 1 << 16  # The weights of this number of rows are read at a time.
_AHEAD_ROWS = 1 << 15  # From this number of rows on, ordering an epoch takes longer than starting a thread.


@dataclass(frozen=True)
class RankSteps:
    """The steps in which a rank trains its rows.

    Attributes:
        plan: The sampling plan of all ranks.
        first: Position of the rank's first row.
        rows: Number of the rank's rows.
        epochs: Number of epochs.
        seeded: Whether each step has a seed of its own, for `preprocess`.
    """

    plan: SamplingPlan
    first: int
    rows: int
    epochs: int = 1
    seeded: bool = False

    def contexts(self, epoch: int, start: int, stop: int) -> list[StepContext]:
        """Returns the contexts of the steps from `start` to `stop`; seeds differ between steps and between ranks."""
        if not self.seeded:
            return [StepContext(epoch, 0)] * (stop - start)
        seeds = mix_words(self.plan.seed, epoch, np.arange(start, stop, dtype=np.int64), self.first) >> np.uint64(1)
        return [StepContext(epoch, seed) for seed in seeds.tolist()]

    def is_worth_a_thread(self, epoch: int) -> bool:
        """Whether an epoch will be trained, and has so many rows that a thread should order them in advance."""
        return epoch < self.epochs and self.rows >= _AHEAD_ROWS


class FoldCounts(NamedTuple):
    """Counts of a rank's rows in a fold.

    Attributes:
        training_rows: Number of training rows.
        validation_rows: Number of rows that are marked for validation.
        key_sum: Sum of the keys of the training rows, modulo 2**64.
    """

    training_rows: int = 0
    validation_rows: int = 0
    key_sum: int = 0


class Folds:
    """Which fold of a cross-validation each row of a rank is in, in order of arrival, and the columns for evaluators.

    Attributes:
        counts: The counts of each fold's rows.
        nulls: Number of nulls in the carried columns.
    """

    def __init__(self, carried: Sequence[str]) -> None:
        """Starts without rows; `carried` names the columns to keep for evaluators."""
        self._folds: list[Array] = []
        self._carried: dict[str, list[Array]] = {name: [] for name in carried}
        self.counts: dict[int, FoldCounts] = {}
        self.nulls = 0

    def append(self, rows: pa.RecordBatch, keys: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> None:
        """Appends the rows of a batch, whose column `FOLD` has their folds; `held_out` marks rows for validation."""
        folds = np.array(rows.column(FOLD))  # A copy does not keep the batch in memory.
        self._folds.append(folds)
        for name, parts in self._carried.items():
            self.nulls += rows.column(name).null_count
            parts.append(np.array(rows.column(name), np.float64))
        for fold in np.unique(folds).tolist():
            in_fold = folds == fold
            is_trained = in_fold & ~held_out
            key_sum = int(keys.view(np.uint64)[is_trained].sum(dtype=np.uint64))
            before = self.counts.get(fold, FoldCounts())
            self.counts[fold] = FoldCounts(
                before.training_rows + int(is_trained.sum()),
                before.validation_rows + int((in_fold & held_out).sum()),
                (before.key_sum + key_sum) % 2**64,
            )

    def without(self, order: RowNumbers, fold: int) -> Numbers:
        """Returns the row numbers of an order that are not in a fold."""
        numbers = np.arange(order.start, order.stop) if isinstance(order, range) else order
        others: Numbers = numbers[self._fold_of_rows[numbers] != fold]
        return others

    def members(self, fold: int) -> npt.NDArray[np.int64]:
        """Returns the row numbers of a fold, validation rows included, in order of arrival."""
        return np.flatnonzero(self._fold_of_rows == fold).astype(np.int64)

    def last_without(self, fold: int) -> int | None:
        """Returns the last row number that is not in a fold."""
        others = np.flatnonzero(self._fold_of_rows != fold)
        return int(others[-1]) if len(others) else None

    def carried(self, fold: int) -> dict[str, Array]:
        """Returns the values of the carried columns in a fold, in the order of `members`."""
        index = self.members(fold)
        return {name: _join(parts, np.float64)[index] for name, parts in self._carried.items()}

    @property
    def _fold_of_rows(self) -> Array:
        """The fold of each row, by row number; the parts of the batches are joined once."""
        if len(self._folds) != 1:
            self._folds = [_join(self._folds, np.int32)]
        return self._folds[0]


class Shard(RankDataset):
    """The rows of one rank: training rows addressed by position, validation rows in key order.

    Where rows have groups, samples take the place of rows: whole groups, or windows of them.

    Before a training, `leave_out` may leave out the rows of a fold, `to` sets the device, and `schedule` the plan. Then
    come `epoch` and `validation`, and at the end `close`.

    Attributes:
        dropped: Number of rows dropped because of a null, NaN or infinity.
        fingerprint: Sum of the keys of the training rows, modulo 2**64; independent of their order.
        bytes: Size of the rows in bytes.
        storage: Where the rows are: "disk", "memory" or "device".
        folds: The folds of the rows; `None` if they have none.
        groups: Counts by name, or `None` without groups. They are the number of `groups`, of groups too `short` for a
            window, of rows in the `largest` group, of all `rows`, of rows `marked` for validation, and of `gaps`
            between rows.
    """

    def __init__(
        self, stored: Rows, row_keys: RowKeys, *, dropped: int, budget: int, folds: Folds | None = None
    ) -> None:
        """Takes the rows, their keys in order of arrival, the number of dropped rows, and the folds.

        Batches decoded in advance use at most half of `budget` bytes, or hold one batch if it is larger.
        """
        self.dropped = dropped
        self.bytes = stored.bytes
        self.storage = "disk" if stored.on_disk else "memory"
        self.varies = stored.varies
        self.groups = row_keys.facts if isinstance(row_keys, GroupKeys) else None
        self.folds = folds
        self._stored = stored
        self._budget = budget
        # These cover all folds; `leave_out` sets the orders and the fingerprint of the current training.
        self._all_orders = row_keys.orders()
        self._fingerprint_of_all = row_keys.fingerprint
        self._order, self._validation_order = self._all_orders
        self.fingerprint = row_keys.fingerprint
        self.rows = len(self._order)
        self.validation_rows = len(self._validation_order)
        self._device = torch.device("cpu")
        self._depth = AHEAD_BATCHES
        self._class_weights: Sequence[float] | None = None
        self._orders: ByEpoch[Any] = ByEpoch(self._make_order)
        # A later entry of the list uses the entries before it, so they are closed from the last to the first.
        self._by_epoch: list[ByEpoch[Any]] = [self._orders]

    def leave_out(self, fold: int | None) -> None:
        """Leaves the rows of a fold out of training and validation; the other rows keep their order.

        `None` takes the rows of all folds.
        """
        order, validation_order = self._all_orders
        self.fingerprint = self._fingerprint_of_all
        last = None
        if fold is not None:
            assert self.folds is not None
            assert not self._stored.on_disk
            order = self.folds.without(order, fold)
            validation_order = self.folds.without(validation_order, fold)
            key_sum = self.folds.counts.get(fold, FoldCounts()).key_sum
            self.fingerprint = (self._fingerprint_of_all - key_sum) % 2**64
            last = self.folds.last_without(fold)
        self._order = order
        self._validation_order = validation_order
        self.rows = len(order)
        self.validation_rows = len(validation_order)
        self._stored.last = self._stored.count - 1 if last is None else last

    def schedule(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Sets the position of the first row, the sampling plan and the number of epochs for the next training."""
        for by_epoch in reversed(self._by_epoch):
            by_epoch.clear()
        seeded = self._stored.columns.preprocess is not None
        self._rank_steps = RankSteps(plan, first, self.rows, epochs, seeded=seeded)

    def to(self, device: str) -> None:
        """Sets the device of the batches."""
        self._device = torch.device(device)

    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""
        sums = np.zeros(classes)
        for start in range(0, self.rows, CHUNK_ROWS):
            positions = np.arange(start, min(start + CHUNK_ROWS, self.rows), dtype=np.int64)
            rows, index = self._locate(self._order, positions, inputs=False)
            sums += rows.weight_by_class(index, classes)
        by_class: list[float] = sums.tolist()
        return by_class

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times the weight of its class; `None`: to its weight."""
        self._class_weights = weights

    def epoch(self, epoch: int, *, min_rows: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of the epoch from step `first` on."""
        order = self._orders[epoch]
        for by_epoch in self._by_epoch:
            by_epoch.forget(epoch)
        if self._rank_steps.is_worth_a_thread(epoch + 1):
            self._by_epoch[-1].begin(epoch + 1)
        return self._ready_batches(self._batches(order, epoch, min_rows, first), self._depth)

    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields the validation rows in at least `batches` batches of at most `size` rows."""
        return self._ready_batches(self._validation_batches(size, batches), 1)

    def select(self, positions: torch.Tensor) -> Batch:
        """Returns the training rows at some positions in key order, int64 of shape `(rows,)`."""
        rows, index = self._locate(self._order, positions.numpy())
        return rows.take(index)

    def close(self) -> None:
        """Ends threads and frees rows on disk; can be called twice."""
        for by_epoch in reversed(self._by_epoch):
            by_epoch.close()
        self._stored.close()

    @abstractmethod
    def _make_order(self, epoch: int) -> Any:
        """Returns the order of an epoch, with which `_batches` is called."""

    @abstractmethod
    def _batches(self, order: Any, epoch: int, min_rows: int, first: int) -> Generator[Batch]:
        """Yields the batches of an epoch from step `first` on, on the device where the rows are."""

    @abstractmethod
    def _locate(self, order: RowNumbers, positions: Int64, *, inputs: bool = True) -> tuple[Rows, torch.Tensor]:
        """Returns rows in memory, and the index in them of the rows at some positions of an order; see `Rows.load`."""

    def _validation_batches(self, size: int, batches: int) -> Generator[Batch]:
        count = self.validation_rows
        for start in range(0, max(count, batches * size), size):
            positions = np.arange(min(start, count), min(start + size, count), dtype=np.int64)
            rows, index = self._locate(self._validation_order, positions)
            yield rows.take(index, min_rows=1 if batches else 0)

    def _ready_batches(self, batches: Generator[Batch], depth: int) -> Generator[Batch]:
        """Returns batches on the device; threads decode and copy them, where that is needed."""
        if self._stored.decodes:
            batches = read_ahead(batches, depth, size=attrgetter("nbytes"), most=self._budget // 2)
        return batches if self._stored.device == self._device else on_device(batches, self._device)


def row_numbers_at(order: RowNumbers, positions: Numbers) -> Numbers:
    """Returns the row numbers at some positions of an order."""
    return positions + order.start if isinstance(order, range) else order[positions]


def _join(parts: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
