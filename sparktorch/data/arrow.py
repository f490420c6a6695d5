"""Columns as Arrow has them, for a callable that makes tensors of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparktorch.data.checks import refuse_nulls
from sparktorch.data.columns import TensorSpec
from sparktorch.data.digest import RowDigests
from sparktorch.data.elements import Borders, Elements
from sparktorch.data.fields import Field
from sparktorch.data.spool import Runs, Spooler
from sparktorch.data.tensors import byte_rows
from sparktorch.errors import ColumnError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ArrowColumn"]

Index = npt.NDArray[np.int64]

_OF_BYTES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


class ArrowColumn(Field):
    """A column as it is: NumPy for numbers, booleans, dates and timestamps, Arrow for all else."""

    decodes = True

    def __init__(self, spec: TensorSpec, spooler: Spooler) -> None:
        """Begins without rows; their type is that of the first batch."""
        self._spec, self._spooler = spec, spooler
        self._node: _Node | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return 0 if self._node is None else self._node.nbytes

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Keeps the rows of a batch; see `Field.append`."""
        fill = self._spec.fill
        if fill is None:
            refuse_nulls(column, self._spec, first_row)
        elif pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
            column = column.fill_null(pa.scalar(fill).cast(column.type))
            if pa.types.is_floating(column.type):
                column = pc.if_else(pc.is_nan(column), pa.scalar(fill, column.type), column)
        if self._node is None:
            self._node = _node(column.type, self._spec, self._spooler)
        self._node.append(column)

    def stand_in(self) -> None:
        """Appends an empty row."""
        if self._node is None:
            self._node = _node(pa.string(), self._spec, self._spooler)
        self._node.append(pa.array([_empty(self._node.type)], self._node.type))

    def finish(self, device: str) -> None:
        """Ends appending; the rows stay on the CPU."""
        self._held.finish()

    def read(self, runs: Runs) -> Self:
        """Returns a finished field of those rows, copied into memory."""
        found = copy.copy(self)
        found._node = self._held.read(runs)
        return found

    def take(self, index: torch.Tensor) -> tuple[Any, ...]:
        """Returns one array, of NumPy or Arrow as their type says; a date or timestamp that is null is `NaT`."""
        column = self._held.take(index.cpu().numpy())
        return (column.to_numpy(zero_copy_only=False) if pa.types.is_primitive(column.type) else column,)

    @property
    def _held(self) -> _Node:
        assert self._node is not None
        return self._node


class _Node(ABC):
    """Rows of one Arrow type."""

    def __init__(self, kind: pa.DataType, spooler: Spooler) -> None:
        self.type = kind
        self._valid_spool = spooler.spool(np.bool_)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""

    def append(self, column: pa.Array) -> None:
        """Keeps the rows of a batch."""
        self._valid_spool.append(column.is_valid().to_numpy(zero_copy_only=False))

    def finish(self) -> None:
        """Ends appending."""
        self._valid = self._valid_spool.finish()

    def read(self, runs: Runs) -> Self:
        """Returns a finished copy of those rows."""
        found = copy.copy(self)
        found._valid = self._valid_spool.read(runs)
        return found

    @abstractmethod
    def take(self, index: Index) -> pa.Array:
        """Returns the rows with those numbers."""

    def _nulled(self, column: pa.Array, index: Index) -> pa.Array:
        """Makes null again what was null."""
        valid = self._valid[index]
        return column if valid.all() else pc.if_else(pa.array(valid), column, pa.scalar(None, column.type))


class _Fixed(_Node):
    """Numbers, booleans, dates and timestamps."""

    def __init__(self, kind: pa.DataType, spooler: Spooler) -> None:
        super().__init__(kind, spooler)
        self._storage = pa.int64() if kind.bit_width == 64 else pa.int32()
        self._viewed = pa.types.is_temporal(kind)
        dtype = (self._storage if self._viewed else kind).to_pandas_dtype()
        self._spool = spooler.spool(dtype)

    @property
    def nbytes(self) -> int:
        return self._spool.nbytes + self._valid_spool.nbytes

    def append(self, column: pa.Array) -> None:
        super().append(column)
        stored = column.view(self._storage) if self._viewed else column
        zero = pa.scalar(0).cast(stored.type)
        self._spool.append((stored.fill_null(zero) if stored.null_count else stored).to_numpy(zero_copy_only=False))

    def finish(self) -> None:
        super().finish()
        self._values = self._spool.finish()

    def read(self, runs: Runs) -> Self:
        found = super().read(runs)
        found._values = self._spool.read(runs)
        return found

    def take(self, index: Index) -> pa.Array:
        column = pa.array(self._values[index])
        return self._nulled(column.view(self.type) if self._viewed else column, index)


