"""Which fold of a cross-validation each row of a rank is in, and the values that evaluators need of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.data.columns import FOLD
from sparktorch.data.sampling.plan import Numbers

__all__ = ["Folds"]

Array = npt.NDArray[Any]


class Folds:
    """The folds of a rank's rows, in order of arrival.

    Attributes:
        counts: For each fold, its training rows, validation rows, and the sum of its training rows' keys modulo 2**64.
        nulls: Number of nulls in the carried columns.
    """

    def __init__(self, carried: Sequence[str]) -> None:
        """Starts without rows; `carried` names the columns to keep for evaluators."""
        self._folds: list[Array] = []
        self._carried: dict[str, list[Array]] = {name: [] for name in carried}
        self.counts: dict[int, tuple[int, int, int]] = {}
        self.nulls = 0

    def append(self, rows: pa.RecordBatch, keys: npt.NDArray[np.int64], held_out: npt.NDArray[np.bool_]) -> None:
        """Appends the folds of a batch, from its int column; `held_out` are its rows that are marked for validation."""
        folds = np.array(rows.column(FOLD))  # a copy: it does not keep the batch
        self._folds.append(folds)
        for name, parts in self._carried.items():
            self.nulls += rows.column(name).null_count
            parts.append(np.array(rows.column(name), np.float64))
        for fold in np.unique(folds).tolist():
            inside = folds == fold
            trained = inside & ~held_out
            count, marked, total = self.counts.get(fold, (0, 0, 0))
            total = (total + int(keys.view(np.uint64)[trained].sum(dtype=np.uint64))) % 2**64
            self.counts[fold] = (count + int(trained.sum()), marked + int((inside & held_out).sum()), total)

    def without(self, order: Numbers | range, fold: int) -> Numbers:
        """Returns the row numbers of an order that are not in a fold."""
        numbers = np.arange(order.start, order.stop) if isinstance(order, range) else order
        found: Numbers = numbers[self._all[numbers] != fold]
        return found

    def members(self, fold: int) -> npt.NDArray[np.int64]:
        """Returns the row numbers of a fold, validation rows included, in order of arrival."""
        return np.flatnonzero(self._all == fold).astype(np.int64)

    def last_without(self, fold: int) -> int | None:
        """Returns the last row number that is not in a fold."""
        others = np.flatnonzero(self._all != fold)
        return int(others[-1]) if len(others) else None

    def carried(self, fold: int) -> dict[str, Array]:
        """Returns the values of the carried columns in a fold, in the order of `members`."""
        index = self.members(fold)
        return {name: _joined(parts, np.float64)[index] for name, parts in self._carried.items()}

    @property
    def _all(self) -> Array:
        if len(self._folds) != 1:
            self._folds = [_joined(self._folds, np.int32)]
        return self._folds[0]


def _joined(parts: Sequence[Array], kind: Any) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, kind)
