"""The distribution of a column of numbers, in a size that does not grow with the rows, however these are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_VALUES", "DistinctValues", "Distribution"]

# At most this number of distinct values is kept for a column; their quantiles are 2 % off in rank.
MOST_VALUES = 512
_NO_VALUES = np.empty(0, np.float64)
_NO_COUNTS = np.empty(0, np.int64)


class DistinctValues:
    """The distinct values of a column with their counts, or `most` of them if there are more.

    The values with the smallest hashes are kept. A value whose hash is among the smallest for all rows is among the
    smallest for any part of the rows, too. So a kept value was never left out before, its count covers all rows, and
    the choice of values does not depend on how the rows are divided.

    Attributes:
        values: The values, ascending by hash, float64.
        counts: Number of rows with each value, int64.
        hashes: The hash of each value, which is not negative, int64.
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        """Begins without values; `most` is the largest number of values to keep."""
        self._most = most
        self.values = _NO_VALUES
        self.counts = _NO_COUNTS
        self.hashes = _NO_COUNTS

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds finite values of further rows."""
        values, counts = np.unique(values + 0.0, return_counts=True)  # Adding 0.0 makes -0.0 the same value as 0.0.
        hashes = _hashes(values)
        if len(values) > self._most:
            smallest = np.sort(np.argpartition(hashes, self._most)[: self._most])
            values = values[smallest]
            counts = counts[smallest]
        values, inverse = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self.counts, counts]), len(values)).astype(np.int64)
        hashes = _hashes(values)
        smallest = np.argsort(hashes, kind="stable")[: self._most]
        self.values = values[smallest]
        self.counts = counts[smallest]
        self.hashes = hashes[smallest]


@dataclass(frozen=True)
class Distribution:
    """Distinct values of a column, with their weights, which say how often values occur.

    If values were left out, all weights are the same: the frequent values of the column need not be among the kept
    ones, and would outweigh the others if they are.

    Attributes:
        values: The distinct values, finite and ascending.
        weights: Number of rows with each value, or 1 for each value if some were left out.
        whole: Whether no value of the column was left out.
    """

    values: tuple[float, ...] = ()
    weights: tuple[int, ...] = ()
    whole: bool = True

    @classmethod
    def of(cls, counts: Mapping[float, int], *, whole: bool = True) -> Distribution:
        """Returns the distribution of the values of a column, from the number of rows with each value.

        `whole` says that `DistinctValues` has left no value out.
        """
        values = tuple(sorted(counts))
        return cls(values, tuple(counts[value] if whole else 1 for value in values), whole)

    def quantiles(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns for each share the smallest value up to which there is at least this share of the weights."""
        cumulated = np.cumsum(self.weights)
        # The factor keeps a share that is reached exactly from being missed by rounding.
        positions = np.searchsorted(cumulated, shares * cumulated[-1] * (1 - 1e-12))
        values: npt.NDArray[np.float64] = np.array(self.values)[positions]
        return values

    def centre_and_scale(self, deviation: float) -> tuple[float, float]:
        """Returns the median, and the distance between the quartiles.

        If the quartiles are equal, the standard deviation `deviation` stands for their distance. Both are 0 without
        values.
        """
        if not self.values:
            return 0.0, 0.0
        lower, median, upper = self.quantiles(np.array([0.25, 0.5, 0.75])).tolist()
        return median, upper - lower if upper > lower else deviation

    def edges(self, bins: int) -> npt.NDArray[np.float64]:
        """Returns the ascending edges of at most `bins` bins; the values themselves if there are few enough.

        Half of the edges divide the rows evenly, the other half the distinct values. Edges that divide the rows alone
        would put all values of a column that is mostly zero into one bin.
        """
        if len(self.values) <= bins + 1:
            return np.array(self.values)
        by_rows = self.quantiles(np.linspace(0.0, 1.0, bins // 2 + 1))
        distinct = Distribution(self.values, (1,) * len(self.values))
        by_values = distinct.quantiles(np.linspace(0.0, 1.0, bins - bins // 2 + 1))
        return np.unique(np.concatenate([by_rows, by_values]))


def _hashes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Returns a hash of 63 bits for each value, by the finaliser of SplitMix64."""
    bits = values.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
