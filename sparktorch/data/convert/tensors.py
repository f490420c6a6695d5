"""Converts Arrow columns to NumPy arrays, vectorised, and zero-copy where the memory layout allows.

Rows with nulls have been refused or left out before, unless a spec has a `fill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.checks import refuse_lengths
from sparktorch.errors import ColumnError

__all__ = [
    "VectorRows",
    "as_lists",
    "byte_rows",
    "nulls_for_misfits",
    "pack",
    "ragged_rows",
    "to_arrow",
    "to_numpy",
    "vector_rows",
]

Array = npt.NDArray[Any]


def to_numpy(array: pa.Array, spec: TensorSpec, *, first_row: int = 0) -> Array:
    """Converts one Arrow column to an array of shape `(rows, *spec.shape)` and dtype `spec.dtype`.

    The column is primitive; nested lists of the lengths `spec.levels`; ML vectors as structs of size, indices and
    values; or bytes. The result may share the Arrow buffer and be read-only.
    """
    if pa.types.is_struct(array.type):
        return _dense_rows(array, spec, first_row)
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return _from_bytes(array, spec, first_row)
    return _numbers(_innermost(array, spec, first_row), spec).reshape(len(array), *spec.shape)


def _numbers(values: pa.Array, spec: TensorSpec) -> Array:
    """Converts elements of rows to `spec.dtype`; nulls and NaN become `spec.fill`, if it is set."""
    if values.null_count:
        assert spec.fill is not None, "the caller has refused nulls"
        values = values.fill_null(pa.scalar(spec.fill).cast(values.type))
    numbers: Array = values.to_numpy(zero_copy_only=False)
    return _fill_nan(numbers.astype(spec.dtype, copy=False), spec)


def _fill_nan(values: Array, spec: TensorSpec) -> Array:
    """Returns values with NaN replaced by `spec.fill`, if it is set."""
    if spec.fill is None or values.dtype.kind != "f" or not np.isnan(values).any():
        return values
    return np.where(np.isnan(values), np.array(spec.fill, values.dtype), values)


def nulls_for_misfits(array: pa.Array, dtype: npt.DTypeLike) -> pa.Array:
    """Returns a column whose numbers are null where an integer dtype cannot hold them, like Spark's `try_cast`.

    The type of the column stays, except that decimals become int64.
    """
    return _nulls_beyond(array, np.iinfo(dtype)) if np.dtype(dtype).kind == "i" else array


def _nulls_beyond(array: pa.Array, limits: np.iinfo[Any]) -> pa.Array:
    """Returns a column whose numbers are null beyond the limits of an integer dtype, at any depth of lists."""
    kind = array.type
    if pa.types.is_struct(kind) and kind.get_field_index("values") >= 0:  # It is a column of ML vectors.
        names = [field.name for field in kind]
        parts = dict(zip(names, array.flatten(), strict=True))
        parts["values"] = _nulls_beyond(parts["values"], limits)
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(list(parts.values()), names=names, mask=mask)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        whole = pa.concat_arrays([array]) if array.offset else array
        inner = whole.values
        values = _nulls_beyond(inner, limits)
        if values is inner:
            return array
        mask = whole.is_null() if whole.null_count else None
        return type(whole).from_arrays(whole.offsets, values, mask=mask)
    if pa.types.is_integer(kind) and np.can_cast(kind.to_pandas_dtype(), limits.dtype):
        return array
    if pa.types.is_decimal(kind):
        values = array.to_pylist()
        fits = np.array([value is not None and limits.min <= int(value) <= limits.max for value in values], np.bool_)
        return _nulls_outside(fits, array).cast(pa.int64(), safe=False)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return array
    numbers = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f":
        # Nulls have become NaN, which compares as false.
        whole_part = np.trunc(numbers.astype(np.float64))
        fits = (whole_part >= float(limits.min)) & (whole_part < float(limits.max + 1))
    else:
        fits = (numbers >= limits.min) & (numbers <= limits.max)
    return _nulls_outside(fits, array)


def _nulls_outside(fits: npt.NDArray[np.bool_], array: pa.Array) -> pa.Array:
    """Returns a column that is null outside of a mask."""
    return array if fits.all() else pc.if_else(pa.array(fits), array, pa.scalar(None, array.type))


def ragged_rows(array: pa.Array, spec: TensorSpec, *, first_row: int = 0) -> tuple[Array, npt.NDArray[np.int64]]:
    """Converts lists of unequal length; with `spec.fill`, a null row is empty.

    Returns the concatenated elements of all rows, of shape `(elements, *spec.shape)`, and the number of elements of
    each row, int64 of shape `(rows,)`.
    """
    lengths = array.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    # Unlike `values`, `flatten` respects slices and skips values behind null rows.
    elements = array.flatten()
    try:
        values = _numbers(_innermost(elements, spec, 0), spec)
    except ColumnError as error:
        # The row number of the error counts elements.
        row = int(np.repeat(np.arange(len(lengths)), lengths)[error.where["row"]])
        location: dict[str, Any] = {"column": spec.column, "row": first_row + row}
        raise ColumnError(error.what, hint=error.hint, code=error.code, **location) from None
    values = values.reshape(len(elements), *spec.shape)
    if spec.limit is not None and (lengths > spec.limit).any():
        starts = np.cumsum(lengths) - lengths
        positions_in_row = np.arange(len(elements)) - np.repeat(starts, lengths)
        values = values[positions_in_row < spec.limit]
        lengths = np.minimum(lengths, spec.limit)
    return values, lengths


def vector_rows(array: pa.StructArray, spec: TensorSpec, *, first_row: int = 0) -> VectorRows:
    """Returns the values, indices and lengths of ML vectors, dense or sparse, of size `spec.width`."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    values = array.field("values")
    sizes = array.field("size")  # The size of a dense vector is null.
    lengths = np.where(valid, values.value_lengths().fill_null(0).to_numpy(), 0).astype(np.int64)
    sparse = sizes.is_valid().to_numpy(zero_copy_only=False) & valid
    row_sizes = np.where(sparse, sizes.fill_null(0).to_numpy(), lengths)
    refuse_lengths(row_sizes, spec, spec.width, first_row, among=valid, suggests_padding=False)
    flat = _numbers(_flatten_rows(values, valid), spec)
    indices = _flatten_rows(array.field("indices"), sparse).to_numpy()
    # A null row becomes a dense one of fill values.
    if not valid.all():
        starts = np.cumsum(lengths) - lengths
        flat = np.insert(flat, np.repeat(starts[~valid], spec.width), np.array(spec.fill, flat.dtype))
        lengths[~valid] = spec.width
    return VectorRows(flat, indices.astype(np.int32, copy=False), lengths, sparse)


