"""Row keys, which identify the rows of a rank and define their positions, and digests of columns that keys lack."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sparktorch.data.sampling.plan import Numbers, argsort, mix, mix_positions, mix_scalar
from sparktorch.data.storage import RowStorage

__all__ = ["RowDigests", "RowKeys"]

UInt64 = npt.NDArray[np.uint64]


class RowKeys:
    """The keys of the rows in order of arrival, and which rows are held out for validation.

    Attributes:
        count: Number of rows.
        held_out: Number of rows held out for validation.
        fingerprint: Sum of the keys of the training rows, modulo 2**64.
    """

    def __init__(self, storage: RowStorage, *, by_key: bool) -> None:
        """Starts without rows; without `by_key`, positions follow the order of arrival instead of the keys."""
        self._keys = storage.spool(np.int64)
        self._marks = storage.spool(np.bool_)
        self._by_key = by_key
        self._last = (False, 0)  # The mark and the key of the last row.
        self._in_order = True
        self.count = 0
        self.held_out = 0
        self.fingerprint = 0

    def append(self, keys: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> None:
        """Appends the keys of a batch, and the mask of its rows held out for validation."""
        if not len(keys):
            return
        key = keys.view(np.uint64)
        self._in_order = self._in_order and self._continues_order(key, held_out)
        self._last = bool(held_out[-1]), int(key[-1])
        if self._by_key:
            self._keys.append(keys)
        self._marks.append(held_out)
        self.count += len(keys)
        self.held_out += int(held_out.sum())
        self.fingerprint = (self.fingerprint + int(key[~held_out].sum(dtype=np.uint64))) % 2**64

    def _continues_order(self, key: npt.NDArray[np.uint64], held_out: npt.NDArray[np.bool_]) -> bool:
        """Whether rows are in the order of positions, and come after the rows that were appended before."""
        last_mark, last_key = self._last
        marks = np.concatenate([[last_mark], held_out])
        keys = np.concatenate([np.array([last_key], np.uint64), key])
        later = marks[1:] > marks[:-1]
        same = marks[1:] == marks[:-1]
        if self._by_key:
            same &= keys[1:] >= keys[:-1]
        return bool((later | same).all())

    def orders(self) -> tuple[Numbers | range, Numbers | range]:
        """Returns the row numbers of the training and of the validation rows, in the order of their positions.

        They are ranges if the rows arrived in that order, otherwise int32, or int64 for 2^31 rows and more.
        """
        training_rows = self.count - self.held_out
        if self._in_order:
            return range(training_rows), range(training_rows, self.count)
        # Positions order the keys as unsigned integers, as `rank_of_key` does.
        order = np.arange(self.count)
        if self._by_key:
            order = argsort(self._keys.finish().view(np.uint64))
        order = order.astype(np.int32 if self.count < 1 << 31 else np.int64)
        marked = self._marks.finish()[order]
        return order[~marked], order[marked]


class RowDigests:
    """The 64-bit row digests of a batch; columns are added one by one.

    A column adds the sum of its 32-bit words, each multiplied by a 64-bit weight for its position, modulo 2^64. Two
    different rows have the same sum for at most one in 2^32 choices of weights.

    Source: Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal 57 (2014).
    """

    def __init__(self, keys: UInt64) -> None:
        """Starts with keys, uint64 of shape `(rows,)`, which cover the columns that will not be added."""
        self._sums = keys.copy()

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        """Adds a column of numbers, of shape `(rows, *shape)`; the name of the column determines the weights."""
        words = _words(values)
        weights = _weights(name, np.arange(words.shape[1]))
        self._sums += np.einsum("ij,j->i", words, weights, dtype=np.uint64, casting="unsafe")

    def add_elements(
        self,
        name: str,
        values: npt.NDArray[Any],
        positions: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        """Adds a column of sparse rows; explicit zeros do not change the digest.

        Args:
            name: Name of the column, which determines the weights.
            values: The elements of all rows, of shape `(elements, *shape)`.
            positions: The position of each element in its row.
            lengths: Number of elements in each row.
        """
        words = _words(values)
        count = words.shape[1]
        weights = _weights(name, positions[:, None] * count + np.arange(count))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((words * weights).sum(axis=1, dtype=np.uint64))])
        ends = np.cumsum(lengths)
        self._sums += sums[ends] - sums[ends - lengths]

    def finish(self) -> npt.NDArray[np.int64]:
        """Returns the digests, int64 of shape `(rows,)`."""
        return mix(self._sums).view(np.int64)


def _weights(name: str, positions: npt.NDArray[np.integer[Any]]) -> UInt64:
    """Returns the weights of words by their positions in a row."""
    return mix_positions(np.uint64(mix_scalar(*name.encode())), positions)


def _words(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of each row as unsigned words of at most 32 bits, of shape `(rows, words)`."""
    rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
    return rows.view(np.uint32 if rows.dtype.itemsize >= 4 else f"u{rows.dtype.itemsize}")
