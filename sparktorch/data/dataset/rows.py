"""The rows of a rank, by row number or, where samples are groups of rows or windows, by that of the sample."""

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
        decodes: Whether taking rows decodes them or runs `preprocess`, instead of only copying them.
        varies: As for `RankDataset`.
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
        self.columns, self.count, self.bytes, self.last = columns, count, size, count - 1
        self._inputs = tuple(fields[spec.name] for spec in columns.inputs)
        self._preprocess = columns.preprocess
        self.decodes = self._preprocess is not None or any(column.decodes for column in self._inputs)
        self.varies = self._preprocess is not None or any(column.uneven for column in self._inputs)
        self.on_disk = storage.on_disk
        self._fields, self._storage, self._by_length = fields, storage, by_length
        self.device = torch.device("cpu")

    def finish(self) -> Rows:
        """Ends appending, and returns the rows, from which batches can now be taken; for rows in memory."""
        for column in self._fields.values():
            column.finish()
        return self._opened()

    @property
    def item_bytes(self) -> float:
        """Average size in bytes of a row, or of a sample where an index has numbers of samples."""
        return self.bytes / self.count

    def load(self, numbers: Numbers | range, *, inputs: bool = True) -> Rows:
        """Returns rows by number, copied into memory, and the row that fills up batches; see `_read`."""
        runs = self._runs(numbers)
        fields, columns = self._read(runs, inputs=inputs)
        return Rows(fields, columns, RowStorage(), count=runs.count, size=0, by_length=self._by_length)._opened()

    def expect(self, numbers: Numbers | range) -> None:
        """Has the system read what `load` will, without waiting for it."""
        runs = self._runs(numbers)
        for spec in self.columns.tensors:
            self._fields[spec.name].expect(runs)

    def _runs(self, numbers: Numbers | range) -> Runs:
        """Returns the runs of what an index numbers, and of what fills up batches."""
        return Runs.of(np.append(numbers, self.count - 1))

    def _read(self, runs: Runs, *, inputs: bool) -> tuple[dict[str, Field], Columns]:
        """Returns the columns of the rows in `runs`; without `inputs`, only label and weight."""
        columns = self.columns if inputs else replace(self.columns, inputs=())
        return {spec.name: self._fields[spec.name].read(runs) for spec in columns.tensors}, columns

    def close(self) -> None:
        """Frees rows on disk."""
        self._storage.close()

    def _opened(self) -> Rows:
        """Finds what batches are made of."""
        columns, fields = self.columns, self._fields
        ragged = [column for column in self._inputs if isinstance(column, Ragged)]
        self._sorted_by = ragged[0] if ragged and self._by_length else None
        self._label, self._weight = _tensor(fields, columns.label), _tensor(fields, columns.weight)
        self._loss_weight = self._weight
        self._names = argument_names(columns.inputs)
        # The keys are positions among the arguments of `forward`: a padded column becomes two of them.
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
        self._copy()
        return self

    def to(self, device: torch.device) -> None:
        """Moves the rows to a device; the CPU keeps a copy of label and weights."""
        for column in self._inputs:
            column.to(device)
        self.device = device
        self._copy()

    def _copy(self) -> None:
        """Copies label and weights to the device."""
        label, weight, loss_weight = (
            None if tensor is None else tensor.to(self.device)
            for tensor in (self._label, self._weight, self._loss_weight)
        )
        self._on_device = label, weight, weight if self._loss_weight is self._weight else loss_weight

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the batch of the rows `index`, int64 on the CPU; row `last` fills it up to `min_rows`."""
        rows = len(index)
        # Sorted rows give micro-batches rows of about the same length.
        if self._sorted_by is not None:
            index = index[self._sorted_by.lengths(index).argsort(stable=True)]
        if rows < min_rows:
            index = torch.cat([index, index.new_full((min_rows - rows,), self.last)])
        device_index = upload(index, self.device)
        labels, weights, loss_weights = self._on_device
        label = None if labels is None else labels.index_select(0, device_index)
        weight = None if weights is None else weights.index_select(0, device_index)
        loss_weight = weight
        if loss_weights is not None and loss_weights is not weights:
            loss_weight = loss_weights.index_select(0, device_index)
        inputs, lengths, names = self._arguments(index, device_index, context)
        tokens = None if self._preprocess is None else count_tokens(dict(zip(names, inputs, strict=True)))
        batch = Batch(inputs, label, weight, len(index), loss_weight, lengths, names, tokens, self._pads)
        return batch.filled_from(rows) if rows < min_rows else batch

    def inputs(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of `forward` for the rows in `index`, in this order."""
        return self._arguments(index, upload(index, self.device), EVALUATION)[0]

    def _arguments(
        self, index: torch.Tensor, device_index: torch.Tensor, context: StepContext
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor], tuple[str, ...]]:
        """Returns the arguments of `forward` for the rows in `index`, `Batch.lengths` and `Batch.names`."""
        if self._preprocess is not None:
            columns = [column.take(index, device_index) for column in self._inputs]
            tensors = self._preprocess(columns, len(index), context)
            return tuple(tensors.values()), {}, tuple(tensors)
        arguments = tuple(argument for column in self._inputs for argument in column.take(index, device_index))
        return arguments, {position: column.lengths(index) for position, column in self._uneven.items()}, self._names

    def weigh_classes(self, weights: Sequence[float] | None) -> None:
        """Sets the loss weight of each row to its weight times that of its class, one per class; `None`: its weight."""
        before = self._loss_weight
        self._loss_weight = self._weight
        if weights is not None:
            assert self._label is not None
            of_class = torch.tensor(weights, dtype=torch.float32)[self._label]
            self._loss_weight = of_class if self._weight is None else of_class * self._weight
        if self._loss_weight is not before:
            self._copy()

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

    A batch of whole groups has their rows one after the other, and `Batch.sizes`; one of windows has them on an axis of
    their own, after that of the samples.
    """

    def __init__(
        self, fields: Mapping[str, Field], columns: Columns, *args: Any, samples: Samples, **options: Any
    ) -> None:
        """Takes what `Rows` does, and the samples."""
        super().__init__(fields, columns, *args, by_length=False, **options)
        assert columns.groups is not None
        self._samples, self._window = samples, columns.groups.window
        self.varies = self.varies or self._window is None
        # These are the loss weights of rows, and those that samples have from them.
        self._weighed: tuple[torch.Tensor, npt.NDArray[np.float64]] | None = None

    @property
    def item_bytes(self) -> float:
        """Average size of a sample in bytes."""
        return super().item_bytes * float(self._samples.sizes.mean())

    def load(self, numbers: Numbers | range, *, inputs: bool = True) -> Rows:
        """Returns some samples, copied into memory, and what fills up batches; rows of several are read once."""
        samples, rows = self._samples.only(np.asarray(numbers))
        fields, columns = self._read(Runs.of(rows), inputs=inputs)
        return SampledRows(fields, columns, RowStorage(), count=len(rows), size=0, samples=samples)._opened()

    def _runs(self, numbers: Numbers | range) -> Runs:
        return Runs.of(self._samples.only(np.asarray(numbers))[1])

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the batch of the samples `index`, int64 on the CPU; its last one again fills it up to `min_rows`."""
        count, missing = len(index), max(0, min_rows - len(index))
        if missing:
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
        weight = None if batch.weight is None else self._means(batch.weight, sizes)
        loss_weight = weight
        if batch.loss_weight is not None and batch.loss_weight is not batch.weight:
            loss_weight = self._means(batch.loss_weight, sizes)
        batch = replace(batch, rows=len(index), weight=weight, loss_weight=loss_weight)
        return batch.filled_from(count) if missing else batch

    def loss_weights(self, index: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """Returns the loss weights of samples, float64; `None` means all ones."""
        if self._loss_weight is None:
            return None
        if self._weighed is None or self._weighed[0] is not self._loss_weight:
            skipped = 0 if self._window is None else self._window.context
            self._weighed = self._loss_weight, self._samples.means(self._loss_weight.numpy(), skipped=skipped)
        chosen: npt.NDArray[np.float64] = self._weighed[1][index.numpy()]
        return chosen

    def _means(self, weights: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Returns what samples weigh: the mean over the rows of a group, or over the horizon of a window."""
        if self._window is not None:
            return weights.view(-1, self._window.rows)[:, self._window.context :].mean(1)
        return torch.segment_reduce(weights, "mean", lengths=upload(sizes, weights.device))


def windowed(
    window: Window, inputs: Sequence[torch.Tensor], label: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Returns what a module sees of the rows of windows, and the labels; see `Window.known_ahead`.

    Tensors of shape `(samples * window.rows, ...)` become `(samples, rows of the window that are seen, ...)`.
    """

    def of_samples(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, window.rows, *tensor.shape[1:])

    visible = tuple(
        of_samples(tensor)[:, : None if position in window.known_ahead else window.context]
        for position, tensor in enumerate(inputs)
    )
    return visible, None if label is None else of_samples(label)[:, window.context :]


def _tensor(fields: Mapping[str, Field], spec: TensorSpec | None) -> torch.Tensor | None:
    """Returns the values of the label or weight column."""
    if spec is None:
        return None
    field = fields[spec.name]
    assert isinstance(field, Dense)
    return field.values
