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
from sparktorch.data.convert.tensors import ragged, to_numpy, vector_rows
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
        """Appends rows of those lengths, int64 of shape `(rows,)`."""
        if len(lengths):
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            self._spool.append(ends)
            self._end = int(ends[-1])

    def finish(self) -> Int64:
        """Returns the offsets, int64 of shape `(rows + 1,)`."""
        return self._spool.finish()

    def read(self, runs: Runs) -> tuple[Int64, Runs]:
        """Returns the offsets of the rows in `runs` among themselves, and the runs of their elements in storage."""
        borders = self._spool.read(Runs(runs.starts, runs.stops + 1))
        # `first` is the index of each run's first offset among `borders`, `last` that of its last one.
        first = np.cumsum(runs.lengths + 1) - (runs.lengths + 1)
        last = first + runs.lengths
        lengths = np.delete(np.diff(borders, append=0), last)
        return np.concatenate([[0], np.cumsum(lengths)]), Runs(borders[first], borders[last])


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
        """Appends rows, as elements of shape `(elements, *shape)` and the int64 number of elements of each row."""
        self._values.append(values)
        self._offsets.append(lengths)

    def finish(self) -> Elements:
        """Ends appending, and returns all rows."""
        return Elements.of(self._values.finish(), self._offsets.finish())

    def expect(self, runs: Runs) -> None:
        """Has the system read the elements of the rows in `runs`, without waiting for them; reads their offsets."""
        _, runs_of_values = self._offsets.read(runs)
        self._values.expect(runs_of_values)

    def read(self, runs: Runs) -> Elements:
        """Returns the rows in `runs`, copied into memory; can be called repeatedly, but not after `finish`."""
        borders, runs_of_values = self._offsets.read(runs)
        return Elements.of(self._values.read(runs_of_values), borders)


@dataclass(frozen=True)
class Elements:
    """The elements of all rows of a column.

    Attributes:
        values: Elements of all rows, `(elements, *shape)`, on the device of the rows.
        starts: First element of each row, int64 of shape `(rows,)`, on the CPU.
        lengths: Elements of each row, int64 of shape `(rows,)`; on the CPU, so that tensor sizes are known without
            synchronising with a device.
    """

    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, values: npt.NDArray[Any], borders: Int64) -> Elements:
        """Returns the rows of concatenated elements, from where each begins and the last one ends."""
        return cls(*map(torch.from_numpy, (values, borders[:-1], np.diff(borders))))

    def to(self, device: torch.device) -> Elements:
        """Returns the rows on a device."""
        return replace(self, values=self.values.to(device))

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the elements of the rows `index`, int64 on the CPU.

        They have the shape `(elements, *shape)`. With them come, as int64, the position of each element's row in
        `index`, its position in the row, and the number of elements of each row. All are on the device of the rows.
        """
        where, row, position, lengths = self.locate(index)
        return self.values[where], row, position, lengths

    def locate(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the same as `take`, but indices into `values`, int64 of shape `(elements,)`, instead of elements."""
        device, bounds = self.values.device, torch.stack([self.starts[index], self.lengths[index]])
        count = int(bounds[1].sum())
        starts, lengths = upload(bounds, device)
        # Without `output_size`, torch would wait for the device to count the elements.
        row = torch.repeat_interleave(torch.arange(len(index), device=device), lengths, output_size=count)
        position = torch.arange(count, device=device) - (lengths.cumsum(0) - lengths)[row]
        return starts[row] + position, row, position, lengths


