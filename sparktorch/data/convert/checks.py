"""Checks that rows can be trained on: nulls, NaN, infinity, list lengths, labels and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

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
    "complete_rows",
    "non_finite_mask",
    "null_mask",
    "refuse_lengths",
    "refuse_nulls",
]

Mask = npt.NDArray[np.bool_]
Problem = Literal["null", "infinite", "NaN or infinite"]

_SHOWN_ROWS = 3
_FLOATS = ("float16", "float32", "float64")


@dataclass
class _UnfitRows:
    """The rows of one column that have one problem: the user's name of the column, their count and the first rows."""

    column: str
    problem: Problem
    count: int = 0
    first_rows: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """Returns "column 'x' has 2 rows with null values; in the order in which they arrived: 1, 3"."""
        if self.problem == "null":
            what = f"column {self.column!r} has {counted(self.count, 'row', 'rows')} with null values"
        else:
            rows = f"of column {self.column!r}"
            what = counted(self.count, f"row {rows} is {self.problem}", f"rows {rows} are {self.problem}")
        more = ", ..." if self.count > len(self.first_rows) else ""
        return f"{what}; in the order in which they arrived: {', '.join(map(str, self.first_rows))}{more}"


class RowFilter:
    """Removes rows that cannot be trained on: `rows_of` for each batch, and at the end `raise_for_unfit_rows`.

    Attributes:
        dropped: Number of rows that were removed so far.
        last_mask: Which rows of the last batch were removed; `None` if none were.
    """

    def __init__(self, columns: Columns) -> None:
        """Sets the columns; their `drop_nulls` says whether unfit rows are no error."""
        self._columns = columns
        self._unfit_rows: dict[tuple[str, str, Problem], _UnfitRows] = {}
        self.dropped = 0
        self.last_mask: Mask | None = None

    def rows_of(self, batch: pa.RecordBatch, *, first_row: int) -> pa.RecordBatch:
        """Returns the rows of a batch that hold no null, NaN or infinity, nor a null in a column of `Columns.marks`.

        `first_row` is the row number of the batch's first row, for messages.
        """
        mask: Mask | None = None
        for spec in self._columns.tensors:
            values = batch.column(spec.name)
            for problem, unfit in _problems(values, spec):
                for column, rows in _by_source(values, spec, problem, np.flatnonzero(unfit)):
                    self._note(spec.name, column, problem, rows + first_row)
                mask = _union(mask, unfit)
        for encoded_name, column in self._columns.marks.items():
            nulls = _mark_nulls(batch.column(encoded_name))
            if nulls is not None:
                self._note(encoded_name, column, "null", np.flatnonzero(nulls) + first_row)
                mask = _union(mask, nulls)
        self.last_mask = mask
        if mask is None:
            return batch
        self.dropped += int(mask.sum())
        return batch.filter(pa.array(~mask))

    def renumber(self, error: ColumnError, *, first_row: int) -> ColumnError:
        """Returns an error about the batch that `rows_of` returned last, with a row number that counts removed rows."""
        where = dict(error.where)
        if self.last_mask is not None and "row" in where:
            where["row"] = first_row + int(np.flatnonzero(~self.last_mask)[where["row"] - first_row])
        return ColumnError(error.what, hint=error.hint, code=error.code, **where)

    def raise_for_unfit_rows(self, *, only_first_row: bool = False) -> None:
        """Raises a `ColumnError` about unfit rows, with count and first rows, unless `drop_nulls` is set.

        `only_first_row` says that the filter has seen no other row.
        """
        if self._columns.drop_nulls or not self._unfit_rows:
            return
        unfit = next(iter(self._unfit_rows.values()))
        if only_first_row:
            what = f"the first row holds {unfit.problem} values in column {unfit.column!r}, "
            what += "and others were not looked at yet"
        else:
            what = unfit.describe()
        hint = self._hint(unfit.column, unfit.problem)
        raise ColumnError(what, hint=hint, column=unfit.column, row=unfit.first_rows[0], code="ST-NULL")

    def _hint(self, column: str, problem: Problem) -> str:
        """Returns what the user can do about a column's unfit rows."""
        hint = "drop or replace them before fit, or set nullPolicy='drop'"
        spec = next((spec for spec in self._columns.tensors if column in (spec.column, *spec.sources)), None)
        if spec is None:  # It is a column of `Columns.marks`.
            return hint
        # Labels and weights are never filled, nor is infinity.
        if spec in self._columns.inputs and not spec.takes_nulls and _can_be_filled(spec):
            hint += " or 'fill'" if problem == "null" else " or, for NaN, 'fill'"
        if problem == "null":
            return hint + _null_hint(spec)
        if spec.as_it_is or spec.dtype not in _FLOATS:
            return hint
        return f"{hint}; beyond {np.finfo(spec.dtype).max:.2g} a number is infinite as {spec.dtype}"

    def _note(self, encoded_name: str, column: str, problem: Problem, rows: npt.NDArray[np.intp]) -> None:
        """Counts a column's unfit rows.

        The key has the encoded name, too: the user may name a column twice, and each of its rows counts once.
        """
        unfit = self._unfit_rows.setdefault((encoded_name, column, problem), _UnfitRows(column, problem))
        unfit.count += len(rows)
        unfit.first_rows += rows[: _SHOWN_ROWS - len(unfit.first_rows)].tolist()


