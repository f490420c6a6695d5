"""Columns stored as Arrow arrays, from which a `preprocess` makes tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import byte_rows
from sparktorch.data.convert.values import in_utc
from sparktorch.data.fields.base import Field, Offsets, Stored
from sparktorch.data.sampling.row_keys import RowDigests
from sparktorch.data.storage import RowStorage, Runs, Spool
from sparktorch.errors import ColumnError

__all__ = ["ArrowColumn"]

Mask = npt.NDArray[np.bool_]

_OF_BYTES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


class ArrowColumn(Field):
    """An unconverted column, from which `take` returns NumPy arrays or Arrow arrays.

    Numbers, booleans, dates and timestamps are taken as NumPy arrays, unless `TensorSpec.nulls` is set; all else is
    taken as Arrow arrays. Instants are in UTC at any depth, whatever zone Spark sends them in: they are the same in
    ranks, in scoring and in MLflow, whichever session asks.
    """

    decodes = True
    rows: pa.Array

    def __init__(self, spec: TensorSpec, storage: RowStorage) -> None:
        """Creates an empty field; the first batch sets its type."""
        super().__init__(spec)
        self._storage = storage

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks and stores the rows of a batch; see `Field.append`."""
        column = column.cast(in_utc(column.type))
        fill = None if self._spec.nulls else self._spec.fill
        if fill is not None and pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type):
            column = column.fill_null(pa.scalar(fill).cast(column.type))
            if pa.types.is_floating(column.type):
                column = pc.if_else(pc.is_nan(column), pa.scalar(fill, column.type), column)
        self._node_of(column.type).append(column)

    def take(self, index: torch.Tensor, here: torch.Tensor | None = None) -> tuple[Any, ...]:
        """Returns one array; in NumPy arrays, null dates and timestamps are `NaT`.

        An Arrow array has one of the large types, with 64-bit offsets, where 32-bit offsets do not suffice.
        """
        column = self.rows.take(pa.array(index.numpy()))
        if pa.types.is_primitive(column.type) and not self._spec.nulls:
            return (column.to_numpy(zero_copy_only=False),)
        with suppress(pa.ArrowInvalid):  # The rows may be too long for 32-bit offsets.
            column = column.cast(self._node_of(None).type)
        return (column,)

    def _node_of(self, kind: pa.DataType) -> _Node:
        """Returns the node that stores the rows; the type of the first batch decides which one."""
        if "rows" not in self._parts:
            self._parts["rows"] = _node(kind, self._spec, self._storage)
        node = self._parts["rows"]
        assert isinstance(node, _Node)
        return node


class _Node(ABC):
    """Rows of one Arrow type, stored as the buffers of one array with 64-bit offsets.

    Nested types have a node for each of their types. Rows are appended, and then read by `finish` or `read`.
    """

    def __init__(self, kind: pa.DataType, storage: RowStorage, *parts: Stored) -> None:
        """Creates a node without rows; `parts` store the rows of `kind` but for which of them are null."""
        self.type = kind
        self._valid = storage.spool(np.bool_)
        self._parts = self._valid, *parts

    @property
    def nbytes(self) -> int:
        """Bytes of the rows appended so far."""
        return sum(part.nbytes for part in self._parts)

    def append(self, column: pa.Array) -> None:
        """Stores the rows of a batch."""
        self._valid.append(column.is_valid().to_numpy(zero_copy_only=False))

    def finish(self) -> pa.Array:
        """Ends appending, and returns all rows."""
        return self._array(self._valid.finish(), None)

    def read(self, runs: Runs) -> pa.Array:
        """Returns a copy of the rows in `runs`; can be called repeatedly, but not after `finish`."""
        return self._array(self._valid.read(runs), runs)

    @abstractmethod
    def _array(self, valid: Mask, runs: Runs | None) -> pa.Array:
        """Returns the rows in `runs`, or all rows for `None`; `valid` is the mask of these rows that are not null."""


