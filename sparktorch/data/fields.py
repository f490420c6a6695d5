"""The columns of a rank's rows, one class for each way of keeping them: Arrow in, arguments of `forward` out."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.data.columns import TensorSpec
from sparktorch.data.spool import Runs, Spooler
from sparktorch.data.tensors import ragged, to_numpy, vector_rows

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dense", "Field", "Ragged", "Vectors", "field_of"]

Array = npt.NDArray[Any]


class Field(ABC):
    """One column of a rank's rows: filled batch by batch, then read by row number."""

    _device: str = "cpu"

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""

    @abstractmethod
    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch.

        Args:
            column: The batch's column.
            first_row: Number of its first row, for messages.

        Raises:
            ColumnError: A row cannot be trained on; says column, count and first row.
        """

    @abstractmethod
    def stand_in(self) -> None:
        """Appends a row of zeros, for a rank without rows to join the others with."""

    @abstractmethod
    def finish(self, device: str) -> None:
        """Ends appending; the rows move to `device` where they are kept as tensors."""

    @abstractmethod
    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory; in place of `finish`, any number of times."""

    @abstractmethod
    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what the rows with those numbers, int64 of shape `(rows,)`, are to `forward`."""

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Returns what the rows from `start` to `stop` are to `forward`."""
        return self.take(torch.arange(start, stop, device=self._device))


def field_of(spec: TensorSpec, spooler: Spooler) -> Field:
    """Returns an empty field for an input column."""
    if spec.ragged:
        return Ragged(spec, spooler)
    return Vectors(spec, spooler) if spec.kind == "vector" else Dense(spec, spooler)


