"""The rows of a rank, by row number; where samples are groups of rows or windows, by the number of the sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch, count_tokens
from sparktorch.base.devices import upload
from sparktorch.data.columns import Columns, TensorSpec, Window, argument_names
from sparktorch.data.fields.base import Dense, Field, Ragged
from sparktorch.data.preprocess import EVALUATION, StepContext
from sparktorch.data.sampling.groups import Samples
from sparktorch.data.sampling.plan import Numbers
from sparktorch.data.storage import RowStorage, Runs

__all__ = ["Rows", "SampledRows", "windowed"]


class Rows:
    """Tensors of equal length, addressed by row number; batches are taken from rows in memory.

    Attributes:
        count: Number of rows; at least one, since a rank without rows has a placeholder row.
        bytes: Size of the rows in bytes, without the placeholder row.
        last: The row that fills up batches that are too small.
        on_disk: Whether the rows are on disk.
        device: The device of the rows.
        decodes: Whether taking rows decodes them or runs `preprocess`, instead of only copying them.
        varies: Whether batches of equally many rows may differ in memory; see `RankDataset`.
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
        """Takes filled fields on the CPU; `count` includes the placeholder row, and `size`, in bytes, does not.

        `by_length` sorts each batch by the length of the first ragged input.
        """
        self.columns = columns
        self.count = count
        self.bytes = size
        self.last = count - 1
        self._fields = fields
        self._inputs = tuple(fields[spec.name] for spec in columns.inputs)
        self._preprocess = columns.preprocess
        self._by_length = by_length
        self._storage = storage
        self.on_disk = storage.on_disk
        self.decodes = self._preprocess is not None or any(column.decodes for column in self._inputs)
        self.varies = self._preprocess is not None or any(column.uneven for column in self._inputs)
        self.device = torch.device("cpu")

    def finish(self) -> Rows:
        """Ends appending, and returns the rows, from which batches can now be taken; only for rows in memory."""
        for column in self._fields.values():
            column.finish()
        return self._open()

    @property
    def item_bytes(self) -> float:
        """Average size in bytes of a row; in `SampledRows`, of a sample."""
        return self.bytes / self.count

    def load(self, numbers: Numbers | range, *, inputs: bool = True) -> Rows:
        """Returns a copy in memory of some rows, by number, and of the row that fills up batches.

        Without `inputs`, it has only label and weight.
        """
        runs = self._runs(numbers)
        fields, columns = self._read(runs, inputs=inputs)
        return Rows(fields, columns, RowStorage(), count=runs.count, size=0, by_length=self._by_length)._open()

    def prefetch(self, numbers: Numbers | range) -> None:
        """Has the system read the rows that `load` will read, without waiting for them."""
        runs = self._runs(numbers)
        for spec in self.columns.tensors:
            self._fields[spec.name].prefetch(runs)

    def _runs(self, numbers: Numbers | range) -> Runs:
        """Returns the runs of some rows, by number, and of the row that fills up batches."""
        return Runs.of(np.append(numbers, self.count - 1))

    def _read(self, runs: Runs, *, inputs: bool) -> tuple[dict[str, Field], Columns]:
        """Returns the columns of the rows in `runs`; without `inputs`, only label and weight."""
        columns = self.columns if inputs else replace(self.columns, inputs=())
        return {spec.name: self._fields[spec.name].read(runs) for spec in columns.tensors}, columns

    def close(self) -> None:
        """Frees rows on disk."""
        self._storage.close()

    def _open(self) -> Rows:
        """Sets what `take` needs of the columns, which are in memory now; returns the rows."""
        columns = self.columns
        ragged = [column for column in self._inputs if isinstance(column, Ragged)]
        self._sorted_by = ragged[0] if ragged and self._by_length else None
        self._label = _values(self._fields, columns.label)
        self._weight = _values(self._fields, columns.weight)
        self._loss_weight = self._weight
        self._names = argument_names(columns.inputs)
        # The keys are positions among the arguments of `forward`, of which a padded column becomes two.
        self._uneven: dict[int, Field] = {}
        self._pads: dict[int, float] = {}
        if self._preprocess is None:
            position = 0
            for spec, column in zip(columns.inputs, self._inputs, strict=True):
                if column.uneven:
                    self._uneven[position] = column
                if spec.layout == "padded":
                    self._pads[position] = spec.pad
                position += column.arguments
        self._copy_targets()
        return self

    def to(self, device: torch.device) -> None:
        """Moves the rows to a device; the CPU keeps a copy of label and weights."""
        for column in self._inputs:
            column.to(device)
        self.device = device
        self._copy_targets()

    def _copy_targets(self) -> None:
        """Copies label and weights to the device of the rows."""
        label, weight, loss_weight = (
            None if tensor is None else tensor.to(self.device)
            for tensor in (self._label, self._weight, self._loss_weight)
        )
        # If both weights are one tensor, so are their copies, of which `take` then reads one.
        self._targets_on_device = label, weight, weight if self._loss_weight is self._weight else loss_weight

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the batch of the rows `index`, int64 on the CPU; row `last` fills it up to `min_rows`."""
        rows = len(index)
        # Sorted rows give micro-batches rows of about the same length.
        if self._sorted_by is not None:
            index = index[self._sorted_by.lengths(index).argsort(stable=True)]
        if rows < min_rows:
            index = torch.cat([index, index.new_full((min_rows - rows,), self.last)])
        here = upload(index, self.device)
        labels, weights, loss_weights = self._targets_on_device
        label = None if labels is None else labels.index_select(0, here)
        weight = None if weights is None else weights.index_select(0, here)
        loss_weight = weight
        if loss_weights is not None and loss_weights is not weights:
            loss_weight = loss_weights.index_select(0, here)
        inputs, lengths, names = self._arguments(index, here, context)
        tokens = None if self._preprocess is None else count_tokens(dict(zip(names, inputs, strict=True)))
        batch = Batch(inputs, label, weight, len(index), loss_weight, lengths, names, tokens, self._pads)
        return batch.filled_from(rows) if rows < min_rows else batch

    def inputs(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of `forward` for the rows in `index`, in this order."""
        return self._arguments(index, upload(index, self.device), EVALUATION)[0]

    def _arguments(
        self, index: torch.Tensor, here: torch.Tensor, context: StepContext
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor], tuple[str, ...]]:
        """Returns the arguments of `forward` for the rows in `index`, `Batch.lengths` and `Batch.names`."""
        if self._preprocess is not None:
            taken = [column.take(index, here) for column in self._inputs]
            tensors = self._preprocess(taken, len(index), context)
            return tuple(tensors.values()), {}, tuple(tensors)
        arguments = tuple(argument for column in self._inputs for argument in column.take(index, here))
        return arguments, {position: column.lengths(index) for position, column in self._uneven.items()}, self._names

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times the weight of its class; `None`: to its weight."""
        before = self._loss_weight
        self._loss_weight = self._weight
        if weights is not None:
            assert self._label is not None
            class_weight = torch.tensor(weights, dtype=torch.float32)[self._label]
            self._loss_weight = class_weight if self._weight is None else class_weight * self._weight
        if self._loss_weight is not before:
            self._copy_targets()

    def weight_by_class(self, index: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of the rows in `index` by class, float64 of shape `(classes,)`."""
        assert self._label is not None
        weights = None if self._weight is None else self._weight.double()[index].numpy()
        return np.bincount(self._label[index].numpy(), weights, classes).astype(np.float64)

    def loss_weights(self, index: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """Returns the loss weights of the rows in `index`, float64; `None` means all ones."""
        return None if self._loss_weight is None else self._loss_weight[index].double().numpy()


class SampledRows(Rows):
    """Rows from which batches of samples are taken: in all methods, an index has numbers of samples.

    A batch of whole groups has the rows of one group after the other, and `Batch.sizes`. A batch of windows has the
    rows of a window on an axis of their own, after the axis of the samples.
    """

    def __init__(
        self, fields: Mapping[str, Field], columns: Columns, *args: Any, samples: Samples, **options: Any
    ) -> None:
        """Takes what `Rows` does, and the samples."""
        super().__init__(fields, columns, *args, by_length=False, **options)
        assert columns.groups is not None
        self._samples = samples
        self._window = columns.groups.window
        self.varies = self.varies or self._window is None
        # The loss weights of rows, and the loss weights of samples that were computed from them.
        self._sample_weights: tuple[torch.Tensor, npt.NDArray[np.float64]] | None = None

    @property
    def item_bytes(self) -> float:
        """Average size of a sample in bytes."""
        return super().item_bytes * float(self._samples.sizes.mean())

    def load(self, numbers: Numbers | range, *, inputs: bool = True) -> Rows:
        """Returns a copy in memory of some samples; a row that several of them share is read once."""
        samples, rows = self._samples.only(np.asarray(numbers))
        fields, columns = self._read(Runs.of(rows), inputs=inputs)
        return SampledRows(fields, columns, RowStorage(), count=len(rows), size=0, samples=samples)._open()

    def _runs(self, numbers: Numbers | range) -> Runs:
        return Runs.of(self._samples.only(np.asarray(numbers))[1])

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the batch of the samples `index`, int64 on the CPU; its last sample fills it up to `min_rows`."""
        count = len(index)
        missing = max(0, min_rows - count)
        if missing:
            # Without any sample, the placeholder fills it up, whose number is the count.
            last = index[-1:] if count else index.new_tensor([self._samples.count])
            index = torch.cat([index, last.expand(missing)])
        rows, sizes = self._samples.locate(index)
        batch = super().take(rows, context=context)
        window = self._window
        if window is None:
            batch = replace(batch, sizes=sizes)
        else:
            inputs, label = windowed(window, batch.inputs, batch.label)
            batch = replace(batch, inputs=inputs, label=label, tokens=None)
        weight = None if batch.weight is None else self._weights_of_samples(batch.weight, sizes)
        loss_weight = weight
        if batch.loss_weight is not None and batch.loss_weight is not batch.weight:
            loss_weight = self._weights_of_samples(batch.loss_weight, sizes)
        batch = replace(batch, rows=len(index), weight=weight, loss_weight=loss_weight)
        return batch.filled_from(count) if missing else batch

    def loss_weights(self, index: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """Returns the loss weights of the samples in `index`, float64; `None` means all ones."""
        if self._loss_weight is None:
            return None
        if self._sample_weights is None or self._sample_weights[0] is not self._loss_weight:
            skipped = 0 if self._window is None else self._window.context
            self._sample_weights = self._loss_weight, self._samples.means(self._loss_weight.numpy(), skipped=skipped)
        weights: npt.NDArray[np.float64] = self._sample_weights[1][index.numpy()]
        return weights

    def _weights_of_samples(self, weights: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Returns the mean weight of the rows of each group, or of the horizon of each window."""
        if self._window is not None:
            return weights.view(-1, self._window.rows)[:, self._window.context :].mean(1)
        return torch.segment_reduce(weights, "mean", lengths=upload(sizes, weights.device))


def windowed(
    window: Window, inputs: Sequence[torch.Tensor], label: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Returns the arguments of `forward` and the labels for windows, with the rows that `Window` says.

    Tensors of shape `(samples * window.rows, ...)` become `(samples, rows, ...)`.
    """

    def by_window(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, window.rows, *tensor.shape[1:])

    arguments = []
    for position, tensor in enumerate(inputs):
        end = window.rows if position in window.known_ahead else window.context
        arguments.append(by_window(tensor)[:, :end])
    return tuple(arguments), None if label is None else by_window(label)[:, window.context :]


def _values(fields: Mapping[str, Field], spec: TensorSpec | None) -> torch.Tensor | None:
    """Returns the values of the label or weight column."""
    if spec is None:
        return None
    field = fields[spec.name]
    assert isinstance(field, Dense)
    return field.values
