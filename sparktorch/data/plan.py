"""Content-addressed sampling: which row is trained at which step, as arithmetic.

Every row has a position `p` in `0 ... n - 1`, its rank among the row keys. The positions are cut
into `V = min(B, n)` strata of equal size, every global batch takes one row of each stratum, and the
step at which a position is trained is its place in a pseudo-random order of its stratum. All of it
depends on the keys, the seed, the epoch and the batch size, and on nothing else: any number of
ranks trains the same batches. `docs/sampling.md` explains and measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SamplingPlan", "mix", "rank_of_key"]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: UInt64) -> UInt64:
    """The splitmix64 finaliser, a bijection on 64-bit words.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        value: uint64 words of any shape.

    Returns:
        uint64 words of the same shape.
    """
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix_scalar(*words: int) -> int:
    """Folds integers into one 64-bit word."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = mix(state + np.uint64((word * _GOLDEN + _GOLDEN) & _MASK))
    return int(state[0])


def rank_of_key(key: Int64, world_size: int) -> Int64:
    """Returns the rank that holds each row: the key space cut into equal parts.

    The same expression is evaluated in the JVM when the rows are split.

    Args:
        key: int64 row keys of shape `(rows,)`, read as unsigned.
        world_size: Number of ranks.

    Returns:
        int64 ranks of shape `(rows,)`.
    """
    top = (key.view(np.uint64) >> np.uint64(33)).astype(np.int64)
    return (top * world_size) >> 31


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """The order of training, a pure function of four numbers and a flag.

    Attributes:
        rows: Number of training rows over all ranks, `n`.
        batch_size: Rows of a global batch, `B`.
        seed: Seed of the order.
        shuffle: Whether every epoch has its own order; otherwise batches follow the positions.
    """

    rows: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    @property
    def steps(self) -> int:
        """Number of steps in an epoch, the last one possibly smaller."""
        return -(-self.rows // self.batch_size)

    def rows_in(self, step: int) -> int:
        """Number of rows in the global batch of that step."""
        return min(self.batch_size, self.rows - step * self.batch_size)

    def steps_of(self, lo: int, hi: int, epoch: int) -> Int64:
        """Returns the step at which each of the positions `[lo, hi)` is trained in that epoch.

        Nothing but the arguments goes in, so that a rank computes its own part, the strata that
        it shares with its neighbours included, without asking anybody.

        Args:
            lo: First position.
            hi: One past the last position.
            epoch: Number of the epoch, from 0.

        Returns:
            int64 steps of shape `(hi - lo,)`.
        """
        if lo >= hi:
            return np.empty(0, np.int64)
        if not self.shuffle:
            return np.arange(lo, hi, dtype=np.int64) // self.batch_size
        # The strata turn by a seeded offset each epoch, so that no two rows are kept apart for ever.
        offset = _mix_scalar(self.seed, epoch, 1) % self.rows
        start, stop, n = lo + offset, hi + offset, self.rows
        pieces = ((min(start, n), min(stop, n)), (max(start, n) - n, max(stop, n) - n))
        return np.concatenate([self._steps_of_turned(a, b, epoch) for a, b in pieces if a < b])

    def _steps_of_turned(self, lo: int, hi: int, epoch: int) -> Int64:
        """`steps_of` in coordinates already turned by the epoch's offset, `0 <= lo < hi <= rows`."""
        n, strata = self.rows, min(self.batch_size, self.rows)
        first, last = lo * strata // n, (hi - 1) * strata // n
        begin, end = -(-first * n // strata), -(-(last + 1) * n // strata)
        position = np.arange(begin, end, dtype=np.int64)
        stratum = position * strata // n - first
        base = np.uint64(_mix_scalar(self.seed, epoch, 0))
        draw = mix(position.astype(np.uint64) * np.uint64(_GOLDEN) + base)
        # One sort by (stratum, draw): the stratum in the top bits, the draw in the rest. How many
        # bits depends on the plan alone and ties keep the order of their positions, so that every
        # rank breaks them alike.
        bits = np.uint64(max(1, (strata - 1).bit_length()))
        order = np.argsort((stratum.astype(np.uint64) << (np.uint64(64) - bits)) | (draw >> bits), kind="stable")
        starts = -(-(np.arange(first, last + 1, dtype=np.int64) * n) // strata) - begin
        step = np.empty(end - begin, np.int64)
        step[order] = np.arange(end - begin, dtype=np.int64) - starts[stratum]
        return step[lo - begin : hi - begin]