def _problems(column: pa.Array, spec: TensorSpec) -> Iterator[tuple[Problem, Mask]]:
    """Yields each problem that some rows of a column have, and the mask of these rows."""
    nulls = None if spec.takes_nulls else null_mask(column, spec)
    if nulls is not None:
        yield "null", nulls
    non_finite = non_finite_mask(column, spec, nan=not spec.takes_nulls)
    if non_finite is not None:
        yield "infinite" if spec.takes_nulls else "NaN or infinite", non_finite


def _by_source(
    column: pa.Array, spec: TensorSpec, problem: Problem, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[str, npt.NDArray[np.intp]]]:
    """Yields each of the user's columns that has a problem in some of the rows, and the numbers of these rows.

    `rows` are the rows of the encoded column that have the problem. The encoded column is one column of the user's, or
    several that are packed.
    """
    packed_values = _checked_part(column, spec)
    # A packed row that is null as a whole does not say which of its columns is null.
    if not spec.sources or packed_values.null_count:
        yield spec.column, rows
        return
    values = packed_values.take(pa.array(rows)).flatten()
    marks = _mark_nulls(values) if problem == "null" else _mark_non_finite(values, nan=problem == "NaN or infinite")
    assert marks is not None
    # A dict, because the user may name a column twice.
    unfit_by_name = dict(zip(spec.sources, marks.reshape(-1, len(spec.sources)).T, strict=True))
    for name, unfit in unfit_by_name.items():
        if unfit.any():
            yield name, rows[unfit]


def complete_rows(
    columns: Sequence[pa.Array], specs: Sequence[TensorSpec], *, finite: bool = False
) -> pa.BooleanArray | None:
    """Returns the mask of rows without a null or, with `finite`, NaN or infinity in any column; `None` if it is all.

    Columns whose nulls are filled, or go to `preprocess`, are exempt, as they are in Spark's filter of such rows: the
    model takes what they hold, and infinity goes to the module.
    """
    mask: Mask | None = None
    for column, spec in zip(columns, specs, strict=True):
        if spec.takes_nulls:
            continue
        mask = _union(mask, null_mask(column, spec))
        if finite:
            mask = _union(mask, non_finite_mask(column, spec))
    return None if mask is None else pa.array(~mask)


