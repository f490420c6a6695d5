"""A rank's rows in memory, handed out as the rank's part of each global batch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.data.columns import KEY, VALIDATION, Columns, TensorSpec
from sparktorch.data.fields import Dense, Field
from sparktorch.data.plan import SamplingPlan
from sparktorch.data.spool import InMemory, Spooler
from sparktorch.data.tensors import check_finite, check_labels, check_weights

__all__ = ["Batch", "Rows", "Shard", "balanced"]

_AHEAD_ROWS = 1 << 15


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        inputs: One tensor of shape `(rows, ...)` per argument of `forward`.
        label: Tensor of shape `(rows, ...)`, or `None`.
        weight: float32 sample weights of shape `(rows,)`; `None` means all ones.
        rows: Number of real rows. The inputs may hold more, to fill them up; where the rank has no
            row at this step, so that it can join every collective, label and weights hold them too,
            the weights zero.
        loss_weight: What each row counts for in the loss: its weight times that of its class.
    """

    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    rows: int
    loss_weight: torch.Tensor | None = None


class Rows:
    """Tensors of equal length, addressed by row number."""

    def __init__(self, fields: Mapping[str, Field], columns: Columns, device: str, count: int) -> None:
        """Takes finished fields by wire name, on `device`, and the number of their rows."""
        self._inputs = tuple(fields[spec.name] for spec in columns.inputs)
        self._label = _tensor(fields, columns.label)
        self._weight = _tensor(fields, columns.weight)
        self._loss_weight = self._weight
        self._device = device
        self.count = count

    def take(self, index: torch.Tensor, *, least: int = 0) -> Batch:
        """Returns the rows with those numbers.

        Args:
            index: int64 row numbers of shape `(rows,)`.
            least: Fill the inputs up to this many rows.
        """
        rows = len(index)
        filled = index
        if rows < least:
            filled = torch.cat([index, index.new_full((least - rows,), self.count - 1)])
        weight = None if self._weight is None else self._weight.index_select(0, index)
        loss_weight = weight
        if self._loss_weight is not self._weight and self._loss_weight is not None:
            loss_weight = self._loss_weight.index_select(0, index)
        if not rows and least:
            index, weight = filled, torch.zeros(least, device=self._device)
            loss_weight = weight
        return Batch(
            tuple(argument for field in self._inputs for argument in field.take(filled)),
            None if self._label is None else self._label.index_select(0, index),
            weight,
            rows,
            loss_weight,
        )

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        assert self._label is not None
        of_class = torch.tensor(weights, dtype=torch.float32, device=self._device)[self._label]
        self._loss_weight = of_class if self._weight is None else of_class * self._weight

    def weight_by_class(self, index: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of those rows by class, of shape `(classes,)`."""
        assert self._label is not None
        weights = None if self._weight is None else self._weight.double().cpu()[index].numpy()
        return np.bincount(self._label.cpu()[index].numpy(), weights, classes).astype(np.float64)

    def loss_weights(self) -> npt.NDArray[np.float64] | None:
        """Returns what every row counts for in the loss, of shape `(count,)`; `None` means all ones."""
        return None if self._loss_weight is None else self._loss_weight.double().cpu().numpy()


class Shard:
    """The rows of one rank: training rows addressed by position, validation rows in key order."""

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        columns: Columns,
        *,
        spare: pa.RecordBatch | None = None,
        device: str = "cpu",
        spooler: Spooler | None = None,
    ) -> None:
        """Reads the batches of one partition and checks every row.

        Args:
            batches: Record batches with the wire names of `columns` and an int64 column `k`.
            columns: Which columns become which tensors.
            spare: A row for a rank without any to stand in with; zeros without it.
            device: Where the tensors are kept.
            spooler: Where the rows are kept while they arrive; by default in memory.

        Raises:
            ColumnError: A row cannot be trained on; says column, count and first row.
        """
        fields = {spec.name: _field(spec, columns, spooler or InMemory()) for spec in columns.tensors}
        keys, held_out = _read(batches, columns, fields)
        self.bytes = sum(field.nbytes for field in fields.values())
        if not len(keys):
            if spare is not None:
                _read([spare], columns, fields)
            else:
                for field in fields.values():
                    field.stand_in()
        for field in fields.values():
            field.finish(device)
        # Positions are the ranks of the keys read as unsigned: the order of the ranks' key ranges.
        order = np.argsort(keys.view(np.uint64), kind="stable")
        marked = held_out[order]
        self._order = torch.from_numpy(order[~marked])
        self._validation_order = torch.from_numpy(order[marked])
        self._all = Rows(fields, columns, device, max(1, len(keys)))
        self.fingerprint = int(keys[~held_out].view(np.uint64).sum(dtype=np.uint64))
        self._device = device
        self._first = 0
        self._plan: SamplingPlan | None = None
        self._epochs = 1
        self._orders: dict[int, _Order] = {}
        self._ahead: threading.Thread | None = None

    @property
    def rows(self) -> int:
        """Number of training rows in this rank."""
        return len(self._order)

    @property
    def validation_rows(self) -> int:
        """Number of validation rows in this rank."""
        return len(self._validation_order)

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Tells the shard the position of its first row, the plan it trains by, and for how many epochs."""
        self._first = first
        self._plan = plan
        self._epochs = epochs

    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""
        sums: list[float] = self._all.weight_by_class(self._order, classes).tolist()
        return sums

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        self._all.weigh_classes(weights)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        assert self._plan is not None
        weights = self._all.loss_weights()
        if weights is not None:
            weights = weights[self._order.numpy()]
        return torch.from_numpy(np.bincount(self._order_of(epoch).steps, weights, self._plan.steps)).double()

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.tensor(self._order_of(epoch).ends).diff(prepend=torch.zeros(1, dtype=torch.int64))

    def epoch(self, epoch: int, *, least: int = 1, first: int = 0) -> Iterator[Batch]:
        """Yields this rank's part of every global batch of the epoch, in the order of the steps.

        Args:
            epoch: Number of the epoch, from 0.
            least: Fill the inputs of each part up to this many rows.
            first: The step to begin with.
        """
        order = self._order_of(epoch)
        self._plan_ahead(epoch + 1)
        index = order.index.to(self._device)
        for start, end in list(zip([0, *order.ends[:-1]], order.ends, strict=True))[first:]:
            yield self._all.take(index[start:end], least=least)

    def validation(self, size: int, *, batches: int = 0) -> Iterator[Batch]:
        """Yields this rank's validation rows, at most `size` at a time.

        Args:
            size: The most rows of a batch.
            batches: Yield at least so many; those without rows hold a row of weight zero.
        """
        index = self._validation_order.to(self._device)
        for start in range(0, max(len(index), batches * size), size):
            yield self._all.take(index[start : start + size], least=1 if batches else 0)

    def _order_of(self, epoch: int) -> _Order:
        if epoch not in self._orders and self._ahead is not None:
            self._ahead.join()
        for old in [known for known in self._orders if known < epoch]:
            del self._orders[old]
        if epoch not in self._orders:
            self._orders[epoch] = self._make_order(epoch)
        return self._orders[epoch]

    def _plan_ahead(self, epoch: int) -> None:
        """Orders an epoch while the one before is trained, where that takes longer than to start a thread."""
        busy = self._ahead is not None and self._ahead.is_alive()
        if self.rows < _AHEAD_ROWS or epoch >= self._epochs or busy or epoch in self._orders:
            return

        def work() -> None:
            self._orders[epoch] = self._make_order(epoch)

        self._ahead = threading.Thread(target=work, name="sparktorch-order", daemon=True)
        self._ahead.start()

    def _make_order(self, epoch: int) -> _Order:
        assert self._plan is not None
        steps = self._plan.steps_of(self._first, self._first + self.rows, epoch)
        narrow = steps.astype(np.uint16) if self._plan.steps <= 1 << 16 else steps  # sorted by radix, 7 times as fast
        by_step = torch.from_numpy(np.argsort(narrow, kind="stable"))
        ends = np.cumsum(np.bincount(steps, minlength=self._plan.steps)).tolist()
        return _Order(steps, self._order.index_select(0, by_step), ends)


@dataclass(frozen=True)
class _Order:
    """The order of a rank's rows in one epoch.

    Attributes:
        steps: The step of every row, in the order of positions.
        index: The rows in the order of their steps.
        ends: Where in it each step ends.
    """

    steps: npt.NDArray[np.int64]
    index: torch.Tensor
    ends: list[int]


def balanced(sums: Sequence[float]) -> list[float]:
    """Returns the weights that make all classes count the same: `rows / (classes * rows of the class)`.

    Args:
        sums: Rows, or the sum of their weights, by class. Classes without any are not counted; their
            weight is 1, the mean over all rows.
    """
    present = sum(1 for count in sums if count)
    return [sum(sums) / (present * count) if count else 1.0 for count in sums]


def _tensor(fields: Mapping[str, Field], spec: TensorSpec | None) -> torch.Tensor | None:
    """Returns all rows of a label or of weights."""
    if spec is None:
        return None
    field = fields[spec.name]
    assert isinstance(field, Dense)
    return field.values


def _field(spec: TensorSpec, columns: Columns, spooler: Spooler) -> Field:
    """Returns an empty field for a column, which checks its rows for what they are to be."""

    def label(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return check_labels(values, columns)

    def weight(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        check_weights(values, spec)
        return values

    def finite(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        check_finite(values, spec)
        return values

    if spec is columns.label:
        return Dense(spec, spooler, label, dtype=None if columns.classes is None else np.int64)
    return Dense(spec, spooler, weight if spec is columns.weight else finite)


def _read(
    batches: Iterable[pa.RecordBatch], columns: Columns, fields: Mapping[str, Field]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Reads all batches into the fields; returns the keys and the mask of validation rows."""
    keys: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    held_out: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    row = 0
    for batch in batches:
        for spec in columns.tensors:
            fields[spec.name].append(batch.column(spec.name), first_row=row)
        keys.append(batch.column(KEY).to_numpy())
        if columns.validation:
            # A null flag is no flag.
            held_out.append(batch.column(VALIDATION).fill_null(False).to_numpy(zero_copy_only=False))
        else:
            held_out.append(np.zeros(batch.num_rows, np.bool_))
        row += batch.num_rows
    return np.concatenate(keys), np.concatenate(held_out)
