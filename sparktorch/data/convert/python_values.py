"""Converts pandas columns and NumPy arrays to Arrow as Spark would send them, for models that score without Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.sql_types import NUMBERS, arrow_type
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.errors import ColumnError

__all__ = ["numbers_of", "unconverted"]


def numbers_of(values: Any, spec: TensorSpec, name: str, *, nulls: bool = False) -> pa.Array:
    """Converts numbers, or lists of them; refuses other shapes than in the fit.

    With `nulls`, a row is null if pandas counts it as missing, or if it contains `None`.
    """
    import pandas as pd  # not in executors, which may lack it

    rows = list(values) if nulls else []
    missing = np.array([_holds_none(row) or (np.ndim(row) == 0 and bool(pd.isna(row))) for row in rows], bool)
    if not missing.any():
        return _numbers_of(values, spec, name)
    there = [row for row, gone in zip(rows, missing, strict=True) if not gone]
    shape = () if spec.sources else spec.shape if not there else np.shape(there[0])
    blank = np.zeros((0, *spec.levels) if spec.ragged else shape, spec.dtype)
    filled = pd.Series([blank if gone else row for row, gone in zip(rows, missing, strict=True)], dtype=object)
    return _numbers_of(filled, spec, name).take(pa.array(np.arange(len(rows)), mask=missing))


def _holds_none(row: Any) -> bool:
    import pandas as pd

    if isinstance(row, list | tuple) or (isinstance(row, np.ndarray) and row.dtype == object):
        return any(map(_holds_none, row))
    return row is None or row is pd.NA


def _numbers_of(values: Any, spec: TensorSpec, name: str) -> pa.Array:
    try:
        if spec.ragged:
            rows = [_as(_dense(row), spec) for row in values]
            elements = np.concatenate(rows or [np.empty((0, *spec.levels), spec.dtype)])
            ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
            return pa.ListArray.from_arrays(pa.array(ends), to_arrow(elements))
        nested = getattr(values, "dtype", None) == np.dtype(object)
        stacked = np.stack([_dense(row) for row in values]) if nested else np.asarray(values)
    except ValueError as error:
        raise ColumnError(
            f"the rows of column {name!r} have different shapes: {error}", column=name, code="ST-SHAPE"
        ) from error
    shape, levels = ((), ()) if spec.sources else (spec.shape, spec.levels)
    if stacked.shape[1:] not in (shape, levels):
        raise ColumnError(
            f"column {name!r} has rows of shape {stacked.shape[1:]}, the model takes {shape}",
            column=name,
            code="ST-SHAPE",
        )
    return to_arrow(_as(stacked, spec).reshape(len(stacked), *levels))


def _dense(row: Any) -> npt.NDArray[Any]:
    """Returns a row as one array; Arrow hands nested lists over as arrays of arrays."""
    array = np.asarray(row)
    return (
        np.stack([_dense(inner) for inner in array]) if array.dtype == object and array.ndim and array.size else array
    )


def _as(values: npt.NDArray[Any], spec: TensorSpec) -> npt.NDArray[Any]:
    """Returns numbers as `spec.dtype`; for an integer dtype as they are: the scorer handles what it cannot hold."""
    # NumPy takes an empty list for floats, as which whole numbers beside it would be rounded.
    kept = np.dtype(spec.dtype).kind == "i" and values.dtype.kind in "iuf" and values.size
    return np.ascontiguousarray(values, dtype=values.dtype if kept else spec.dtype)


def unconverted(values: Any, spec: TensorSpec, name: str) -> pa.Array:
    """Converts values of any type, that of `spec.sql`; refuses others than in the fit."""
    import pandas as pd  # not in executors, which may lack it

    # The scorer converts numbers, also those that the type cannot hold.
    kind = None if spec.sql in NUMBERS else arrow_type(spec.sql)
    rows = list(values)
    try:
        if kind is not None and pa.types.is_temporal(kind) and any(isinstance(row, str) for row in rows):
            rows = list(pd.to_datetime(pd.Series(rows)))  # as JSON has them
        if kind is not None and pa.types.is_boolean(kind):
            return pa.array(pd.Series(rows).astype("boolean"), kind)  # pandas makes 0.0 and 1.0 beside nulls
        found = pa.array(rows, kind, from_pandas=True)
        if kind is None and (pa.types.is_string(found.type) or pa.types.is_large_string(found.type)):
            raise TypeError(f"it holds text, such as {next(row for row in rows if isinstance(row, str))!r}")
        return found
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ColumnError(
            f"column {name!r} is {spec.sql} in the model: {error}", column=name, code="ST-COLUMN-TYPE"
        ) from error