def _union(first: Mask | None, second: Mask | None) -> Mask | None:
    """Returns the mask of rows in one of two masks; `None` has no rows."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def null_mask(column: pa.Array, spec: TensorSpec) -> Mask | None:
    """Returns the mask of rows that are or hold a null, at any depth of lists and structs; `None` if no row does."""
    return _mark_at_any_depth(_checked_part(column, spec), _mark_nulls)


def non_finite_mask(column: pa.Array, spec: TensorSpec, *, nan: bool = True) -> Mask | None:
    """Returns the mask of rows that are or hold infinity or, with `nan`, NaN; `None` if no row does."""
    array = _checked_part(column, spec)
    if spec.layout == "raw" and np.dtype(spec.dtype).kind == "f":
        array = _lists_of_numbers(array, np.dtype(spec.dtype))
    return _mark_at_any_depth(array, partial(_mark_non_finite, nan=nan))


def _can_be_filled(spec: TensorSpec) -> bool:
    """Whether `nullPolicy` "fill" has a value for a column: not for text, times and lists that `preprocess` gets."""
    return not spec.as_it_is or spec.sql in (*NUMBERS, "boolean")


def _null_hint(spec: TensorSpec) -> str:
    """Returns the part of a hint that says which other values of a column count as null."""
    if spec.layout != "raw" and np.dtype(spec.dtype).kind == "i":
        return f"; what {spec.dtype} cannot hold, as NaN in a column of floats, counts as null"
    return ""


def _checked_part(column: pa.Array, spec: TensorSpec) -> pa.Array:
    """Returns the part of a column to check: the data of images, or the values of vectors, whose size may be null."""
    if pa.types.is_struct(column.type) and not spec.as_it_is:
        # The type decides, and not the spec: scoring accepts vectors where arrays were fitted.
        is_vector = column.type.get_field_index("values") >= 0
        # Unlike `column.field`, `struct_field` is null where the struct is.
        return pc.struct_field(column, "values" if is_vector else "data")
    return column


def _lists_of_numbers(column: pa.Array, dtype: np.dtype[Any]) -> pa.Array:
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


def _mark_nulls(array: pa.Array) -> Mask | None:
    """Returns the mask of nulls; `None` if there are none."""
    nulls: Mask | None = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return nulls


def _mark_non_finite(array: pa.Array, *, nan: bool) -> Mask | None:
    """Returns the mask of infinite numbers and, with `nan`, of NaN; `None` if there are none."""
    if not pa.types.is_floating(array.type):
        return None
    numbers = array.to_numpy(zero_copy_only=False)  # Nulls become NaN.
    finite = np.isfinite(numbers)
    if finite.all():
        return None
    marks: Mask = ~finite & array.is_valid().to_numpy(zero_copy_only=False) if nan else np.isinf(numbers)
    return marks if marks.any() else None


def _mark_at_any_depth(array: pa.Array, mark: Callable[[pa.Array], Mask | None]) -> Mask | None:
    """Returns the mask of values that `mark` marks, or that hold such a value in lists and structs; `None` if none."""
    marks = mark(array)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    parts: Iterable[pa.Array] = ()
    if is_list:
        parts = [array.flatten()]
    elif pa.types.is_struct(array.type):
        parts = array.flatten()
    for part in parts:
        part_marks = _mark_at_any_depth(part, mark)
        if part_marks is None:
            continue
        # The mask may share the memory of an Arrow array, which is read-only.
        marks = np.zeros(len(array), np.bool_) if marks is None else marks.copy()
        if is_list:
            marks[pc.list_parent_indices(array).to_numpy()[part_marks]] = True
        else:
            marks[part_marks] = True
    return marks


def refuse_nulls(column: pa.Array, spec: TensorSpec, *, first_row: int = 0) -> None:
    """Refuses rows that are or hold a null, unless the column may have nulls.

    `first_row` is the row number of the first row, for messages.
    """
    nulls = None if spec.takes_nulls else null_mask(column, spec)
    if nulls is None:
        return
    name, rows = next(_by_source(column, spec, "null", np.flatnonzero(nulls)))
    raise ColumnError(
        f"column {name!r} has {counted(len(rows), 'row', 'rows')} with null values",
        hint="drop or fill them, set handleInvalid='skip' or 'keep'"
        + (", or fit with nullPolicy='fill'" if _can_be_filled(spec) else "")
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
    among: Mask | None = None,
    suggests_padding: bool = True,
) -> None:
    """Refuses lists that do not hold `length` values.

    Args:
        lengths: Number of values in each list.
        spec: The column.
        length: The number of values that each list must hold.
        first_row: The row number of the first row, for messages.
        per_row: Number of lists in a row.
        unit: What a list holds, for messages.
        among: Mask of the lists to check; `None` for all.
        suggests_padding: Whether the hint names the layouts that take rows of any length.
    """
    differs = lengths != length
    wrong_lists = np.flatnonzero(differs if among is None else differs & among)
    if not wrong_lists.size:
        return
    rows = np.unique(wrong_lists // per_row)
    inner = "" if per_row == 1 else "the lists of "
    hint = "every row of an input must have the same length: pad, truncate or filter"
    if spec.name == LABEL:
        hint = "every label must have the same length: pad, truncate or filter the rows before fit"
    elif suggests_padding and per_row == 1:
        hint += f", or fit with inputLayouts={{{spec.column!r}: 'padded'}} or 'jagged'"
    raise ColumnError(
        f"{inner}{counted(rows.size, 'row', 'rows')} of column {spec.column!r} "
        f"{'does' if rows.size == 1 and per_row == 1 else 'do'} not hold {length} {unit}; "
        f"the first of them has {int(lengths[wrong_lists[0]])}",
        hint=hint,
        column=spec.column,
        row=first_row + int(rows[0]),
        code="ST-SHAPE",
    )


def _refuse(
    unfit: Mask,
    spec: TensorSpec,
    *,
    subject: str,
    problem: str,
    hint: str,
    code: str,
    verbs: tuple[str, str] = ("is", "are"),
) -> None:
    """Refuses a column if `unfit` marks any of its values: "2 labels in column 'y' are negative".

    `subject` is what one of the values is, `verbs` the singular and the plural of the verb between it and `problem`.
    """
    count = int(unfit.sum())
    if count:
        verb = verbs[0] if count == 1 else verbs[1]
        what = f"{counted(count, subject, subject + 's')} in column {spec.column!r} {verb} {problem}"
        raise ColumnError(what, hint=hint, code=code, column=spec.column)


def _refuse_overflow(values: npt.NDArray[Any], spec: TensorSpec) -> None:
    """Refuses numbers that became infinite when they were converted; `RowFilter` has refused infinity before that."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        _refuse(
            ~np.isfinite(values.reshape(len(values), -1)).all(axis=1),
            spec,
            subject="row",
            problem=f"too large for {values.dtype}",
            hint=f"scale the numbers before fit: {values.dtype} holds up to {np.finfo(values.dtype).max:.2g}",
            code="ST-NULL",
        )


