"""Columns of Arrow as numbers and as indices of categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["FIRST_CATEGORY", "as_doubles", "category_indices"]

_UNKNOWN, _NULL = 0, 1
FIRST_CATEGORY = 2  # This is the index of the first category; the two before it are unknown and null.


def category_indices(column: pa.Array, categories: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns the index of each value's category: 0 for one that is not known, 1 for null, from 2 on those known."""
    positions = pc.index_in(column, value_set=pa.array(categories, column.type))
    from_two = pc.fill_null(pc.add(positions, FIRST_CATEGORY), _UNKNOWN)
    indices: npt.NDArray[Any] = pc.if_else(pc.is_null(column, nan_is_null=True), _NULL, from_two).to_numpy()
    return indices


def as_doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    """Returns numbers as float64, and dates and timestamps as seconds since 1970, in UTC; NaN for nulls."""
    if pa.types.is_temporal(column.type):
        column = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    # Whole numbers beyond 2**53 are rounded, as Spark rounds them when it casts them to double.
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values
