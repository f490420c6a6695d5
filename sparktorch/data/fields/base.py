"""The columns of a rank's rows, one class per storage layout: Arrow in, arguments of `forward` out.

Rows of unequal length are stored as concatenated elements and offsets.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.base.devices import jagged, upload
from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import ragged_rows, to_numpy, vector_rows
from sparktorch.data.sampling.row_keys import RowDigests
from sparktorch.data.storage import RowStorage, Runs, Spool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dense", "ElementSpool", "Elements", "Field", "Offsets", "Ragged", "Stored", "Vectors"]

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Stored(Protocol):
    """What rows are appended to: a spool, or several."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        ...

    def finish(self) -> Any:
        """Ends appending, and returns all rows."""
        ...

    def read(self, runs: Runs) -> Any:
        """Returns a copy of the rows in `runs`; can be called repeatedly, but not after `finish`."""
        ...


class Offsets:
    """The offsets of concatenated rows: where each row begins and the last one ends."""

    def __init__(self, storage: RowStorage) -> None:
        """Creates offsets without rows."""
        self._spool = storage.spool(np.int64)
        self._spool.append(np.zeros(1, np.int64))
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._spool.nbytes - 8

    def append(self, lengths: Int64) -> None:
        """Appends rows by their lengths, int64 of shape `(rows,)`."""
        if len(lengths):
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            self._spool.append(ends)
            self._end = int(ends[-1])

    def finish(self) -> Int64:
        """Returns the offsets, int64 of shape `(rows + 1,)`."""
        return self._spool.finish()

    def read(self, runs: Runs) -> tuple[Int64, Runs]:
        """Returns the offsets of the rows in `runs`, counted from 0, and the runs of their elements in storage."""
        offsets = self._spool.read(Runs(runs.starts, runs.stops + 1))
        # These are the indices in `offsets` of each run's first and last offset.
        first = np.cumsum(runs.lengths + 1) - (runs.lengths + 1)
        last = first + runs.lengths
        # The difference after a run's last offset is the gap to the next run, and no row.
        lengths = np.delete(np.diff(offsets, append=0), last)
        return np.concatenate([[0], np.cumsum(lengths)]), Runs(offsets[first], offsets[last])


class ElementSpool:
    """Rows of elements of one dtype and shape, appended to in pieces."""

    def __init__(self, dtype: npt.DTypeLike, storage: RowStorage, shape: tuple[int, ...] = ()) -> None:
        """Creates storage without rows, for elements of `shape`."""
        self._values = storage.spool(dtype, shape)
        self._offsets = Offsets(storage)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._values.nbytes + self._offsets.nbytes

    def append(self, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Appends the elements of rows, of shape `(elements, *shape)`, and the int64 number of elements in each row."""
        self._values.append(values)
        self._offsets.append(lengths)

    def finish(self) -> Elements:
        """Ends appending, and returns all rows."""
        return Elements.of(self._values.finish(), self._offsets.finish())

    def prefetch(self, runs: Runs) -> None:
        """Reads the offsets of the rows in `runs`, and has the system read their elements without waiting for them."""
        _, element_runs = self._offsets.read(runs)
        self._values.prefetch(element_runs)

    def read(self, runs: Runs) -> Elements:
        """Returns the rows in `runs`, copied into memory; can be called repeatedly, but not after `finish`."""
        offsets, element_runs = self._offsets.read(runs)
        return Elements.of(self._values.read(element_runs), offsets)


@dataclass(frozen=True)
class Elements:
    """The elements of all rows of a column.

    Attributes:
        values: The elements, of shape `(elements, *shape)`, on the device of the rows.
        starts: Index of each row's first element, int64 of shape `(rows,)`, on the CPU.
        lengths: Number of elements in each row, int64 of shape `(rows,)`; on the CPU, so that tensor sizes are known
            without synchronising with a device.
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, values: npt.NDArray[Any], offsets: Int64) -> Elements:
        """Returns rows from their concatenated elements and their offsets, int64 of shape `(rows + 1,)`."""
        return cls(torch.from_numpy(values), torch.from_numpy(offsets[:-1]), torch.from_numpy(np.diff(offsets)))

    def to(self, device: torch.device) -> Elements:
        """Returns the rows on a device."""
        return replace(self, values=self.values.to(device))

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the elements of the rows `index`, which is int64 on the CPU.

        Returns:
            The elements, of shape `(elements, *shape)`; for each element the position of its row in `index`, and its
            position in this row; and the number of elements in each row. The last three are int64, and all are on the
            device of the rows.
        """
        where, row, position, lengths = self.locate(index)
        return self.values[where], row, position, lengths

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the same as `take`, with indices in `values` instead of elements, int64 of shape `(elements,)`."""
        device = self.values.device
        # One tensor of both takes one copy to the device.
        bounds = torch.stack([self.starts[index], self.lengths[index]])
        count = int(bounds[1].sum())
        starts, lengths = upload(bounds, device)
        # Without `output_size`, torch would wait for the device to count the elements.
        row = torch.repeat_interleave(torch.arange(len(index), device=device), lengths, output_size=count)
        position = torch.arange(count, device=device) - (lengths.cumsum(0) - lengths)[row]
        return starts[row] + position, row, position, lengths


