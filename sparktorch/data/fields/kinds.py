"""The kinds of columns: a class for each kind says how it differs from the others in a rank and in scoring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time, timedelta, timezone, tzinfo
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.sql_types import NUMBERS, arrow_type, empty_value
from sparktorch.data.convert.tensors import as_lists, nulls_for_misfits, to_arrow
from sparktorch.data.convert.values import TIMES_HINT, fits_times, has_structs, has_times, values_as
from sparktorch.data.fields.arrow import ArrowColumn
from sparktorch.data.fields.base import Dense, Field, Ragged, Vectors
from sparktorch.data.fields.images import Images, black_image, image_size
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError

__all__ = ["KINDS", "ColumnKind", "kind_of"]

KINDS: dict[str, ColumnKind] = {}
_VECTOR_PARTS = {"size": pa.int32(), "indices": pa.list_(pa.int32())}
_IMAGE_PARTS = {"height": pa.int32(), "width": pa.int32(), "nChannels": pa.int32(), "data": pa.binary()}
_NUMERIC_TYPES = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_null,
)
_NO_NUMBERS = (str, bytes, date, time, timedelta, np.datetime64, np.timedelta64)


class ColumnKind(ABC):
    """A kind of column, by the name that specs and saved models have for it.

    The driver calls `sizes_of` for the first row; ranks call `field` and `digestible`; scoring calls `as_fitted`, after
    `of_value` or `of_values` where rows come from Python or pandas; input examples call `zeros`. `spark/frame/kinds.py`
    says which types of Spark become a kind, and by which expressions.

    Attributes:
        numeric: Whether rows are numbers, lists of numbers or vectors: a model fitted on one of them scores the others.
    """

    numeric: bool = False

    def __init_subclass__(cls, *, kind: str) -> None:
        """Adds a kind to `KINDS`."""
        KINDS[kind] = cls()

    @abstractmethod
    def field(self, spec: TensorSpec, storage: RowStorage) -> Field:
        """Returns an empty field, which stores a rank's rows and makes arguments of `forward` from them."""

    @abstractmethod
    def arrow(self, spec: TensorSpec) -> pa.DataType:
        """Returns the Arrow type of the rows; the rows of packed columns are lists."""

    @abstractmethod
    def zeros(self, spec: TensorSpec) -> Any:
        """Returns two rows as pandas has them, for input examples; for packed columns, two rows of one of them."""

    def sizes_of(self, value: Any, spec: TensorSpec) -> tuple[int, ...]:
        """Returns the length or size on each level of the column that a value, as Python has it, shows."""
        return _lengths(value, len(spec.levels))

    def digestible(self, spec: TensorSpec) -> bool:
        """Whether ranks can compute row digests from the column, because its rows are numbers of one shape."""
        return False

    def parts(self, spec: TensorSpec) -> Collection[Collection[str]]:
        """Returns sets of field names: a mapping that is a row has all names of one set. Empty without structs."""
        return ()

    def as_fitted(self, column: pa.Array, spec: TensorSpec) -> pa.Array:
        """Returns a column to score with the type of the column of the fit: SQL functions are called with any types."""
        return column

    def of_value(self, value: Any, spec: TensorSpec) -> pa.Array:
        """Returns a value of Python as an Arrow array of length one, as Spark would send it.

        Timestamps without a time zone are in the zone of this process, as Spark's rows have them.
        """
        return pa.array([value], self.arrow(spec))

    def of_values(
        self, values: Any, spec: TensorSpec, name: str, *, nulls: bool, zone: tzinfo | None = timezone.utc
    ) -> pa.Array:
        """Converts a pandas column or NumPy array to Arrow as Spark would send it; refuses values of another shape.

        `name` is the user's column, one of several for packed columns. With `nulls`, rows may be missing. Timestamps
        without a time zone are in `zone`; `None` stands for the zone of this process.
        """
        return pa.array(list(values), self.arrow(spec))