class _Fixed(_Node):
    """Numbers, booleans, dates and timestamps."""

    def __init__(self, kind: pa.DataType, storage: RowStorage) -> None:
        # Dates and timestamps are stored as the integers that they consist of.
        self._is_temporal = pa.types.is_temporal(kind)
        self._integers = pa.int64() if kind.bit_width == 64 else pa.int32()
        self._values = storage.spool((self._integers if self._is_temporal else kind).to_pandas_dtype())
        super().__init__(kind, storage, self._values)

    def append(self, column: pa.Array) -> None:
        super().append(column)
        numbers = column.view(self._integers) if self._is_temporal else column
        if numbers.null_count:
            numbers = numbers.fill_null(pa.scalar(0).cast(numbers.type))
        self._values.append(numbers.to_numpy(zero_copy_only=False))

    def _array(self, valid: Mask, runs: Runs | None) -> pa.Array:
        values = self._values.finish() if runs is None else self._values.read(runs)
        column = pa.array(values, mask=None if valid.all() else ~valid)
        return column.view(self.type) if self._is_temporal else column


class _Elements(_Node):
    """Rows of elements: strings and binary values have their bytes in a spool, lists their elements in a node."""

    def __init__(self, kind: pa.DataType, storage: RowStorage, inner: Spool | _Node) -> None:
        self._offsets = Offsets(storage)
        self._inner = inner
        super().__init__(kind, storage, self._offsets, inner)

    def append(self, column: pa.Array) -> None:
        super().append(column)
        if _is_list(self.type):
            lengths = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
            elements = column.flatten()
        else:
            without_nulls = column.fill_null(pa.scalar("").cast(column.type)) if column.null_count else column
            offsets, elements = byte_rows(without_nulls)
            lengths = np.diff(offsets)
        self._offsets.append(lengths)
        self._inner.append(elements)

    def _array(self, valid: Mask, runs: Runs | None) -> pa.Array:
        elements: Any
        if runs is None:
            offsets = self._offsets.finish()
            elements = self._inner.finish()
        else:
            offsets, element_runs = self._offsets.read(runs)
            elements = self._inner.read(element_runs)
        buffers = [_bitmap(valid), pa.py_buffer(offsets)]
        if _is_list(self.type):
            kind = pa.large_list(elements.type)
            return pa.Array.from_buffers(kind, len(valid), buffers, children=[elements])
        is_text = pa.types.is_string(self.type) or pa.types.is_large_string(self.type)
        kind = pa.large_string() if is_text else pa.large_binary()
        return pa.Array.from_buffers(kind, len(valid), [*buffers, pa.py_buffer(elements)])


class _Structs(_Node):
    """Structs, with a node for each field."""

    def __init__(self, kind: pa.StructType, spec: TensorSpec, storage: RowStorage) -> None:
        self._fields = [_node(field.type, spec, storage) for field in kind]
        super().__init__(kind, storage, *self._fields)

    def append(self, column: pa.Array) -> None:
        super().append(column)
        for number, field in enumerate(self._fields):
            field.append(column.field(number))

    def _array(self, valid: Mask, runs: Runs | None) -> pa.Array:
        columns = [field.finish() if runs is None else field.read(runs) for field in self._fields]
        kind = pa.struct([field.with_type(column.type) for field, column in zip(self.type, columns, strict=True)])
        return pa.Array.from_buffers(kind, len(valid), [_bitmap(valid)], children=columns)


def _bitmap(valid: Mask) -> pa.Buffer | None:
    """Returns the Arrow validity bitmap of a mask; `None` if no row is null."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _node(kind: pa.DataType, spec: TensorSpec, storage: RowStorage) -> _Node:
    """Returns an empty node for a type, or refuses it."""
    if pa.types.is_struct(kind):
        return _Structs(kind, spec, storage)
    if _is_list(kind):
        return _Elements(kind, storage, _node(kind.value_type, spec, storage))
    if pa.types.is_primitive(kind):
        return _Fixed(kind, storage)
    if any(is_kind(kind) for is_kind in _OF_BYTES):
        return _Elements(kind, storage, storage.spool(np.uint8))
    raise ColumnError(
        f"column {spec.column!r} holds {kind}, which cannot be kept as it is",
        hint="cast it to numbers, text, dates, or lists or structs of them",
        column=spec.column,
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