@dataclass(frozen=True)
class VectorRows:
    """ML vectors as concatenated elements.

    Attributes:
        values: The stored values of all rows.
        indices: The index of each stored value of the sparse rows, int32.
        lengths: Number of stored values in each row, int64 of shape `(rows,)`.
        sparse: Whether each row is sparse, bool of shape `(rows,)`.
    """

    values: Array
    indices: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    sparse: npt.NDArray[np.bool_]

    def positions(self) -> npt.NDArray[np.int64]:
        """Returns the index of each value in its row, int64 of shape `(values,)`."""
        is_sparse = np.repeat(self.sparse, self.lengths)
        positions = np.empty(len(self.values), np.int64)
        positions[is_sparse] = self.indices
        dense_lengths = self.lengths[~self.sparse]  # Dense rows have the same length.
        if len(dense_lengths):
            positions[~is_sparse] = np.tile(np.arange(dense_lengths[0]), len(dense_lengths))
        return positions


def _innermost(array: pa.Array, spec: TensorSpec, first_row: int) -> pa.Array:
    """Returns the innermost values of nested lists, after a check of the length of every list.

    With `spec.fill`, the values of a null list are null.
    """
    per_row = 1
    for length in spec.levels:
        lengths = array.value_lengths().fill_null(length).to_numpy()
        refuse_lengths(lengths, spec, length, first_row, per_row)
        items = array.flatten()
        # `flatten` leaves out null lists, so `take` puts nulls where their values would be.
        if array.null_count:
            valid = array.is_valid().to_numpy(zero_copy_only=False)
            positions = (np.cumsum(valid) - 1)[:, None] * length + np.arange(length)
            items = items.take(pa.array(positions.reshape(-1), mask=np.repeat(~valid, length)))
        array = items
        per_row *= length
    return array