class _Numbers(ColumnKind, kind="number"):
    """Numbers and (nested) lists of them."""

    numeric = True

    def field(self, spec: TensorSpec, storage: RowStorage) -> Field:
        return Ragged(spec, storage) if spec.ragged else Dense(spec, storage)

    def arrow(self, spec: TensorSpec) -> pa.DataType:
        kind = pa.from_numpy_dtype(spec.dtype)
        for _ in spec.levels:
            kind = pa.list_(kind)
        return pa.list_(kind) if spec.ragged else kind

    def zeros(self, spec: TensorSpec) -> Any:
        shape = (1, *spec.levels) if spec.ragged else spec.shape
        if spec.sources:
            shape = ()
        zeros = np.zeros((2, *shape), spec.dtype)
        return zeros.tolist() if shape else zeros

    def sizes_of(self, value: Any, spec: TensorSpec) -> tuple[int, ...]:
        if spec.ragged:
            # The first level is that of the rows, whose lengths differ.
            return _lengths(value, 1 + len(spec.levels))[1:]
        return _lengths(value, len(spec.levels))

    def digestible(self, spec: TensorSpec) -> bool:
        return not spec.ragged

    def as_fitted(self, column: pa.Array, spec: TensorSpec) -> pa.Array:
        """Checks the column's type; numbers that the integer type cannot hold become null, as by Spark's `try_cast`."""
        kind = column.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        is_no_number = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_temporal(kind)
        is_flat = kind == column.type and not pa.types.is_struct(kind) and not pa.types.is_null(kind)
        if is_no_number or (is_flat and (spec.levels or spec.ragged)):
            raise ColumnError(
                f"column {spec.column!r} is {column.type}, but the model was fitted on {spec.describe()}",
                hint="an SQL function takes the input columns of the model, in their order",
                column=spec.column,
                code="ST-COLUMN-TYPE",
            )
        return nulls_for_misfits(column, spec.dtype)

    def of_value(self, value: Any, spec: TensorSpec) -> pa.Array:
        """Converts numbers, lists, and vectors as structs of size (`None` if dense), indices and values."""
        kind = self.arrow(spec)
        if isinstance(value, Mapping) and {"values", *_VECTOR_PARTS} <= set(value):
            parts = {name: pa.array([value[name]], part_type) for name, part_type in _VECTOR_PARTS.items()}
            parts["values"] = nulls_for_misfits(pa.array([value["values"]]), spec.dtype).cast(kind, safe=False)
            return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
        if spec.sources and not isinstance(value, Sequence):  # The value is of one of several packed columns.
            kind = kind.value_type
        # Arrow chooses a type from the value, and the cast does what Spark's cast does.
        return nulls_for_misfits(pa.array([value]), spec.dtype).cast(kind, safe=False)

    def of_values(
        self, values: Any, spec: TensorSpec, name: str, *, nulls: bool, zone: tzinfo | None = timezone.utc
    ) -> pa.Array:
        if not nulls:
            return _numbers_of(values, spec, name)
        import pandas as pd  # Executors, which may lack pandas, do not come here.

        rows = list(values)
        # A row is null if pandas counts it as missing, or if it contains `None`.
        is_null = np.array([_holds_none(row) or (np.ndim(row) == 0 and bool(pd.isna(row))) for row in rows], bool)
        if not is_null.any():
            return _numbers_of(values, spec, name)
        # Null rows are converted as zeros of the same shape, and made null afterwards.
        others = [row for row, null in zip(rows, is_null, strict=True) if not null]
        shape = np.shape(others[0]) if others else spec.shape
        if spec.sources:
            shape = ()
        zeros = np.zeros((0, *spec.levels) if spec.ragged else shape, spec.dtype)
        without_nulls = pd.Series(
            [zeros if null else row for row, null in zip(rows, is_null, strict=True)], dtype=object
        )
        return _numbers_of(without_nulls, spec, name).take(pa.array(np.arange(len(rows)), mask=is_null))


class _Vectors(_Numbers, kind="vector"):
    """ML vectors, dense or sparse."""

    def field(self, spec: TensorSpec, storage: RowStorage) -> Field:
        return Vectors(spec, storage)

    def sizes_of(self, value: Any, spec: TensorSpec) -> tuple[int, ...]:
        size = value["size"]
        return (len(value["values"]) if size is None else size,)