class Field(ABC):
    """One column of a rank's rows: filled batch by batch, then read by row number.

    Attributes:
        decodes: Whether `take` decodes rows instead of only copying them, so that a thread pays off.
        arguments: Number of arguments of `forward` that the column becomes.
        uneven: Whether splitting a batch needs the `lengths` of its rows.
    """

    decodes: bool = False
    arguments: int = 1
    uneven: bool = False

    def __init__(self, spec: TensorSpec, **parts: Stored) -> None:
        """Takes what rows are appended to: once they are read, they are attributes of the same names."""
        self._spec, self._parts = spec, parts
        self._device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return sum(part.nbytes for part in self._parts.values())

    @abstractmethod
    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch; adds the column to the row digests, if it is `ColumnKind.digestible`.

        A `ColumnError` names column, count and first row; `first_row` is the batch's first row number.
        """

    def finish(self) -> None:
        """Ends appending."""
        self._hold({name: part.finish() for name, part in self._parts.items()})

    def to(self, device: torch.device) -> None:
        """Moves finished rows to a device unless they are decoded; `take` then returns its tensors there."""
        self._device = device
        if not self.decodes:
            self._hold({name: getattr(self, name).to(device) for name in self._parts})

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of the rows in `runs`, copied into memory.

        It can be called repeatedly, but not after `finish`.
        """
        field = copy.copy(self)
        field._hold({name: part.read(runs) for name, part in self._parts.items()})
        return field

    def expect(self, runs: Runs) -> None:
        """Has the system read the rows in `runs` from disk, without waiting for them; a thread reads Arrow columns."""
        for part in self._parts.values():
            if isinstance(part, Spool | ElementSpool):
                part.expect(runs)

    def _hold(self, rows: Mapping[str, Any]) -> None:
        for name, value in rows.items():
            setattr(self, name, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)

    def lengths(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the number of elements of rows, int64 of shape `(rows,)` on the CPU; only for `uneven` fields."""
        raise NotImplementedError

    @abstractmethod
    def take(self, index: torch.Tensor, device_index: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Returns rows as `forward` or `preprocess` gets them, without synchronising host and device.

        `index` has row numbers, int64 on the CPU, and `here` is its copy on the device of the rows, if there is one.
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
        """Creates an empty field of `dtype`, by default the spec's; `check` returns values as they are to be stored."""
        self._check, self._dtype = check, np.dtype(dtype or spec.dtype)
        self._spool = storage.spool(self._dtype, spec.shape)
        super().__init__(spec, values=self._spool)

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch; see `Field.append`."""
        values = to_numpy(column, self._spec, first_row=first_row)
        if digests is not None:
            digests.add(self._spec.name, values)
        self._spool.append(values if self._check is None else self._check(values))

    def take(self, index: torch.Tensor, device_index: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`."""
        return (self.values.index_select(0, upload(index, self._device) if device_index is None else device_index),)

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
        """Returns the number of stored values of each row, int64 of shape `(rows,)` on the CPU."""
        return self.values.lengths[index]

    def take(self, index: torch.Tensor, device_index: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`, or a `torch.sparse_csr` one of shape `(rows, width)`."""
        width, shape = self._spec.width, (len(index), *self._spec.shape)
        every, sparse = self.values.values, self.indices.values
        # If every row holds all its values, these are a matrix.
        all_present = len(every) == len(self.values.lengths) * width
        if not len(sparse) and self._spec.layout == "dense" and all_present:
            device_index = upload(index, self._device) if device_index is None else device_index
            return (every.view(-1, width).index_select(0, device_index).view(shape),)
        where, row, position, lengths = self.values.locate(index)
        values = every[where]
        if len(sparse) == len(every):  # All rows are sparse.
            position = sparse[where].long()
        elif len(sparse):
            # Some rows are sparse: their stored indices replace the positions in these rows.
            stored, row_of_stored, stored_position, _ = self.indices.take(index)
            position[(lengths.cumsum(0) - lengths)[row_of_stored] + stored_position] = stored.long()
        if self._spec.layout == "sparse_csr":
            ends = _ends(lengths)
            return (torch.sparse_csr_tensor(ends, position, values, (len(index), width), check_invariants=False),)
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
        self._elements.append(*ragged(column, self._spec, first_row=first_row))

    def take(self, index: torch.Tensor, device_index: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the rows, with a mask if they are padded.

        Padded: the elements, of shape `(rows, longest, *spec.shape)`, and the mask, bool of shape `(rows, longest)`,
        true at positions that hold data. Jagged: a nested tensor of shape `(rows, j, *spec.shape)`.
        """
        on_host = self.lengths(index)
        elements, row, position, lengths = self.rows.take(index)
        if self._spec.layout == "jagged":
            return (jagged(elements, _ends(lengths), on_host),)
        longest = max(1, int(on_host.max())) if len(index) else 1
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        padded = elements.new_full((len(index), longest, *self._spec.shape), self._spec.pad)
        padded[row, position] = elements
        return padded, mask

    def lengths(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the number of elements of each row, int64 of shape `(rows,)`, on the CPU."""
        return self.rows.lengths[index]


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of rows of those lengths, int64 of shape `(rows + 1,)`."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _hush_sparse_csr() -> None:
    """Suppresses torch's beta warning for the layout: torch warns once per process, here unseen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
