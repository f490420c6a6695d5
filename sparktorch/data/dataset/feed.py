"""How a rank's rows come to the training: from tensors in memory, or window by window from disk."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.data.convert.preprocess import Moment
from sparktorch.data.dataset.device_transfer import batch_bytes, moved
from sparktorch.data.dataset.prefetch import ByEpoch, ahead
from sparktorch.data.sampling.plan import Numbers, RankOrder, SamplingPlan, by_step, mix_words
from sparktorch.data.storage import Runs

if TYPE_CHECKING:
    from sparktorch.data.dataset.reader import Batch, Rows

__all__ = ["Feed", "OutOfCore", "Resident", "Schedule", "Stored"]

Int64 = npt.NDArray[np.int64]
RowNumbers = Numbers | range

_AHEAD_ROWS = 1 << 15  # from here on, ordering an epoch takes longer than to start a thread
_CHUNK_ROWS = 1 << 16
_AHEAD_BATCHES = 4  # that are decoded


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

    def moments(self, epoch: int, start: int, stop: int) -> list[Moment]:
        """Returns when the steps from `start` to `stop` are, with the seed of this rank's part of each."""
        if not self.seeded:
            return [Moment(epoch, 0)] * (stop - start)
        seeds = mix_words(self.plan.seed, epoch, np.arange(start, stop, dtype=np.int64), self.first) >> np.uint64(1)
        return [Moment(epoch, seed) for seed in seeds.tolist()]

    def worth_ahead(self, epoch: int) -> bool:
        """Whether that epoch will be trained, and has so many rows that it is worth a thread to order them."""
        return epoch < self.epochs and self.rows >= _AHEAD_ROWS


