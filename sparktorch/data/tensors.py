"""Arrow columns to NumPy arrays and torch tensors, vectorised, zero-copy where the layout allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.errors import ColumnError

__all__ = ["check_finite", "check_labels", "check_weights", "present", "to_arrow", "to_numpy"]


def to_numpy(array: pa.Array, spec: TensorSpec, *, first_row: int = 0) -> npt.NDArray[Any]:
    """Converts one Arrow column to an array of shape `(rows, *spec.shape)` and dtype `spec.dtype`.

    The result may share the Arrow buffer and be read-only.

    Args:
        array: A primitive column, or a list column with one list of `spec.width` values a row; in
            place of a list an ML vector, the struct that Spark keeps it as.
        spec: What the column is to become.
        first_row: Number of the batch's first row, for messages.

    Raises:
        ColumnError: A row is null, a list holds a null or has another length than `spec.shape` says.
    """
    if array.null_count:
        row = first_row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise _nulls(spec, array.null_count, row)
    if not spec.shape:
        return _flat(array, spec)
    if pa.types.is_struct(array.type):
        return _vectors(array, spec, first_row)
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    wrong = np.flatnonzero(lengths != spec.width)
    if wrong.size:
        raise _lengths(spec, wrong, int(lengths[wrong[0]]), first_row)
    # `flatten()` would drop null rows and shift features against labels; `values` with the
    # slice's own offsets cannot.
    values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if values.null_count:
        inner = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise _nulls(spec, values.null_count, first_row + inner // spec.width)
    return _flat(values, spec).reshape(len(array), *spec.shape)


def present(columns: Sequence[pa.Array]) -> pa.BooleanArray | None:
    """Returns which rows have no null in any of the columns; `None` where that is every row."""
    found = None
    for column in columns:
        masks = [column.is_valid()] if column.null_count else []
        if pa.types.is_list(column.type) and column.flatten().null_count:
            inner = pc.list_parent_indices(column).filter(column.flatten().is_null())
            masks.append(pc.invert(pc.is_in(pa.array(np.arange(len(column))), inner)))
        for mask in masks:
            found = mask if found is None else pc.and_(found, mask)
    return found


def _vectors(array: pa.StructArray, spec: TensorSpec, first_row: int) -> npt.NDArray[Any]:
    """Converts ML vectors, dense and sparse: structs of type, size, indices and values."""
    sparse = array.field("type").to_numpy() == 0
    values = array.field("values")
    if not sparse.any():
        return to_numpy(values, spec, first_row=first_row)
    sizes = np.where(sparse, array.field("size").fill_null(-1).to_numpy(), values.value_lengths().to_numpy())
    wrong = np.flatnonzero(sizes != spec.width)
    if wrong.size:
        raise _lengths(spec, wrong, int(sizes[wrong[0]]), first_row)
    rows = pc.list_parent_indices(values).to_numpy()
    places = np.empty(len(rows), np.int64)
    places[sparse[rows]] = array.field("indices").filter(pa.array(sparse)).flatten().to_numpy()
    places[~sparse[rows]] = np.tile(np.arange(spec.width), int((~sparse).sum()))
    dense = np.zeros((len(array), spec.width), spec.dtype)
    dense[rows, places] = values.flatten().to_numpy()
    return dense.reshape(len(array), *spec.shape)


def _flat(array: pa.Array, spec: TensorSpec) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.astype(spec.dtype, copy=False)


def _lengths(spec: TensorSpec, wrong: npt.NDArray[np.intp], first: int, first_row: int) -> ColumnError:
    return ColumnError(
        f"{wrong.size} rows of column {spec.column!r} do not hold {spec.width} values; the first has {first}",
        hint="every row of an input must have the same length: pad, truncate or filter",
        column=spec.column,
        row=first_row + int(wrong[0]),
    )


def _nulls(spec: TensorSpec, count: int, row: int) -> ColumnError:
    return ColumnError(
        f"column {spec.column!r} has {count} null values",
        hint="drop them with df.dropna() or fill them before fit",
        column=spec.column,
        row=row,
    )


def check_finite(values: npt.NDArray[Any], spec: TensorSpec) -> None:
    """Refuses NaN and infinity.

    Raises:
        ColumnError: With the number of such rows.
    """
    # The sum is finite only if every value is, and costs a tenth of an element-wise test; only
    # a sum that overflowed needs the second look.
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=np.float64)):
            return
    bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
    if bad.any():
        raise ColumnError(
            f"{int(bad.sum())} rows of column {spec.column!r} are NaN or infinite",
            hint="drop or fill them before fit",
            column=spec.column,
        )


def check_labels(values: npt.NDArray[Any], columns: Columns) -> npt.NDArray[Any]:
    """Checks labels and, where they are classes, returns them as int64.

    Raises:
        ColumnError: A label is not finite, not a whole number, or outside `[0, classes)`.
    """
    spec = columns.label
    assert spec is not None
    check_finite(values, spec)
    if columns.classes is None:
        return values
    bad = (values < 0) | (values >= columns.classes) | (values != np.floor(values))
    if bad.any():
        raise ColumnError(
            f"{int(bad.sum())} labels in column {spec.column!r} are not classes 0 ... "
            f"{columns.classes - 1}, for example {values[bad][0]:g}",
            hint=f"the module returns {columns.classes} scores a row: index the labels with "
            "StringIndexer, or give the module as many outputs as there are classes",
            column=spec.column,
        )
    return values.astype(np.int64)


def check_weights(values: npt.NDArray[Any], spec: TensorSpec) -> None:
    """Refuses weights that are negative, NaN or infinite.

    Raises:
        ColumnError: With the number of such rows.
    """
    check_finite(values, spec)
    if (values < 0).any():
        raise ColumnError(
            f"{int((values < 0).sum())} weights in column {spec.column!r} are negative",
            hint="sample weights must be zero or more",
            column=spec.column,
        )


def to_arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Converts an array of shape `(rows, ...)` to an Arrow column, nested lists for further axes."""
    column: pa.Array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        outer = int(np.prod(values.shape[:axis]))
        offsets = np.arange(outer + 1, dtype=np.int32) * np.int32(values.shape[axis])
        column = pa.ListArray.from_arrays(pa.array(offsets), column)
    return column
