"""Converts columns of Arrow to numbers, and to indices of categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["FIRST_CATEGORY", "as_doubles", "category_indices"]

_UNKNOWN, _NULL = 0, 1
FIRST_CATEGORY = 2  # This is the index of the first category; the two before it stand for unknown and null.


def category_indices(column: pa.Array, categories: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns an index for each value: 0 for an unknown value, 1 for null, from 2 on for the categories in order."""
    order = pc.index_in(column, value_set=pa.array(categories, column.type))
    indices = pc.fill_null(pc.add(order, FIRST_CATEGORY), _UNKNOWN)
    with_nulls: npt.NDArray[Any] = pc.if_else(pc.is_null(column, nan_is_null=True), _NULL, indices).to_numpy()
    return with_nulls


def as_doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    """Returns numbers as float64, and dates and timestamps as seconds since 1970, in UTC; NaN for nulls."""
    if pa.types.is_temporal(column.type):
        column = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    # Whole numbers beyond 2**53 are rounded, as Spark rounds them when it casts them to double.
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values