class _Bytes(_Node):
    """Strings and binary values."""

    def __init__(self, kind: pa.DataType, spooler: Spooler) -> None:
        super().__init__(kind, spooler)
        self._elements = Elements(np.uint8, spooler)
        self._offsets = _offsets(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))

    @property
    def nbytes(self) -> int:
        return self._elements.nbytes + self._valid_spool.nbytes

    def append(self, column: pa.Array) -> None:
        super().append(column)
        offsets, content = byte_rows(column.fill_null(pa.scalar("").cast(column.type)) if column.null_count else column)
        self._elements.append(content, np.diff(offsets))

    def finish(self) -> None:
        super().finish()
        self._elements.finish("cpu")

    def read(self, runs: Runs) -> Self:
        found = super().read(runs)
        found._elements = self._elements.read(runs)
        return found

    def take(self, index: Index) -> pa.Array:
        rows = torch.from_numpy(index)
        content, _, _ = self._elements.take(rows)
        ends = np.concatenate([[0], self._elements.lengths[rows].cumsum(0).numpy()]).astype(self._offsets)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(content.numpy())]
        return self._nulled(pa.Array.from_buffers(self.type, len(index), buffers), index)


class _Lists(_Node):
    """Lists, of lists too."""

    def __init__(self, kind: pa.ListType | pa.LargeListType, spec: TensorSpec, spooler: Spooler) -> None:
        super().__init__(kind, spooler)
        self._borders = Borders(spooler)
        self._inner = _node(kind.value_type, spec, spooler)
        self._large = pa.types.is_large_list(kind)

    @property
    def nbytes(self) -> int:
        return self._borders.nbytes + self._inner.nbytes + self._valid_spool.nbytes

    def append(self, column: pa.Array) -> None:
        super().append(column)
        self._borders.append(column.value_lengths().fill_null(0).to_numpy().astype(np.int64))
        self._inner.append(column.flatten())

    def finish(self) -> None:
        super().finish()
        self._starts, self._lengths = self._borders.finish()
        self._inner.finish()

    def read(self, runs: Runs) -> Self:
        found = super().read(runs)
        found._starts, found._lengths, held = self._borders.read(runs)
        found._inner = self._inner.read(held)
        return found

    def take(self, index: Index) -> pa.Array:
        lengths = self._lengths[index]
        ends = np.cumsum(lengths)
        within = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        items = self._inner.take(np.repeat(self._starts[index], lengths) + within)
        offsets = pa.array(np.concatenate([[0], ends]).astype(_offsets(self._large)))
        lists = (pa.LargeListArray if self._large else pa.ListArray).from_arrays(offsets, items)
        return self._nulled(lists, index)


class _Structs(_Node):
    """Structs, whose fields are columns."""

    def __init__(self, kind: pa.StructType, spec: TensorSpec, spooler: Spooler) -> None:
        super().__init__(kind, spooler)
        self._fields = [_node(field.type, spec, spooler) for field in kind]

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields) + self._valid_spool.nbytes

    def append(self, column: pa.Array) -> None:
        super().append(column)
        for number, field in enumerate(self._fields):
            field.append(column.field(number))

    def finish(self) -> None:
        super().finish()
        for field in self._fields:
            field.finish()

    def read(self, runs: Runs) -> Self:
        found = super().read(runs)
        found._fields = [field.read(runs) for field in self._fields]
        return found

    def take(self, index: Index) -> pa.Array:
        names = [field.name for field in self.type]
        return self._nulled(pa.StructArray.from_arrays([field.take(index) for field in self._fields], names), index)


def _node(kind: pa.DataType, spec: TensorSpec, spooler: Spooler) -> _Node:
    """Returns an empty node for a type.

    Raises:
        ColumnError: There is none for it.
    """
    if pa.types.is_struct(kind):
        return _Structs(kind, spec, spooler)
    if _is_list(kind):
        return _Lists(kind, spec, spooler)
    if pa.types.is_primitive(kind):
        return _Fixed(kind, spooler)
    if any(is_kind(kind) for is_kind in _OF_BYTES):
        return _Bytes(kind, spooler)
    raise ColumnError(
        f"column {spec.column!r} holds {kind}, which cannot be kept as it is",
        hint="cast it to numbers, text, dates, or lists or structs of them",
        column=spec.column,
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _offsets(large: bool) -> type[np.int32] | type[np.int64]:
    """Returns what the offsets of an Arrow type are."""
    return np.int64 if large else np.int32


def _empty(kind: pa.DataType) -> Any:
    """Returns what says nothing in a type: 0, an empty text or list, or null."""
    if pa.types.is_primitive(kind):
        return pa.scalar(0).cast(kind).as_py() if not pa.types.is_temporal(kind) else None
    if pa.types.is_struct(kind):
        return {field.name: _empty(field.type) for field in kind}
    if _is_list(kind):
        return []
    return b"" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else ""