class Feed(Protocol):
    """Hands out the rows of a rank; see `sparktorch.data.dataset.reader.Shard`, whose methods these are."""

    def place(self, schedule: Schedule) -> None:
        """Tells it what is trained when."""
        ...

    def to(self, device: torch.device, *, stay: bool) -> None:
        """Has batches come on a device; where the rows are to `stay` in memory, one by one."""
        ...

    def weight_by_class(self, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of the training rows by class."""
        ...

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        ...

    def step_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        """Returns the weight of the rows in each step."""
        ...

    def step_rows(self, epoch: int) -> Int64:
        """Returns the number of rows in each step."""
        ...

    def epoch(self, epoch: int, *, least: int, first: int) -> Generator[Batch]:
        """Yields the part of every batch of the epoch from step `first` on."""
        ...

    def validation(self, size: int, *, batches: int) -> Generator[Batch]:
        """Yields the validation rows."""
        ...

    def close(self) -> None:
        """Ends its threads."""
        ...


@dataclass(frozen=True)
class _Order:
    """The order of a rank's rows in one epoch.

    Attributes:
        index: The rows in the order of their steps, those of a step in the order of their positions.
        ends: Where in it each step ends.
    """

    index: torch.Tensor
    ends: Int64


class Resident:
    """Rows in memory, the host's or the device's: each batch is taken from them when it is asked for."""

    def __init__(
        self, rows: Rows, order: RowNumbers, validation_order: RowNumbers, *, decoding: bool, budget: int
    ) -> None:
        """Takes all rows.

        Args:
            rows: Of the rank, on the CPU.
            order: The training rows in the order of their positions.
            validation_order: The validation rows in their order.
            decoding: Whether to take rows is more than to copy them, and is done in a thread.
            budget: Bytes, half of which what is taken ahead may take, but one batch at least.
        """
        self._rows, self._decoding, self._budget = rows, decoding, budget
        self._order, self._validation_index = order, _index(validation_order)
        self._orders = ByEpoch(self._make_order)
        self._device = rows.device

    def to(self, device: torch.device, *, stay: bool) -> None:
        """Has batches come on a device; where the rows are to `stay` in memory, one by one."""
        self._device = device
        if not stay:
            self._rows.to(device)

    def place(self, schedule: Schedule) -> None:
        """Tells it what is trained when."""
        self._schedule = schedule

    def weight_by_class(self, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of the training rows by class."""
        return self._rows.weight_by_class(_index(self._order), classes)

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count for its weight times that of its class."""
        self._rows.weigh_classes(weights)

    def step_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        """Returns the weight of the rows in each step."""
        order, rows = self._orders[epoch], self.step_rows(epoch)
        found = np.empty(len(rows))
        some = max(1, _CHUNK_ROWS * len(rows) // max(1, len(order.index)))  # a bounded number of rows at a time
        for start in range(0, len(rows), some):
            stop = min(start + some, len(rows))
            index = order.index[order.ends[start] - rows[start] : order.ends[stop - 1]]
            step = np.repeat(np.arange(stop - start), rows[start:stop])
            found[start:stop] = np.bincount(step, self._rows.loss_weights(index), stop - start)
        return found

    def step_rows(self, epoch: int) -> Int64:
        """Returns the number of rows in each step."""
        return np.diff(self._orders[epoch].ends, prepend=0)

    def epoch(self, epoch: int, *, least: int, first: int) -> Generator[Batch]:
        """Yields the part of every batch of the epoch from step `first` on."""
        order = self._orders[epoch]
        self._orders.forget(epoch)
        if self._schedule.worth_ahead(epoch + 1):
            self._orders.begin(epoch + 1)
        index, ends = order.index, [0, *order.ends.tolist()]
        moments = self._schedule.moments(epoch, first, len(ends) - 1)
        batches = (
            self._rows.take(index[start:end], least=least, moment=moment)
            for start, end, moment in zip(ends[first:], ends[first + 1 :], moments, strict=False)
        )
        return self._coming(batches, _AHEAD_BATCHES)

    def validation(self, size: int, *, batches: int) -> Generator[Batch]:
        """Yields the validation rows."""
        index = self._validation_index
        starts = range(0, max(len(index), batches * size), size)
        taken = (self._rows.take(index[s : s + size], least=1 if batches else 0) for s in starts)
        return self._coming(taken, 1)

    def _coming(self, batches: Generator[Batch], depth: int) -> Generator[Batch]:
        """Returns batches as they come on the device: by a thread, where that is more than to take them."""
        if self._decoding:
            batches = ahead(batches, depth, size=batch_bytes, most=self._budget // 2)
        return batches if self._rows.device == self._device else moved(batches, self._device)

    def close(self) -> None:
        """Ends its threads."""
        self._orders.close()

    def _make_order(self, epoch: int) -> _Order:
        first, count, plan = self._schedule.first, self._schedule.rows, self._schedule.plan
        places, ends = by_step(plan.steps_of(first, first + count, epoch), plan.steps)
        return _Order(torch.from_numpy(_at(self._order, places)), ends)


class Stored(Protocol):
    """Rows on disk."""

    bytes_per_row: float
    last: int  # the number of the last row
    weighted: bool
    decodes: bool  # whether to take rows is more than to copy them

    def load(self, runs: Runs, *, inputs: bool = True) -> Rows:
        """Returns a copy of those rows in memory, without their inputs where only their weights are of interest."""
        ...


class OutOfCore:
    """Rows on disk: those of some steps in a row are read at once, in a thread, before they are asked for."""

    def __init__(self, stored: Stored, order: RowNumbers, validation_order: RowNumbers, *, budget: int) -> None:
        """Takes what is on disk.

        Args:
            stored: The rows.
            order: The training rows in the order of their positions.
            validation_order: The validation rows in their order.
            budget: Bytes that rows may take in memory. One window of them waits and another one is
                read: each may have half of it, but has one step at least. What is decoded ahead
                may have as much as a window.
        """
        self._stored, self._order, self._validation_order = stored, order, validation_order
        self._device = torch.device("cpu")
        self._budget = budget
        self._class_weights: Sequence[float] | None = None
        self._orders = ByEpoch(self._make_order)
        self._weights = ByEpoch(self._make_weights)

    def to(self, device: torch.device, *, stay: bool) -> None:
        """Has batches come on a device; the rows always stay on disk."""
        self._device = device

    def place(self, schedule: Schedule) -> None:
        """Tells it what is trained when."""
        self._schedule = schedule
        plan = schedule.plan
        step_bytes = self._stored.bytes_per_row * schedule.rows / plan.steps
        self._window = min(plan.block, max(1, int(self._budget / 2 // max(step_bytes, 1))))

    def weight_by_class(self, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of the training rows by class."""
        sums = np.zeros(classes)
        for start in range(0, len(self._order), _CHUNK_ROWS):
            rows = self._stored.load(_runs(self._order[start : start + _CHUNK_ROWS]), inputs=False)
            sums += rows.weight_by_class(torch.arange(rows.count), classes)
        return sums

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count for its weight times that of its class."""
        self._class_weights = weights

    def step_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        """Returns the weight of the rows in each step."""
        return self._weights[epoch]

    def step_rows(self, epoch: int) -> Int64:
        """Returns the number of rows in each step."""
        return self._orders[epoch].step_rows()

    def epoch(self, epoch: int, *, least: int, first: int) -> Generator[Batch]:
        """Yields the part of every batch of the epoch from step `first` on."""
        order = self._orders[epoch]
        for known in (self._orders, self._weights):
            known.forget(epoch)
        if self._schedule.worth_ahead(epoch + 1):
            self._weights.begin(epoch + 1)
        return self._ahead(self._batches(order, least, first), self._window)

    def validation(self, size: int, *, batches: int) -> Generator[Batch]:
        """Yields the validation rows."""
        return self._ahead(self._validation_batches(size, batches), 1)

    def close(self) -> None:
        """Ends its threads."""
        self._weights.close()
        self._orders.close()

    def _ahead(self, batches: Generator[Batch], depth: int) -> Generator[Batch]:
        """Returns batches on the device, read in a thread."""
        if self._stored.decodes:  # to more bytes than the window that they are taken from
            coming = ahead(batches, min(depth, _AHEAD_BATCHES), size=batch_bytes, most=self._budget // 2)
        else:
            coming = ahead(batches, depth)
        return moved(coming, self._device)

    def _batches(self, order: RankOrder, least: int, first: int) -> Generator[Batch]:
        """Reads window by window; of a block that is too large, a part of its steps at a time."""
        plan = self._schedule.plan
        for number in range(first // plan.block, order.windows):
            begin, end = number * plan.block, min((number + 1) * plan.block, plan.steps)
            position, step = order.window(number)
            for start in range(max(first, begin), end, self._window):
                stop = min(start + self._window, end)
                now = (step >= start) & (step < stop)
                moments = self._schedule.moments(order.epoch, start, stop)
                yield from self._steps(position[now], step[now] - start, moments, least)

    def _steps(self, position: Int64, step: Int64, moments: list[Moment], least: int) -> Generator[Batch]:
        """Reads the rows of some steps, and yields those of each."""
        rows = self._load(self._order, position - self._schedule.first)
        index = torch.from_numpy(np.argsort(step, kind="stable"))
        ends = np.cumsum(np.bincount(step, minlength=len(moments))).tolist()
        for start, end, moment in zip([0, *ends[:-1]], ends, moments, strict=True):
            yield rows.take(index[start:end], least=least, moment=moment)

    def _validation_batches(self, size: int, batches: int) -> Generator[Batch]:
        count = len(self._validation_order)
        for start in range(0, max(count, batches * size), size):
            taken = np.arange(min(start, count), min(start + size, count), dtype=np.int64)
            rows = self._load(self._validation_order, taken)
            yield rows.take(torch.arange(len(taken)), least=1 if batches else 0)

    def _load(self, order: RowNumbers, places: Int64) -> Rows:
        """Reads rows, and behind them the shard's last one, to fill up with, as from memory."""
        rows = self._stored.load(Runs.of(np.append(_at(order, places), self._stored.last)))
        if self._class_weights is not None:
            rows.weigh_classes(self._class_weights)
        return rows

    def _make_order(self, epoch: int) -> RankOrder:
        return self._schedule.order(epoch)

    def _make_weights(self, epoch: int) -> npt.NDArray[np.float64]:
        order, steps = self._orders[epoch], self._schedule.plan.steps
        if not self._stored.weighted and self._class_weights is None:
            return order.step_rows().astype(np.float64)
        sums = np.zeros(steps)
        for number in range(order.windows):
            position, step = order.window(number)
            rows = self._stored.load(Runs.of(_at(self._order, position - self._schedule.first)), inputs=False)
            if self._class_weights is not None:
                rows.weigh_classes(self._class_weights)
            sums += np.bincount(step, rows.loss_weights(), steps)
        return sums


def _at(order: RowNumbers, places: Numbers) -> Numbers:
    """Returns the rows at those places of an order."""
    return places + order.start if isinstance(order, range) else order[places]


def _index(order: RowNumbers) -> torch.Tensor:
    return torch.arange(order.start, order.stop) if isinstance(order, range) else torch.from_numpy(order)


def _runs(rows: RowNumbers) -> Runs:
    if isinstance(rows, range):
        return Runs(np.array([rows.start], np.int64), np.array([rows.stop], np.int64))
    return Runs.of(rows)
