"""Checks that rows can be trained on: nulls, NaN, infinity, list lengths, labels and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparktorch.data.columns import LABEL, Columns, TensorSpec
from sparktorch.data.convert.sql_types import NUMBERS
from sparktorch.errors import ColumnError, counted

__all__ = [
    "RowFilter",
    "check_labels",
    "check_weights",
    "non_finite_mask",
    "null_mask",
    "present",
    "refuse_lengths",
    "refuse_nulls",
]

Mask = npt.NDArray[np.bool_]

_SHOWN_ROWS = 3
_FLOATS = ("float16", "float32", "float64")


class RowFilter:
    """Removes rows that cannot be trained on, and counts them in `dropped`.

    `unfit` is their mask in the last batch, `None` if there were none.
    """

    def __init__(self, columns: Columns) -> None:
        """Sets the columns; their `drop_nulls` says whether `close` raises for unfit rows."""
        self._columns = columns
        self._unfit_rows: dict[tuple[str, str, str], tuple[int, list[int]]] = {}
        self.dropped = 0
        self.unfit: Mask | None = None

    def rows_of(self, batch: pa.RecordBatch, *, first_row: int) -> pa.RecordBatch:
        """Returns the rows of a batch that hold no null, NaN or infinity, nor a null in a column of `Columns.marks`.

        `first_row` is the row number of its first row, for messages.
        """
        unfit: Mask | None = None
        for spec in self._columns.tensors:
            for what, mask in _unfit(batch.column(spec.name), spec):
                for name, rows in _by_source(batch.column(spec.name), spec, what, np.flatnonzero(mask)):
                    self._note(spec.name, name, what, rows + first_row)
                unfit = _either(unfit, mask)
        for wire, name in self._columns.marks.items():
            nulls = _nulls(batch.column(wire))
            if nulls is not None:
                self._note(wire, name, "null", np.flatnonzero(nulls) + first_row)
                unfit = _either(unfit, nulls)
        self.unfit = unfit
        if unfit is None:
            return batch
        self.dropped += int(unfit.sum())
        return batch.filter(pa.array(~unfit))

    def renumbered(self, error: ColumnError, *, first_row: int) -> ColumnError:
        """Returns an error about the batch that `rows_of` returned last, with a row number that counts removed rows."""
        where = dict(error.where)
        if self.unfit is not None and "row" in where:
            where["row"] = first_row + int(np.flatnonzero(~self.unfit)[where["row"] - first_row])
        return ColumnError(error.what, hint=error.hint, code=error.code, **where)

    def close(self, *, sample: bool = False) -> None:
        """Raises a `ColumnError` about unfit rows, with count and first rows, unless `drop_nulls` is set.

        With `sample`, the first row alone was looked at.
        """
        if self._columns.drop_nulls or not self._unfit_rows:
            return
        (_, column, what), (count, rows) = next(iter(self._unfit_rows.items()))
        problem = f"column {column!r} has {counted(count, 'row', 'rows')} with null values"
        if what != "null":
            problem = counted(count, f"row of column {column!r} is {what}", f"rows of column {column!r} are {what}")
        first_rows = ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")
        raise ColumnError(
            f"the first row holds {what} values in column {column!r}, and others were not looked at yet"
            if sample
            else f"{problem}; in the order in which they arrived: {first_rows}",
            hint=self._hint(column, what),
            column=column,
            row=rows[0],
            code="ST-NULL",
        )

    def _hint(self, column: str, what: str) -> str:
        spec = next((spec for spec in self._columns.tensors if column in (spec.column, *spec.sources)), None)
        hint = "drop or replace them before fit, or set nullPolicy='drop'"
        # Labels and weights are never filled, nor is infinity.
        if spec in self._columns.inputs and not spec.takes_nulls and _filled(spec):
            hint += " or 'fill'" if what == "null" else " or, for NaN, 'fill'"
        if spec is None:  # It is a column of `Columns.marks`.
            return hint
        if what == "null":
            return hint + _null_hint(spec)
        if spec.as_it_is or spec.dtype not in _FLOATS:
            return hint
        return f"{hint}; beyond {np.finfo(spec.dtype).max:.2g} a number is infinite as {spec.dtype}"

    def _note(self, wire: str, column: str, what: str, rows: npt.NDArray[np.intp]) -> None:
        """Counts a column's unfit rows, by its encoded name, too: the user may name a column twice."""
        count, first = self._unfit_rows.get((wire, column, what), (0, []))
        self._unfit_rows[wire, column, what] = count + len(rows), (first + rows[:_SHOWN_ROWS].tolist())[:_SHOWN_ROWS]


