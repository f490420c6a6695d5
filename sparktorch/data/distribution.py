"""The distribution of a column of numbers, in a size that does not grow with the rows, however these are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_VALUES", "DistinctValues", "Distribution"]

# So many distinct values of a column are kept at most; quantiles of so many are 2 % off in rank.
MOST_VALUES = 512
_NO_VALUES = np.empty(0, np.float64)
_NO_COUNTS = np.empty(0, np.int64)


class DistinctValues:
    """The distinct values of a column with their counts, or `most` of them if there are more.

    Those of the smallest hashes are kept: a value that is among these for all rows is among these for any part of the
    rows, too. So the counts are those of all rows, and the choice does not depend on how the rows are divided.

    Attributes:
        values: Ascending by hash, float64.
        counts: The number of rows of each, int64.
        hashes: Their hashes, which are not negative, int64.
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        """Begins without values; `most` is the number that it keeps."""
        self._most = most
        self.values, self.counts, self.hashes = _NO_VALUES, _NO_COUNTS, _NO_COUNTS

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds finite values of further rows."""
        values, counts = np.unique(values + 0.0, return_counts=True)  # Adding 0.0 makes -0.0 the same value as 0.0.
        hashes = _hashes(values)
        if len(values) > self._most:
            chosen = np.sort(np.argpartition(hashes, self._most)[: self._most])
            values, counts, hashes = values[chosen], counts[chosen], hashes[chosen]
        values, inverse = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate([self.counts, counts]), len(values)).astype(np.int64)
        hashes = _hashes(values)
        chosen = np.argsort(hashes, kind="stable")[: self._most]
        self.values, self.counts, self.hashes = values[chosen], counts[chosen], hashes[chosen]


@dataclass(frozen=True)
class Distribution:
    """Distinct values, ascending, with their weights, which say how often values occur.

    Of a column with more distinct values than are kept, all weights are the same: its frequent values need not be among
    these, and would outweigh the others if they are.

    Attributes:
        values: The distinct values, finite and ascending.
        weights: The number of rows that have each, or 1 of each where values were left out.
        whole: Whether these are all of the column's values.
    """

    values: tuple[float, ...] = ()
    weights: tuple[int, ...] = ()
    whole: bool = True

    @classmethod
    def of(cls, counts: Mapping[float, int], *, whole: bool = True) -> Distribution:
        """Returns that of the values of a column by their counts; `whole` if `DistinctValues` has left none out."""
        values = tuple(sorted(counts))
        return cls(values, tuple(counts[value] if whole else 1 for value in values), whole)

    def quantiles(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns the smallest value up to which there are at least those shares of the weights."""
        cumulated = np.cumsum(self.weights)
        # The factor keeps a share that is reached exactly from being missed by rounding.
        positions = np.searchsorted(cumulated, shares * cumulated[-1] * (1 - 1e-12))
        values: npt.NDArray[np.float64] = np.array(self.values)[positions]
        return values

    def centre_and_scale(self, deviation: float) -> tuple[float, float]:
        """Returns the median, and the distance of the quartiles; if these are equal, the standard deviation."""
        if not self.values:
            return 0.0, 0.0
        lower, median, upper = self.quantiles(np.array([0.25, 0.5, 0.75])).tolist()
        return median, (upper - lower) if upper > lower else deviation

    def edges(self, bins: int) -> npt.NDArray[np.float64]:
        """Returns the ascending edges of at most so many bins: the values themselves if they are no more than these.

        Half of the edges divide the rows evenly, half of them the distinct values: bins by rows alone would leave one
        to all the values of a column that is mostly zero.
        """
        if len(self.values) <= bins + 1:
            return np.array(self.values)
        by_rows = self.quantiles(np.linspace(0.0, 1.0, bins // 2 + 1))
        distinct = Distribution(self.values, (1,) * len(self.values))
        by_values = distinct.quantiles(np.linspace(0.0, 1.0, bins - bins // 2 + 1))
        return np.unique(np.concatenate([by_rows, by_values]))


def _hashes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Returns hashes of values, of 63 bits, by the finaliser of SplitMix64."""
    bits = values.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