class Dense(Field):
    """Rows of equal shape: one tensor of shape `(rows, *spec.shape)`.

    Attributes:
        values: All rows, once finished.
    """

    values: torch.Tensor

    def __init__(
        self,
        spec: TensorSpec,
        spooler: Spooler,
        check: Callable[[Array], Array] | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        """Begins without rows.

        Args:
            spec: The column.
            spooler: Where the rows are kept.
            check: Refuses rows that cannot be used; returns them as they are to be kept.
            dtype: What they are kept as, if not as `spec.dtype`.
        """
        self._spec, self._check = spec, check
        self._dtype = np.dtype(dtype or spec.dtype)
        self._spool = spooler.spool(spec.name, self._dtype, spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._spool.nbytes

    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch; see `Field.append`."""
        values = to_numpy(column, self._spec, first_row=first_row)
        self._spool.append(values if self._check is None else self._check(values))

    def stand_in(self) -> None:
        """Appends a row of zeros."""
        self._spool.append(np.zeros((1, *self._spec.shape), self._dtype))

    def finish(self, device: str) -> None:
        """Ends appending and moves the rows to `device`."""
        self._device = device
        self.values = torch.from_numpy(self._spool.finish()).to(device)

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory."""
        found = copy.copy(self)
        found.values = torch.from_numpy(self._spool.read(runs))
        return found

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`."""
        return (self.values.index_select(0, index),)

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Returns the rows from `start` to `stop`, in place."""
        return (self.values[start:stop],)


class Vectors(Field):
    """ML vectors, each row kept as it came, dense or sparse: one tensor, dense or `torch.sparse_csr`."""

    def __init__(self, spec: TensorSpec, spooler: Spooler) -> None:
        """Begins without rows."""
        self._spec = spec
        self._spools = (
            spooler.spool(f"{spec.name}.values", spec.dtype),
            spooler.spool(f"{spec.name}.indices", np.int32),
            spooler.spool(f"{spec.name}.sparse", np.bool_),
        )
        self._value_lengths = _Lengths(spooler, f"{spec.name}.lengths")
        self._index_lengths = _Lengths(spooler, f"{spec.name}.stored")
        if spec.layout == "sparse_csr":
            _hush_sparse_csr()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return sum(spool.nbytes for spool in (*self._spools, self._value_lengths, self._index_lengths))

    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch, vectors or lists; see `Field.append`."""
        if pa.types.is_struct(column.type):
            rows = vector_rows(column, self._spec, first_row=first_row)
            self._keep(rows.values, rows.indices, rows.lengths, rows.sparse)
        else:
            self._keep_dense(to_numpy(column, self._spec, first_row=first_row))

    def stand_in(self) -> None:
        """Appends a row of zeros."""
        self._keep_dense(np.zeros((1, self._spec.width), self._spec.dtype))

    def finish(self, device: str) -> None:
        """Ends appending and moves the rows to `device`."""
        self._device = device
        values, indices, sparse = (spool.finish() for spool in self._spools)
        self._hold(values, indices, sparse, self._value_lengths.finish())

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory."""
        found = copy.copy(self)
        values, indices, sparse = self._spools
        lengths, elements = self._value_lengths.read(runs)
        _, stored = self._index_lengths.read(runs)
        found._hold(values.read(elements), indices.read(stored), sparse.read(runs), lengths)
        return found

    def _hold(self, *rows: Array) -> None:
        """Makes tensors of values, indices, which rows are sparse, and their lengths."""
        self._values, self._indices, self._sparse, self._lengths = (
            torch.from_numpy(array).to(self._device) for array in rows
        )
        self._starts = _starts(self._lengths)
        self._index_starts = _starts(self._lengths * self._sparse)
        self._all_dense = not bool(self._sparse.any())

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`, or `(rows, width)` if `torch.sparse_csr`."""
        width, shape = self._spec.width, (len(index), *self._spec.shape)
        if self._all_dense and self._spec.layout == "dense":
            return (self._values.view(-1, width).index_select(0, index).view(shape),)
        lengths = self._lengths[index]
        row, place = _walk(lengths)
        values = self._values[self._starts[index][row] + place]
        sparse = self._sparse[index][row]
        stored = (self._index_starts[index][row] + place)[sparse]
        place[sparse] = self._indices[stored].long()  # those of dense rows are their own
        if self._spec.layout == "sparse_csr":
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            return (torch.sparse_csr_tensor(ends, place, values, (len(index), width), check_invariants=False),)
        dense = values.new_zeros(len(index), width)
        dense[row, place] = values
        return (dense.view(shape),)

    def _keep(self, values: Array, indices: Array, lengths: Array, sparse: Array) -> None:
        for spool, rows in zip(self._spools, (values, indices, sparse), strict=True):
            spool.append(rows)
        self._value_lengths.append(lengths)
        self._index_lengths.append(lengths * sparse)

    def _keep_dense(self, rows: Array) -> None:
        lengths = np.full(len(rows), self._spec.width, np.int64)
        self._keep(rows.reshape(-1), np.empty(0, np.int32), lengths, np.zeros(len(rows), np.bool_))


class Ragged(Field):
    """Rows of unequal length: padded with a mask, or one jagged nested tensor.

    Attributes:
        lengths: Number of elements of each row, int64 on the CPU, once finished.
    """

    lengths: torch.Tensor

    def __init__(self, spec: TensorSpec, spooler: Spooler) -> None:
        """Begins without rows."""
        self._spec = spec
        self._elements = spooler.spool(f"{spec.name}.elements", spec.dtype, spec.shape)
        self._counts = _Lengths(spooler, f"{spec.name}.lengths")

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return self._elements.nbytes + self._counts.nbytes

    def append(self, column: pa.Array, *, first_row: int = 0) -> None:
        """Checks and keeps the rows of a batch; see `Field.append`."""
        elements, lengths = ragged(column, self._spec, first_row=first_row)
        self._elements.append(elements)
        self._counts.append(lengths)

    def stand_in(self) -> None:
        """Appends a row of one zero."""
        self._elements.append(np.zeros((1, *self._spec.shape), self._spec.dtype))
        self._counts.append(np.ones(1, np.int64))

    def finish(self, device: str) -> None:
        """Ends appending and moves the rows to `device`."""
        self._device = device
        self._hold(self._elements.finish(), self._counts.finish())

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory."""
        found = copy.copy(self)
        lengths, elements = self._counts.read(runs)
        found._hold(self._elements.read(elements), lengths)
        return found

    def _hold(self, elements: Array, lengths: Array) -> None:
        self._values = torch.from_numpy(elements).to(self._device)
        self.lengths = torch.from_numpy(lengths)
        self._on_device = self.lengths.to(self._device)
        self._starts = _starts(self._on_device)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the rows, with a mask where they are padded.

        Returns:
            Padded: the elements of shape `(rows, longest, *spec.shape)`, and bool of shape
            `(rows, longest)`, true where there is one. Jagged: a nested tensor of shape
            `(rows, j, *spec.shape)`.
        """
        lengths = self._on_device[index]
        row, place = _walk(lengths)
        elements = self._values[self._starts[index][row] + place]
        if self._spec.layout == "jagged":
            ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            return (torch.nested.nested_tensor_from_jagged(elements, ends),)
        longest = max(1, int(lengths.max())) if len(lengths) else 1
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        padded = elements.new_full((len(index), longest, *self._spec.shape), self._spec.pad)
        padded[mask] = elements
        return padded, mask


class _Lengths:
    """Lengths of rows whose elements lie one after the other in another spool, kept as where each begins and ends."""

    def __init__(self, spooler: Spooler, name: str) -> None:
        self._borders = spooler.spool(name, np.int64)
        self._borders.append(np.zeros(1, np.int64))
        self._end = 0

    @property
    def nbytes(self) -> int:
        return self._borders.nbytes - 8

    def append(self, lengths: npt.NDArray[np.int64]) -> None:
        """Adds rows of those lengths."""
        if len(lengths):
            ends = np.cumsum(lengths, dtype=np.int64) + self._end
            self._end = int(ends[-1])
            self._borders.append(ends)

    def finish(self) -> npt.NDArray[np.int64]:
        """Returns the lengths of all rows."""
        return np.diff(self._borders.finish())

    def read(self, runs: Runs) -> tuple[npt.NDArray[np.int64], Runs]:
        """Returns the lengths of those rows, and where their elements are."""
        borders = self._borders.read(Runs(runs.starts, runs.stops + 1))
        first = np.cumsum(runs.lengths + 1) - (runs.lengths + 1)  # where the borders of each run begin
        last = first + runs.lengths
        within = np.ones(len(borders), np.bool_)
        within[last] = False
        lengths = np.diff(borders, append=0)[within]
        return lengths, Runs(borders[first], borders[last])


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Returns where each row begins, of rows that lie one after the other."""
    return lengths.cumsum(0) - lengths


def _walk(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for each element of rows of those lengths its row, and its place in it."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return row, torch.arange(len(row), device=lengths.device) - _starts(lengths)[row]


def _hush_sparse_csr() -> None:
    """Makes torch say once, here, that the layout is in beta, which is for docs and not for every log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()