def _unfit(column: pa.Array, spec: TensorSpec) -> Iterator[tuple[str, Mask]]:
    """Yields the masks of rows that hold a null, and of rows that hold NaN or infinity, each with a label for messages.

    Empty masks are skipped.
    """
    nulls = None if spec.takes_nulls else null_mask(column, spec)
    if nulls is not None:
        yield "null", nulls
    infinite = non_finite_mask(column, spec, nan=not spec.takes_nulls)
    if infinite is not None:
        yield "infinite" if spec.takes_nulls else "NaN or infinite", infinite


def _by_source(
    column: pa.Array, spec: TensorSpec, what: str, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[str, npt.NDArray[np.intp]]]:
    """Yields the user's column and its unfit rows; for packed columns, each column of the user with its own."""
    column = _checked_part(column, spec)
    if not spec.sources or column.null_count:
        yield spec.column, rows
        return
    values = column.take(pa.array(rows)).flatten()
    marks = _nulls(values) if what == "null" else _infinite(values, nan=spec.fill is None)
    assert marks is not None
    for name, bad in dict(zip(spec.sources, marks.reshape(-1, len(spec.sources)).T, strict=True)).items():
        if bad.any():
            yield name, rows[bad]


def present(
    columns: Sequence[pa.Array], specs: Sequence[TensorSpec], *, finite: bool = False
) -> pa.BooleanArray | None:
    """Returns the mask of rows without a null or, with `finite`, NaN or infinity in any column; `None` if it is all.

    Columns whose nulls are filled, or go to `preprocess`, are exempt.
    """
    unfit: Mask | None = None
    for column, spec in zip(columns, specs, strict=True):
        if spec.takes_nulls:
            continue
        unfit = _either(unfit, null_mask(column, spec))
        if finite:
            unfit = _either(unfit, non_finite_mask(column, spec))
    return None if unfit is None else pa.array(~unfit)