class _Bytes(ColumnKind, kind="binary"):
    """Bytes of numbers, and images: files, or the pixels of Spark's `image` source."""

    def field(self, spec: TensorSpec, storage: RowStorage) -> Field:
        return Images(spec, storage) if spec.layout == "image" else Dense(spec, storage)

    def arrow(self, spec: TensorSpec) -> pa.DataType:
        return pa.binary()

    def zeros(self, spec: TensorSpec) -> Any:
        size = spec.width * np.dtype(spec.dtype).itemsize
        return [black_image(spec) if spec.layout == "image" else bytes(size)] * 2

    def sizes_of(self, value: Any, spec: TensorSpec) -> tuple[int, ...]:
        """Returns the number of values in bytes; for images three channels, height and width."""
        if spec.layout != "image":
            return (len(value) // np.dtype(spec.dtype).itemsize,)
        size = (value["height"], value["width"]) if isinstance(value, dict) else image_size(value, spec)
        return 3, *size

    def parts(self, spec: TensorSpec) -> Collection[Collection[str]]:
        return (("content",), tuple(_IMAGE_PARTS)) if spec.layout == "image" else ()

    def of_value(self, value: Any, spec: TensorSpec) -> pa.Array:
        """Takes bytes, or a row of Spark's `binaryFile` or `image` source."""
        if isinstance(value, Mapping) and "content" in value:
            value = value["content"]
        if not isinstance(value, Mapping):
            return pa.array([None if value is None else bytes(value)], pa.binary())
        image = {name: value[name] for name in _IMAGE_PARTS} if value["data"] is not None else None
        return pa.array([image], pa.struct(list(_IMAGE_PARTS.items())))


class _Unconverted(ColumnKind, kind="any"):
    """Columns of any type, which a `preprocess` gets as they are; see `TensorSpec.sql`."""

    def field(self, spec: TensorSpec, storage: RowStorage) -> Field:
        return ArrowColumn(spec, storage)

    def arrow(self, spec: TensorSpec) -> pa.DataType:
        return arrow_type(spec.sql)

    def zeros(self, spec: TensorSpec) -> Any:
        kind = self.arrow(spec)
        if pa.types.is_primitive(kind):
            return np.zeros(2, "datetime64[us]" if pa.types.is_temporal(kind) else kind.to_pandas_dtype())
        return [empty_value(kind)] * 2

    def parts(self, spec: TensorSpec) -> Collection[Collection[str]]:
        kind = self.arrow(spec)
        return [(field.name,) for field in kind] if pa.types.is_struct(kind) else ()

    def as_fitted(self, column: pa.Array, spec: TensorSpec) -> pa.Array:
        """Converts numbers to the type of the fit; numbers that it cannot hold become null.

        A `ColumnError` refuses columns without times where the model was fitted on times.
        """
        kind, column_type = self.arrow(spec), column.type
        if has_times(kind) and not fits_times(column_type, kind):
            raise ColumnError(
                f"column {spec.column!r} is {column_type}, but the model was fitted on {spec.describe()}",
                hint=f"an SQL function takes it as cast(... as {spec.sql})",
                column=spec.column,
                code="ST-COLUMN-TYPE",
            )
        is_number = any(is_type(column_type) for is_type in _NUMERIC_TYPES)
        if kind == column_type or spec.sql not in NUMBERS or not is_number:
            return column
        return nulls_for_misfits(column, kind.to_pandas_dtype()).cast(kind, safe=False)

    def of_value(self, value: Any, spec: TensorSpec) -> pa.Array:
        if _needs_conversion(self.arrow(spec)):
            return _convert([value], spec, spec.column, None)
        return self.as_fitted(pa.array([value], None if spec.sql in NUMBERS else self.arrow(spec)), spec)

    def of_values(
        self, values: Any, spec: TensorSpec, name: str, *, nulls: bool, zone: tzinfo | None = timezone.utc
    ) -> pa.Array:
        import pandas as pd  # Executors, which may lack pandas, do not come here.

        if _needs_conversion(self.arrow(spec)):
            return _convert(values, spec, name, zone)
        # Numbers keep their type: the scorer converts them by `as_fitted`, with nulls for numbers that do not fit.
        kind = None if spec.sql in NUMBERS else arrow_type(spec.sql)
        rows = list(values)
        try:
            if kind is not None and pa.types.is_boolean(kind):
                # pandas has 0.0 and 1.0 where a column of booleans has nulls.
                return pa.array(pd.Series(rows).astype("boolean"), kind)
            array = pa.array(rows, kind, from_pandas=True)
            if kind is None and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
                raise TypeError(f"it holds text, such as {next(row for row in rows if isinstance(row, str))!r}")
            return array
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise ColumnError(
                f"column {name!r} is {spec.sql} in the model: {error}", column=name, code="ST-COLUMN-TYPE"
            ) from error


def _needs_conversion(kind: pa.DataType) -> bool:
    """Whether Arrow does not read values of a type in the forms in which users have them."""
    return has_times(kind) or has_structs(kind)


def _convert(values: Any, spec: TensorSpec, name: str, zone: tzinfo | None) -> pa.Array:
    """Converts values of a column that holds times or structs; a `ColumnError` refuses values of another type."""
    kind = arrow_type(spec.sql)
    try:
        return values_as(kind, values, zone)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        what = f"column {name!r} is {spec.sql} in the model: {error}"
        hint = TIMES_HINT if has_times(kind) else ""
        raise ColumnError(what, hint=hint, column=name, code="ST-COLUMN-TYPE") from error


def kind_of(spec: TensorSpec) -> ColumnKind:
    """Returns the kind of a column."""
    return KINDS[spec.kind]


def _lengths(value: Any, depth: int) -> tuple[int, ...]:
    """Returns the length of the first list on each level, as deep as there are lists, at most `depth`."""
    lengths = []
    for _ in range(depth):
        if not isinstance(value, list):
            break
        lengths.append(len(value))
        value = value[0] if value else None
    return tuple(lengths)


def _holds_none(row: Any) -> bool:
    """Whether a row is or holds `None` or pandas' `NA`."""
    import pandas as pd

    if isinstance(row, list | tuple) or (isinstance(row, np.ndarray) and row.dtype == object):
        return any(map(_holds_none, row))
    return row is None or row is pd.NA


def _numbers_of(values: Any, spec: TensorSpec, name: str) -> pa.Array:
    """Converts rows of numbers, or of lists of numbers, without nulls."""
    try:
        if spec.ragged:
            rows = [_with_dtype(_dense(row), spec) for row in values]
            elements = np.concatenate(rows or [np.empty((0, *spec.levels), spec.dtype)])
            return as_lists(to_arrow(elements), np.cumsum([0, *map(len, rows)]))
        if not len(values):  # Without rows, there need not be a dtype.
            return to_arrow(np.empty((0, *(() if spec.sources else spec.levels)), spec.dtype))
        nested = getattr(values, "dtype", None) == np.dtype(object)
        stacked = np.stack([_dense(row) for row in values]) if nested else np.asarray(values)
        numbers = _with_dtype(stacked, spec)
    except TypeError as error:
        raise ColumnError(
            f"column {name!r} holds no numbers: {error}",
            hint="convert it, such as by pd.to_numeric",
            column=name,
            code="ST-COLUMN-TYPE",
        ) from error
    except ValueError as error:
        raise ColumnError(
            f"the rows of column {name!r} have different shapes: {error}", column=name, code="ST-SHAPE"
        ) from error
    # Packed columns come one by one, as numbers.
    shape = () if spec.sources else spec.shape
    levels = () if spec.sources else spec.levels
    if stacked.shape[1:] not in (shape, levels):
        raise ColumnError(
            f"column {name!r} has rows of shape {stacked.shape[1:]}, the model takes {shape}",
            column=name,
            code="ST-SHAPE",
        )
    return to_arrow(numbers.reshape(len(stacked), *levels))


def _dense(row: Any) -> npt.NDArray[Any]:
    """Returns a row as one array; Arrow hands nested lists over as arrays of arrays."""
    array = np.asarray(row)
    if array.dtype == object and array.ndim and array.size:
        return np.stack([_dense(inner) for inner in array])
    return array


def _with_dtype(values: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """Returns numbers as `spec.dtype`; for an integer dtype unchanged, because the scorer converts them.

    A `TypeError` refuses text and times, which NumPy would convert.
    """
    if values.dtype.kind in "mMSU":
        raise TypeError(f"its values are {values.dtype}")
    if values.dtype == object:
        for value in values.flat:
            if isinstance(value, _NO_NUMBERS):
                raise TypeError(f"{value!r} is {type(value).__name__}")
    # An empty list becomes an array of floats in NumPy: next to it, the whole numbers of other rows would be rounded.
    stays = np.dtype(spec.dtype).kind == "i" and values.dtype.kind in "iuf" and values.size
    return np.ascontiguousarray(values, dtype=values.dtype if stays else spec.dtype)
