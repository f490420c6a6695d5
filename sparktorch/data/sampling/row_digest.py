"""64-bit row digests, computed by the ranks for the columns that the row key does not cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparktorch.data.sampling.plan import mix, mix_places, mix_scalar

__all__ = ["RowDigests"]

UInt64 = npt.NDArray[np.uint64]


class RowDigests:
    """The row digests of a batch; columns are added one by one.

    A column adds the sum of its 32-bit words, each multiplied by a 64-bit weight of its position, modulo 2^64. Two
    different rows have the same sum for at most one in 2^32 choices of weights.

    Source: Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57 (2014).
    """

    def __init__(self, keys: UInt64) -> None:
        """Starts from keys that cover the columns that are not added, uint64 of shape `(rows,)`."""
        self._sums = keys.copy()

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        """Adds a column of numbers, of shape `(rows, *shape)`; its name determines the weights."""
        words = _words(values)
        weights = _weights(name, np.arange(words.shape[1]))
        self._sums += np.einsum("ij,j->i", words, weights, dtype=np.uint64, casting="unsafe")

    def add_elements(
        self, name: str, values: npt.NDArray[Any], places: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.int64]
    ) -> None:
        """Adds a column of sparse rows; explicit zeros do not change the digest.

        `values` are the elements of all rows, of shape `(elements, *shape)`, and `places` their positions in their
        rows.
        """
        words = _words(values)
        count = words.shape[1]
        weights = _weights(name, places[:, None] * count + np.arange(count))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((words * weights).sum(axis=1, dtype=np.uint64))])
        ends = np.cumsum(lengths)
        self._sums += sums[ends] - sums[ends - lengths]

    def finish(self) -> npt.NDArray[np.int64]:
        """Returns the digests, int64 of shape `(rows,)`."""
        return mix(self._sums).view(np.int64)


def _weights(name: str, places: npt.NDArray[np.integer[Any]]) -> UInt64:
    return mix_places(np.uint64(mix_scalar(*name.encode())), places)


def _words(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of each row as unsigned words of at most 32 bits, of shape `(rows, words)`."""
    rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
    return rows.view(np.uint32 if rows.dtype.itemsize >= 4 else f"u{rows.dtype.itemsize}")