def _either(first: Mask | None, second: Mask | None) -> Mask | None:
    """Returns the mask of rows in one of two masks; `None` has no rows."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def null_mask(column: pa.Array, spec: TensorSpec) -> Mask | None:
    """Returns the mask of rows that are or hold a null, at any depth of lists and structs; `None` if no row does."""
    return _marked(_checked_part(column, spec), _nulls)


def non_finite_mask(column: pa.Array, spec: TensorSpec, *, nan: bool = True) -> Mask | None:
    """Returns the mask of rows that are or hold infinity or, with `nan`, NaN; `None` if no row does."""
    array = _checked_part(column, spec)
    if spec.layout == "raw" and np.dtype(spec.dtype).kind == "f":
        array = _as_lists(array, np.dtype(spec.dtype))
    return _marked(array, partial(_infinite, nan=nan))


def _filled(spec: TensorSpec) -> bool:
    """Whether `nullPolicy` "fill" has a value for a column: not for text, times and lists that `preprocess` gets."""
    return not spec.as_it_is or spec.sql in (*NUMBERS, "boolean")


def _null_hint(spec: TensorSpec) -> str:
    """Returns the part of a hint that says which other values of a column count as null."""
    narrow = spec.layout != "raw" and np.dtype(spec.dtype).kind == "i"
    return f"; what {spec.dtype} cannot hold, as NaN in a column of floats, counts as null" if narrow else ""


def _checked_part(column: pa.Array, spec: TensorSpec) -> pa.Array:
    """Returns the part of a column to check: the data of images, or the values of vectors, whose size may be null."""
    if pa.types.is_struct(column.type) and not spec.as_it_is:
        # By the type, not by the spec: scoring accepts vectors where arrays were fitted.
        vector = column.type.get_field_index("values") >= 0
        # Unlike `column.field`, this is null where the struct is.
        return pc.struct_field(column, "values" if vector else "data")
    return column


def _as_lists(column: pa.Array, dtype: np.dtype[Any]) -> pa.Array:
    """Returns bytes as lists of numbers; the list is empty if the length is no multiple of the item size."""
    if not len(column):
        return pa.array([], pa.list_(pa.from_numpy_dtype(dtype)))
    column = column.cast(pa.large_binary()).fill_null(b"")
    whole = pc.equal(pc.bit_wise_and(pc.binary_length(column), dtype.itemsize - 1), 0)  # Sizes are powers of 2.
    column = pc.if_else(whole, column, b"")
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    values = np.frombuffer(content or b"", np.uint8)[ends[0] : ends[-1]].view(dtype.newbyteorder("<"))
    return pa.LargeListArray.from_arrays(pa.array((ends - ends[0]) // dtype.itemsize), pa.array(values))


def _nulls(array: pa.Array) -> Mask | None:
    nulls: Mask | None = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return nulls


def _infinite(array: pa.Array, *, nan: bool) -> Mask | None:
    if not pa.types.is_floating(array.type):
        return None
    numbers = array.to_numpy(zero_copy_only=False)  # Nulls become NaN.
    if np.isfinite(numbers).all():
        return None
    unfit: Mask = np.isinf(numbers)
    if nan:
        unfit = ~np.isfinite(numbers) & array.is_valid().to_numpy(zero_copy_only=False)
    return unfit if unfit.any() else None


def _marked(array: pa.Array, mask_of: Callable[[pa.Array], Mask | None]) -> Mask | None:
    """Returns the mask of values that are or hold, in lists and structs, a value in `mask_of`; `None` if none does."""
    marks = mask_of(array)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    lists = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    inner: Iterable[pa.Array] = [array.flatten()] if lists else ()
    if pa.types.is_struct(array.type):
        inner = array.flatten()
    for values in inner:
        inner_marks = _marked(values, mask_of)
        if inner_marks is not None:
            # The mask may share the memory of an Arrow array, which is read-only.
            marks = np.zeros(len(array), np.bool_) if marks is None else marks.copy()
            marks[pc.list_parent_indices(array).to_numpy()[inner_marks] if lists else inner_marks] = True
    return marks


def refuse_nulls(column: pa.Array, spec: TensorSpec, *, first_row: int = 0) -> None:
    """Refuses rows that are or hold a null, unless they may; `first_row` is the number of the first one."""
    nulls = None if spec.takes_nulls else null_mask(column, spec)
    if nulls is None:
        return
    name, rows = next(_by_source(column, spec, "null", np.flatnonzero(nulls)))
    raise ColumnError(
        f"column {name!r} has {counted(len(rows), 'row', 'rows')} with null values",
        hint="drop or fill them, set handleInvalid='skip' or 'keep'"
        + (", or fit with nullPolicy='fill'" if _filled(spec) else "")
        + _null_hint(spec),
        column=name,
        row=first_row + int(rows[0]),
        code="ST-NULL",
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
    lists: bool = True,
) -> None:
    """Refuses lists that do not hold `length` values.

    `per_row` is the number of lists in a row, `unit` what a list holds, `among` a mask of the lists to check; `lists`
    says that other layouts take rows of any length.
    """
    differs = lengths != length
    wrong = np.flatnonzero(differs if among is None else differs & among)
    if not wrong.size:
        return
    rows = np.unique(wrong // per_row)
    inner = "" if per_row == 1 else "the lists of "
    hint = "every row of an input must have the same length: pad, truncate or filter"
    if spec.name == LABEL:
        hint = "every label must have the same length: pad, truncate or filter the rows before fit"
    elif lists and per_row == 1:
        hint += f", or fit with inputLayouts={{{spec.column!r}: 'padded'}} or 'jagged'"
    raise ColumnError(
        f"{inner}{counted(rows.size, 'row', 'rows')} of column {spec.column!r} "
        f"{'does' if rows.size == 1 and per_row == 1 else 'do'} not hold {length} {unit}; "
        f"the first of them has {int(lengths[wrong[0]])}",
        hint=hint,
        column=spec.column,
        row=first_row + int(rows[0]),
        code="ST-SHAPE",
    )


def _refuse(
    bad: npt.NDArray[np.bool_],
    spec: TensorSpec,
    name: str,
    what: str,
    hint: str,
    code: str,
    verbs: tuple[str, str] = ("is", "are"),
) -> None:
    """Refuses a column if `bad` marks any of its values; `what` says what these are."""
    count = int(bad.sum())
    if count:
        verb = verbs[0] if count == 1 else verbs[1]
        problem = f"{counted(count, name, name + 's')} in column {spec.column!r} {verb} {what}"
        raise ColumnError(problem, hint=hint, code=code, column=spec.column)


def _refuse_non_finite(values: npt.NDArray[Any], spec: TensorSpec) -> None:
    """Refuses numbers that became infinite as they were converted; `RowFilter` has seen the column before."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        _refuse(bad, spec, "row", "NaN or infinite", "drop or fill them before fit", "ST-NULL")


