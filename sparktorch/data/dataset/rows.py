"""The rows of a rank by row number: in memory, where batches are taken from them, and in storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch
from sparktorch.base.devices import upload
from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.data.fields.base import Dense, Field, Ragged
from sparktorch.data.preprocess import EVALUATION, StepContext
from sparktorch.data.runs import Runs
from sparktorch.data.storage import RowStorage

__all__ = ["Rows", "StoredRows"]


class Rows:
    """Tensors of equal length, addressed by row number.

    Attributes:
        device: Where they are, and what is taken of them.
        count: Number of rows.
    """

    def __init__(self, fields: Mapping[str, Field], columns: Columns, count: int, *, by_length: bool = False) -> None:
        """Takes the rows.

        Args:
            fields: Finished, by wire name, on the CPU.
            columns: What they are.
            count: Number of rows.
            by_length: Whether rows that are taken at a time come in the order of their lengths.
        """
        ragged = [found for found in (fields[spec.name] for spec in columns.inputs) if isinstance(found, Ragged)]
        self._sorted_by = ragged[0] if ragged and by_length else None
        self._inputs = tuple(fields[spec.name] for spec in columns.inputs)
        self._label = _tensor(fields, columns.label)
        self._weight = _tensor(fields, columns.weight)
        self._loss_weight = self._weight
        self._preprocess = columns.preprocess
        self._uneven: dict[int, Field] = {}  # by the places of their arguments
        place = 0
        for column in self._inputs if self._preprocess is None else ():
            if column.uneven:
                self._uneven[place] = column
            place += column.arguments
        self.count = count
        self.device = torch.device("cpu")
        self._copy()

    def to(self, device: torch.device) -> None:
        """Moves what batches are taken of; label and weights stay on the CPU, too."""
        for taken in self._inputs:
            taken.to(device)
        self.device = device
        self._copy()

    def _copy(self) -> None:
        """Copies label and weights to the device."""
        label, weight, loss_weight = (
            None if tensor is None else tensor.to(self.device)
            for tensor in (self._label, self._weight, self._loss_weight)
        )
        self._here = label, weight, weight if self._loss_weight is self._weight else loss_weight

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the rows with those numbers.

        Args:
            index: Row numbers of shape `(rows,)`, on the CPU.
            min_rows: Fill the inputs up to this many rows.
            context: When that is.
        """
        rows = len(index)
        if self._sorted_by is not None:  # so that micro-batches hold rows of about the same length
            index = index[self._sorted_by.lengths(index).argsort(stable=True)]
        if rows < min_rows:
            index = torch.cat([index, index.new_full((min_rows - rows,), self.count - 1)])
        here = upload(index, self.device)
        shown = here[:rows] if 0 < rows < min_rows else here
        label, weight, loss_weight = self._here
        if not rows and min_rows:  # what fills up is shown, at no weight
            weight = loss_weight = torch.zeros(min_rows, device=self.device)
        else:
            same, weight = loss_weight is weight, None if weight is None else weight.index_select(0, shown)
            loss_weight = weight if same or loss_weight is None else loss_weight.index_select(0, shown)
        inputs, lengths = self._arguments(index, here, context)
        label = None if label is None else label.index_select(0, shown)
        return Batch(inputs, label, weight, rows, loss_weight, lengths)

    def _arguments(
        self, index: torch.Tensor, here: torch.Tensor, context: StepContext
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Returns what the rows with those numbers are to `forward`, and `Batch.lengths`."""
        if self._preprocess is not None:
            taken = [column.take(index, here) for column in self._inputs]
            return tuple(self._preprocess(taken, len(index), context).values()), {}
        arguments = tuple(argument for column in self._inputs for argument in column.take(index, here))
        return arguments, {place: column.lengths(index) for place, column in self._uneven.items()}

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        assert self._label is not None
        of_class = torch.tensor(weights, dtype=torch.float32)[self._label]
        self._loss_weight = of_class if self._weight is None else of_class * self._weight
        self._copy()

    def weight_by_class(self, index: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of those rows by class, of shape `(classes,)`."""
        assert self._label is not None
        weights = None if self._weight is None else self._weight.double()[index].numpy()
        return np.bincount(self._label[index].numpy(), weights, classes).astype(np.float64)

    def loss_weights(self, index: torch.Tensor | None = None) -> npt.NDArray[np.float64] | None:
        """Returns what rows count for in the loss, all of them or those of an index; `None` means all ones."""
        if self._loss_weight is None:
            return None
        weights = self._loss_weight if index is None else self._loss_weight[index]
        return weights.double().numpy()


class StoredRows:
    """All rows of a rank, as they were read.

    Attributes:
        count: Number of rows; at least one, since a rank without rows has a placeholder.
        bytes: Size of the rows; 0 for a placeholder.
        decodes: Whether to take a row is more than to copy it.
        on_disk: Whether the rows are on disk.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        columns: Columns,
        storage: RowStorage,
        *,
        count: int,
        size: int,
        by_length: bool,
    ) -> None:
        """Takes the rows.

        Args:
            fields: By wire name.
            columns: Which columns became which tensors.
            storage: Where the fields keep their rows.
            count: Number of rows, the placeholder included.
            size: Bytes of the rows, without the placeholder.
            by_length: Whether rows that are taken at a time come in the order of their lengths.
        """
        self.columns, self.count, self.bytes = columns, count, size
        self.decodes = columns.preprocess is not None or any(fields[spec.name].decodes for spec in columns.inputs)
        self.on_disk = storage.on_disk
        self._fields, self._storage, self._by_length = fields, storage, by_length

    def load(self, runs: Runs, *, inputs: bool = True) -> Rows:
        """Returns a copy in memory of the rows with those numbers; without inputs, only their label and weight."""
        specs = [spec for spec in (self.columns.label, self.columns.weight) if spec is not None]
        columns = self.columns if inputs else replace(self.columns, inputs=())
        fields = {spec.name: self._fields[spec.name].read(runs) for spec in (self.columns.tensors if inputs else specs)}
        return Rows(fields, columns, runs.count, by_length=self._by_length)

    def finish(self) -> Rows:
        """Returns all rows, which are in memory."""
        for column in self._fields.values():
            column.finish()
        return Rows(self._fields, self.columns, self.count, by_length=self._by_length)

    def close(self) -> None:
        """Frees what is on disk."""
        self._storage.close()


def _tensor(fields: Mapping[str, Field], spec: TensorSpec | None) -> torch.Tensor | None:
    """Returns all rows of a label or of weights."""
    if spec is None:
        return None
    field = fields[spec.name]
    assert isinstance(field, Dense)
    return field.values