class Field(ABC):
    """One column of a rank's rows: filled batch by batch, then read by row number.

    Rows in memory are read by `take`, after `finish` and perhaps `to`. Rows on disk are never finished: `read` returns
    a finished field of some rows, after `prefetch` has announced them.

    Attributes:
        decodes: Whether `take` decodes rows instead of only copying them, so that a thread pays off.
        arguments: Number of arguments of `forward` that the column becomes.
        uneven: Whether a batch can only be split by the `lengths` of its rows.
    """

    decodes: bool = False
    arguments: int = 1
    uneven: bool = False

    def __init__(self, spec: TensorSpec, **parts: Stored) -> None:
        """Takes the parts of the column, by the names of the attributes that hold them once they are read."""
        self._spec = spec
        self._parts = parts
        self._device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return sum(part.nbytes for part in self._parts.values())

    @abstractmethod
    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch.

        Args:
            column: The rows.
            first_row: The row number of the batch's first row, for messages.
            digests: The row digests to which the column is added; `None` if it is not `ColumnKind.digestible`.

        Raises:
            ColumnError: Some rows cannot be stored. The error names column, count and first row.
        """

    def finish(self) -> None:
        """Ends appending."""
        self._set_parts({name: part.finish() for name, part in self._parts.items()})

    def to(self, device: torch.device) -> None:
        """Moves finished rows to a device unless they are decoded; `take` then returns its tensors there."""
        self._device = device
        if not self.decodes:
            self._set_parts({name: getattr(self, name).to(device) for name in self._parts})

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of the rows in `runs`, copied into memory.

        It can be called repeatedly, but not after `finish`.
        """
        field = copy.copy(self)
        field._set_parts({name: part.read(runs) for name, part in self._parts.items()})
        return field

    def prefetch(self, runs: Runs) -> None:
        """Has the system read the rows in `runs` from disk, without waiting for them."""
        for part in self._parts.values():
            # Batches with Arrow columns are made in a thread, which may wait for the disk.
            if isinstance(part, Spool | ElementSpool):
                part.prefetch(runs)

    def _set_parts(self, parts: Mapping[str, Any]) -> None:
        """Sets the attributes that hold the rows; arrays become tensors."""
        for name, value in parts.items():
            setattr(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def lengths(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the number of elements in each row, int64 of shape `(rows,)` on the CPU; only for `uneven` fields."""
        raise NotImplementedError

    @abstractmethod
    def take(self, index: torch.Tensor, here: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Returns rows as `forward` or `preprocess` gets them, without synchronising host and device.

        `index` has row numbers, int64 on the CPU; `here` is its copy on the device of the rows, `None` to make it.
        """

    def part(self, start: int, stop: int) -> tuple[Any, ...]:
        """Returns the rows from `start` to `stop`, as `take` does."""
        return self.take(torch.arange(start, stop), torch.arange(start, stop, device=self._device))


class Dense(Field):
    """Rows of equal shape: after `finish`, one tensor `values` of shape `(rows, *spec.shape)`."""

    values: torch.Tensor

    def __init__(
        self,
        spec: TensorSpec,
        storage: RowStorage,
        check: Callable[[Array], Array] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        """Creates an empty field of `dtype`, by default the dtype of the spec.

        `check` refuses values, or returns them as they are to be stored.
        """
        self._check = check
        self._spool = storage.spool(np.dtype(dtype or spec.dtype), spec.shape)
        super().__init__(spec, values=self._spool)

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch; see `Field.append`."""
        values = to_numpy(column, self._spec, first_row=first_row)
        if digests is not None:
            digests.add(self._spec.name, values)
        self._spool.append(values if self._check is None else self._check(values))

    def take(self, index: torch.Tensor, here: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`."""
        return (self.values.index_select(0, upload(index, self._device) if here is None else here),)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Returns the rows from `start` to `stop`, as a view."""
        return (self.values[start:stop],)


class Vectors(Field):
    """ML vectors, stored dense or sparse as each row arrives: one tensor, dense or `torch.sparse_csr`."""

    values: Elements
    indices: Elements

    def __init__(self, spec: TensorSpec, storage: RowStorage) -> None:
        """Creates an empty field."""
        self._values = ElementSpool(spec.dtype, storage)
        self._indices = ElementSpool(np.int32, storage)  # A dense row has no indices.
        super().__init__(spec, values=self._values, indices=self._indices)
        self.uneven = spec.layout == "sparse_csr"
        if self.uneven:
            _hush_sparse_csr()

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch, vectors or lists; see `Field.append`."""
        if pa.types.is_struct(column.type):
            rows = vector_rows(column, self._spec, first_row=first_row)
            self._values.append(rows.values, rows.lengths)
            self._indices.append(rows.indices, np.where(rows.sparse, rows.lengths, 0))
            if digests is not None and rows.sparse.any():
                digests.add_elements(self._spec.name, rows.values, rows.positions(), rows.lengths)
            elif digests is not None:
                digests.add(self._spec.name, rows.values.reshape(-1, self._spec.width))
        else:
            values = to_numpy(column, self._spec, first_row=first_row)
            if digests is not None:
                digests.add(self._spec.name, values)
            lengths = np.full(len(values), self._spec.width, np.int64)
            self._values.append(values.reshape(-1), lengths)
            self._indices.append(np.empty(0, np.int32), np.zeros_like(lengths))

    def lengths(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the number of stored values in each row, int64 of shape `(rows,)` on the CPU."""
        return self.values.lengths[index]

    def take(self, index: torch.Tensor, here: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`, or a `torch.sparse_csr` one of shape `(rows, width)`."""
        width = self._spec.width
        shape = (len(index), *self._spec.shape)
        all_values = self.values.values
        all_indices = self.indices.values
        # If all rows hold all their values, these are a matrix.
        is_matrix = len(all_values) == len(self.values.lengths) * width
        if not len(all_indices) and self._spec.layout == "dense" and is_matrix:
            here = upload(index, self._device) if here is None else here
            return (all_values.view(-1, width).index_select(0, here).view(shape),)
        where, row, position, lengths = self.values.locate(index)
        values = all_values[where]
        if len(all_indices) == len(all_values):  # All rows are sparse.
            position = all_indices[where].long()
        elif len(all_indices):
            # Some rows are sparse: their stored indices replace the positions in these rows.
            stored, row_of_stored, stored_position, _ = self.indices.take(index)
            position[(lengths.cumsum(0) - lengths)[row_of_stored] + stored_position] = stored.long()
        if self._spec.layout == "sparse_csr":
            offsets = _offsets(lengths)
            return (torch.sparse_csr_tensor(offsets, position, values, (len(index), width), check_invariants=False),)
        dense = values.new_zeros(len(index), width)
        dense[row, position] = values
        return (dense.view(shape),)


class Ragged(Field):
    """Rows of unequal length: padded with a mask, or one jagged nested tensor."""

    rows: Elements

    def __init__(self, spec: TensorSpec, storage: RowStorage) -> None:
        """Creates an empty field."""
        self._elements = ElementSpool(spec.dtype, storage, spec.shape)
        super().__init__(spec, rows=self._elements)
        self.padded = spec.layout == "padded"
        self.arguments = 2 if self.padded else 1
        self.uneven = True

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch; see `Field.append`."""
        self._elements.append(*ragged_rows(column, self._spec, first_row=first_row))

    def take(self, index: torch.Tensor, here: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the rows, with a mask if they are padded.

        Padded: the elements, of shape `(rows, longest, *spec.shape)`, and the mask, bool of shape `(rows, longest)`,
        true at positions that hold data. Jagged: a nested tensor of shape `(rows, j, *spec.shape)`.
        """
        lengths_on_host = self.lengths(index)
        elements, row, position, lengths = self.rows.take(index)
        if self._spec.layout == "jagged":
            return (jagged(elements, _offsets(lengths), lengths_on_host),)
        longest = max(1, int(lengths_on_host.max())) if len(index) else 1
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        padded = elements.new_full((len(index), longest, *self._spec.shape), self._spec.pad)
        padded[row, position] = elements
        return padded, mask

    def lengths(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the number of elements in each row, int64 of shape `(rows,)` on the CPU."""
        return self.rows.lengths[index]


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of rows from their lengths, int64 of shape `(rows + 1,)`."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _hush_sparse_csr() -> None:
    """Suppresses torch's beta warning for the layout: torch warns once per process, here unseen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
