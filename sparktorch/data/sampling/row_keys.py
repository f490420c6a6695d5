"""Row keys: they identify the rows of a rank and define their positions; ranks digest the columns that keys lack."""

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
    """The keys of the rows in order of arrival, and which rows are held out for validation."""

    def __init__(self, storage: RowStorage, *, by_key: bool) -> None:
        """Starts without rows; without `by_key`, positions follow the order of arrival instead of the keys."""
        self._keys, self._marks = storage.spool(np.int64), storage.spool(np.bool_)
        self._by_key = by_key
        self._last = (False, 0)
        self._in_order = True
        self.count = self.held_out = self.fingerprint = 0

    def append(self, keys: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> None:
        """Appends the keys of a batch, and the mask of its rows held out for validation."""
        if not len(keys):
            return
        key = keys.view(np.uint64)
        self._in_order = self._in_order and self._follow(key, held_out)
        self._last = bool(held_out[-1]), int(key[-1])
        if self._by_key:
            self._keys.append(keys)
        self._marks.append(held_out)
        self.count += len(keys)
        self.held_out += int(held_out.sum())
        self.fingerprint = (self.fingerprint + int(key[~held_out].sum(dtype=np.uint64))) % 2**64

    def _follow(self, key: npt.NDArray[np.uint64], held_out: npt.NDArray[np.bool_]) -> bool:
        """Whether these rows are in the order of positions, and follow those before."""
        marks = np.concatenate([[self._last[0]], held_out])
        keys = np.concatenate([np.array([self._last[1]], np.uint64), key])
        later = marks[1:] > marks[:-1]
        same = marks[1:] == marks[:-1]
        if self._by_key:
            same &= keys[1:] >= keys[:-1]
        return bool((later | same).all())

    def orders(self) -> tuple[Numbers | range, Numbers | range]:
        """Returns the row numbers of the training and of the validation rows, in the order of their positions.

        They are ranges if the rows arrived in that order, otherwise int32, or int64 for 2^31 rows and more.
        """
        trained = self.count - self.held_out
        if self._in_order:
            return range(trained), range(trained, self.count)
        # Positions order the keys as unsigned integers, as `rank_of_key` does.
        order = np.arange(self.count)
        if self._by_key:
            order = argsort(self._keys.finish().view(np.uint64))
        order = order.astype(np.int32 if self.count < 1 << 31 else np.int64)
        marked = self._marks.finish()[order]
        return order[~marked], order[marked]


class RowDigests:
    """The 64-bit row digests of a batch; columns are added one by one.

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
        self,
        name: str,
        values: npt.NDArray[Any],
        positions: npt.NDArray[np.integer[Any]],
        lengths: npt.NDArray[np.int64],
    ) -> None:
        """Adds a column of sparse rows; explicit zeros do not change the digest.

        `values` are the elements of all rows, of shape `(elements, *shape)`, and `places` their positions in their
        rows.
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
    return mix_positions(np.uint64(mix_scalar(*name.encode())), positions)


def _words(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of each row as unsigned words of at most 32 bits, of shape `(rows, words)`."""
    rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
    return rows.view(np.uint32 if rows.dtype.itemsize >= 4 else f"u{rows.dtype.itemsize}")