def check_labels(values: npt.NDArray[Any], columns: Columns) -> npt.NDArray[Any]:
    """Refuses labels that the loss leaves out, grades below 0, and numbers that are not finite.

    Where labels are classes, they must be whole numbers in `[0, classes)`, and are returned as int64.
    """
    spec = columns.label
    assert spec is not None
    _refuse_non_finite(values, spec)
    if columns.grades:
        hint = "labels are grades: 0 for rows that do not matter, and more for better ones"
        _refuse(values < 0, spec, "label", "negative", hint, "ST-LABEL-RANGE")
    if columns.classes is not None:
        bad = (values < 0) | (values >= columns.classes) | (values != np.floor(values))
        if bad.any():
            hint = (
                f"the module returns {columns.classes} scores a row: index the labels with StringIndexer, or give the "
                "module as many outputs as there are classes (numLabels, if it is a folder)"
            )
            if values.max() == columns.classes:
                hint += (
                    f"; subtract 1 from labels 1 ... {columns.classes}; handleInvalid='keep' of StringIndexer gives "
                )
                hint += f"unseen labels {columns.classes}: use 'skip'"
            if values.min() < 0:
                hint += "; leave rows out that have no class, or give them any and the weight 0 in weightCol"
            what = f"not among classes 0 ... {columns.classes - 1}, for example {values[bad][0]:g}"
            _refuse(bad, spec, "label", what, hint, "ST-LABEL-RANGE")
        values = values.astype(np.int64)
    if columns.ignored is not None and values.dtype.kind != "f" and len(values):
        # The loss would be divided by the number of the other labels in the global batch, which no rank knows.
        _refuse(
            (values == columns.ignored).reshape(len(values), -1).any(axis=1),
            spec,
            "row",
            f"{columns.ignored}, the ignore_index of the loss, and the mean over a batch would still be divided by "
            "their number",
            "filter them out, or give them another label and, by weightCol, the weight 0; of several labels in a row, "
            "let loss be a function that returns the mean of those that count, and weightCol their number",
            "ST-LABEL-RANGE",
            ("holds", "hold"),
        )
    return values


def check_weights(values: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """Returns sample weights, and refuses negative ones, and those that are not finite."""
    _refuse_non_finite(values, spec)
    _refuse(values < 0, spec, "weight", "negative", "weights must be zero or more", "ST-WEIGHT")
    return values