def _flatten_rows(lists: pa.Array, rows: npt.NDArray[np.bool_]) -> pa.Array:
    """Returns the concatenated elements of the lists in the mask `rows`."""
    return (lists if rows.all() else lists.filter(pa.array(rows))).flatten()


def _dense_rows(array: pa.StructArray, spec: TensorSpec, first_row: int) -> Array:
    """Converts ML vectors to dense rows."""
    rows = vector_rows(array, spec, first_row=first_row)
    if not rows.sparse.any():
        return rows.values.reshape(len(array), *spec.shape)
    dense = np.zeros((len(array), spec.width), spec.dtype)
    dense[np.repeat(np.arange(len(array)), rows.lengths), rows.positions()] = rows.values
    return dense.reshape(len(array), *spec.shape)


def _from_bytes(array: pa.Array, spec: TensorSpec, first_row: int) -> Array:
    """Converts rows of raw bytes, which are little-endian elements of `spec.dtype`."""
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    if array.null_count:
        array = array.fill_null(np.full(spec.shape, spec.fill, dtype).tobytes())
    offsets, content = byte_rows(array)
    refuse_lengths(np.diff(offsets), spec, spec.width * dtype.itemsize, first_row, unit="bytes", suggests_padding=False)
    values = content.view(dtype).astype(spec.dtype, copy=False)
    return _fill_nan(values, spec).reshape(len(array), *spec.shape)


def byte_rows(array: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Returns the offsets of binary or string rows without nulls, int64 of shape `(rows + 1,)`, and their bytes."""
    is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    _, offset_buffer, content = array.buffers()
    if not len(array) or content is None:
        return np.zeros(len(array) + 1, np.int64), np.empty(0, np.uint8)
    dtype = np.int64 if is_large else np.int32
    offsets = np.frombuffer(offset_buffer, dtype)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return offsets - offsets[0], np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]]


def as_lists(elements: pa.Array, ends: npt.NDArray[np.int64]) -> pa.ListArray | pa.LargeListArray:
    """Makes lists from concatenated elements; list `i` begins at `ends[i]` and ends before `ends[i + 1]`.

    It is a `LargeListArray` where 32-bit offsets cannot count the elements.
    """
    if ends[-1] <= np.iinfo(np.int32).max:
        return pa.ListArray.from_arrays(pa.array(ends.astype(np.int32)), elements)
    return pa.LargeListArray.from_arrays(pa.array(ends), elements)


def pack(columns: Sequence[pa.Array], spec: TensorSpec) -> pa.ListArray | pa.LargeListArray:
    """Packs scalar columns of equal length into one column of lists, as the encoding does in Spark."""
    rows = len(columns[0])
    width = len(columns)
    kind = pa.from_numpy_dtype(spec.dtype)
    values = pa.concat_arrays([nulls_for_misfits(column, spec.dtype).cast(kind, safe=False) for column in columns])
    by_row = np.arange(rows * width).reshape(width, rows).T.reshape(-1)
    return as_lists(values.take(by_row), np.arange(rows + 1) * width)


def to_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Converts an array of shape `(rows, ...)` to an Arrow column; further axes become nested lists."""
    column: pa.Array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        outer = int(np.prod(values.shape[:axis]))
        column = as_lists(column, np.arange(outer + 1) * values.shape[axis])
    return column
