"""A 64-bit digest of each row, made of its tensors, where the JVM has made no key of its contents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparktorch.data.sampling.plan import mix, mix_places, mix_scalar

__all__ = ["RowDigests"]

UInt64 = npt.NDArray[np.uint64]


class RowDigests:
    """The digests of the rows of a batch, to which every column adds.

    A column adds the sum of its 32-bit words, each times a 64-bit weight of its own, modulo 2^64. Two rows that
    differ have the same sum for one choice of weights in 2^32 or fewer.

    Source: Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57 (2014).
    """

    def __init__(self, keys: UInt64) -> None:
        """Begins with what stands for the columns that are not added, of shape `(rows,)`."""
        self._sums = keys.copy()

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        """Adds a column of numbers.

        Args:
            name: The column's, on which the weights depend.
            values: Of shape `(rows, *shape)`.
        """
        words = _words(values)
        weights = _weights(name, np.arange(words.shape[1]))
        self._sums += np.einsum("ij,j->i", words, weights, dtype=np.uint64, casting="unsafe")

    def add_elements(
        self, name: str, values: npt.NDArray[Any], places: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int64]
    ) -> None:
        """Adds a column of rows that hold some elements each; zeros count as if they were not there.

        Args:
            name: The column's, on which the weights depend.
            values: The elements of all rows, of shape `(elements, *shape)`.
            places: The place of each element in its row.
            lengths: Number of elements of each row.
        """
        words = _words(values)
        count = words.shape[1]
        weights = _weights(name, places[:, None] * count + np.arange(count))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((words * weights).sum(axis=1, dtype=np.uint64))])
        ends = np.cumsum(lengths)
        self._sums += sums[ends] - sums[ends - lengths]

    def finish(self) -> npt.NDArray[np.int64]:
        """Returns the digests, of shape `(rows,)`."""
        return mix(self._sums).view(np.int64)


def _weights(name: str, places: npt.NDArray[np.integer[Any]]) -> UInt64:
    return mix_places(np.uint64(mix_scalar(*name.encode())), places)


def _words(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of each row as unsigned words of 32 bits, or fewer, of shape `(rows, words)`."""
    rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
    return rows.view(np.uint32 if rows.dtype.itemsize >= 4 else f"u{rows.dtype.itemsize}")