def check_labels(values: npt.NDArray[Any], columns: Columns) -> npt.NDArray[Any]:
    """Refuses labels that the loss leaves out, grades below 0, and numbers that are too large for their dtype.

    Where labels are classes, they must be whole numbers in `[0, classes)`, and are returned as int64.
    """
    spec = columns.label
    assert spec is not None
    _refuse_overflow(values, spec)
    if columns.grades:
        hint = "labels are grades: 0 for rows that do not matter, and more for better ones"
        _refuse(values < 0, spec, subject="label", problem="negative", hint=hint, code="ST-LABEL-RANGE")
    if columns.classes is not None:
        unfit = (values < 0) | (values >= columns.classes) | (values != np.floor(values))
        if unfit.any():
            _refuse(
                unfit,
                spec,
                subject="label",
                problem=f"not among classes 0 ... {columns.classes - 1}, for example {values[unfit][0]:g}",
                hint=_hint_for_classes(values, columns.classes),
                code="ST-LABEL-RANGE",
            )
        values = values.astype(np.int64)
    if columns.ignored is not None and values.dtype.kind != "f" and len(values):
        # The loss would be divided by the number of the other labels in the global batch, which no rank knows.
        _refuse(
            (values == columns.ignored).reshape(len(values), -1).any(axis=1),
            spec,
            subject="row",
            verbs=("holds", "hold"),
            problem=f"{columns.ignored}, the ignore_index of the loss, and the mean over a batch would still be "
            "divided by their number",
            hint="filter them out, or give them another label and, by weightCol, the weight 0; of several labels in a "
            "row, let loss be a function that returns the mean of those that count, and weightCol their number",
            code="ST-LABEL-RANGE",
        )
    return values


def _hint_for_classes(labels: npt.NDArray[Any], classes: int) -> str:
    """Returns what the user can do about labels that are no classes, by what the labels look like."""
    hint = (
        f"the module returns {classes} scores a row: index the labels with StringIndexer, or give the module as many "
        "outputs as there are classes (numLabels, if it is a folder)"
    )
    if labels.max() == classes:
        hint += f"; subtract 1 from labels 1 ... {classes}; handleInvalid='keep' of StringIndexer gives "
        hint += f"unseen labels {classes}: use 'skip'"
    if labels.min() < 0:
        hint += "; leave rows out that have no class, or give them any and the weight 0 in weightCol"
    return hint


def check_weights(values: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """Returns sample weights; refuses negative ones, and numbers that are too large for their dtype."""
    _refuse_overflow(values, spec)
    hint = "weights must be zero or more"
    _refuse(values < 0, spec, subject="weight", problem="negative", hint=hint, code="ST-WEIGHT")
    return values
