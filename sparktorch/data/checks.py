"""What makes a row unfit for training: nulls, NaN, lengths, labels that are no classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.data.columns import Columns, TensorSpec
from sparktorch.errors import ColumnError

__all__ = [
    "Screen",
    "check_finite",
    "check_labels",
    "check_weights",
    "marked_within",
    "non_finite_mask",
    "null_mask",
    "present",
    "refuse_lengths",
    "refuse_nulls",
]

Mask = npt.NDArray[np.bool_]

_SHOWN_ROWS = 3


class Screen:
    """Lets through the rows that can be trained on, and counts the others.

    Attributes:
        dropped: Number of rows left out so far.
    """

    def __init__(self, columns: Columns) -> None:
        """Takes what the columns are, and whether unfit rows are left out or are an error in the end."""
        self._columns = columns
        self._found: dict[tuple[str, str], tuple[int, list[int]]] = {}
        self._through: npt.NDArray[np.intp] | None = None  # the last batch's, where it was not the whole of it
        self.dropped = 0

    def rows_of(self, batch: pa.RecordBatch, *, first_row: int) -> pa.RecordBatch:
        """Returns the rows of a batch that hold no null, NaN or infinity.

        Args:
            batch: Rows under their wire names.
            first_row: Number of the first one, for messages.
        """
        unfit: Mask | None = None
        for spec in self._columns.tensors:
            for what, mask in _unfit(batch.column(spec.name), spec):
                self._note(spec.column, what, np.flatnonzero(mask) + first_row)
                unfit = mask if unfit is None else unfit | mask
        self._through = None if unfit is None else np.flatnonzero(~unfit)
        if unfit is None:
            return batch
        self.dropped += int(unfit.sum())
        return batch.filter(pa.array(~unfit))

    def placed(self, error: ColumnError, *, first_row: int) -> ColumnError:
        """Returns an error of a row that `rows_of` last let through with its number among the rows that arrived.

        Args:
            error: Its `row` counts from `first_row` on what was let through.
            first_row: Number of the batch's first row.
        """
        where = dict(error.where)
        if self._through is not None and "row" in where:
            where["row"] = first_row + int(self._through[where["row"] - first_row])
        return ColumnError(error.what, hint=error.hint, **where)

    def close(self) -> None:
        """Ends the rows of a rank.

        Raises:
            ColumnError: Some were unfit and are not to be left out; with column, number and first rows.
        """
        if self._columns.drop_nulls or not self._found:
            return
        (column, what), (count, rows) = next(iter(self._found.items()))
        said = f"column {column!r} has {count} rows with null values"
        if what != "null":
            said = f"{count} rows of column {column!r} are {what}"
        shown = ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")
        raise ColumnError(
            f"{said}; in the order in which they arrived: {shown}",
            hint="drop or fill them before fit, or set nullPolicy='drop' or 'fill'",
            column=column,
            row=rows[0],
        )

    def _note(self, column: str, what: str, rows: npt.NDArray[np.intp]) -> None:
        count, first = self._found.get((column, what), (0, []))
        self._found[column, what] = count + len(rows), (first + rows[:_SHOWN_ROWS].tolist())[:_SHOWN_ROWS]


def _unfit(column: pa.Array, spec: TensorSpec) -> Iterator[tuple[str, Mask]]:
    """Yields which rows of a column hold a null, and which hold NaN or infinity, where any do."""
    nulls = None if spec.fill is not None else null_mask(column)
    if nulls is not None:
        yield "null", nulls
    infinite = non_finite_mask(column, nan=spec.fill is None)
    if infinite is not None:
        yield "NaN or infinite" if spec.fill is None else "infinite", infinite


def present(columns: Sequence[pa.Array], specs: Sequence[TensorSpec]) -> pa.BooleanArray | None:
    """Returns which rows have no null in any of the columns; `None` where that is every row."""
    found: Mask | None = None
    for column, spec in zip(columns, specs, strict=True):
        mask = None if spec.fill is not None else null_mask(column)
        if mask is not None:
            found = mask if found is None else found | mask
    return None if found is None else pa.array(~found)


def null_mask(array: pa.Array) -> Mask | None:
    """Returns which rows are null or hold one, on any level of lists; `None` where none is."""
    found = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return marked_within(array, found, null_mask)


def non_finite_mask(array: pa.Array, *, nan: bool = True) -> Mask | None:
    """Returns which rows are or hold infinity, or NaN if that counts; `None` where none does."""
    if not pa.types.is_floating(array.type):
        return marked_within(array, None, partial(non_finite_mask, nan=nan))
    every = array.to_numpy(zero_copy_only=False)  # null is NaN in it
    if np.isfinite(every).all():
        return None
    bad = np.isinf(every) if not nan else ~np.isfinite(every) & array.is_valid().to_numpy(zero_copy_only=False)
    return bad if bad.any() else None


def marked_within(array: pa.Array, found: Mask | None, mask_of: Callable[[pa.Array], Mask | None]) -> Mask | None:
    """Adds the rows that hold something marked to those that are marked themselves.

    Args:
        array: Lists, or ML vectors; in anything else nothing is looked for.
        found: The rows that are marked themselves; `None` for none.
        mask_of: Returns which elements are marked.
    """
    lists = array.field("values") if _is_vector(array.type) else array
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        return found
    inner = mask_of(lists.flatten())
    if inner is None:
        return found
    marked = np.zeros(len(array), np.bool_) if found is None else found.copy()
    marked[pc.list_parent_indices(lists).to_numpy()[inner]] = True
    return marked


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) and kind.get_field_index("indices") >= 0)


def refuse_nulls(array: pa.Array, spec: TensorSpec, first_row: int, per_row: int = 1) -> None:
    """Refuses nulls in a column, or among the elements of its rows, `per_row` of them in each.

    Raises:
        ColumnError: With their number and the first row.
    """
    if not array.null_count:
        return
    first = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
    column = spec.sources[first % per_row] if spec.sources else spec.column
    raise ColumnError(
        f"column {column!r} has {array.null_count} null values",
        hint="drop or fill them, or fit with nullPolicy='fill'",
        column=column,
        row=first_row + first // per_row,
    )


def refuse_lengths(
    lengths: npt.NDArray[Any],
    spec: TensorSpec,
    length: int,
    first_row: int,
    per_row: int = 1,
    *,
    unit: str = "values",
    among: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Refuses lists that do not hold `length` values.

    Args:
        lengths: What they hold, `per_row` lists to a row.
        spec: The column.
        length: What they should hold.
        first_row: Number of the first row.
        per_row: Number of lists in a row.
        unit: What they hold.
        among: The rows that count.

    Raises:
        ColumnError: With the number of such rows and the first of them.
    """
    differs = lengths != length
    wrong = np.flatnonzero(differs if among is None else differs & among)
    if not wrong.size:
        return
    rows = np.unique(wrong // per_row)
    inner = "" if per_row == 1 else "the lists of "
    lists = spec.kind == "number" and per_row == 1
    raise ColumnError(
        f"{inner}{rows.size} rows of column {spec.column!r} do not hold {length} {unit}; "
        f"the first has {int(lengths[wrong[0]])}",
        hint="every row of an input must have the same length: pad, truncate or filter"
        + (f", or set inputLayouts={{{spec.column!r}: 'padded'}} or 'jagged'" if lists else ""),
        column=spec.column,
        row=first_row + int(rows[0]),
    )


def check_finite(values: npt.NDArray[Any], spec: TensorSpec) -> None:
    """Refuses NaN and infinity.

    Raises:
        ColumnError: With the number of such rows.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
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
