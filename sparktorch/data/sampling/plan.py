"""Content-addressed sampling: which row is trained at which step, as arithmetic.

Every row has a position `p` in `0 ... n - 1`, its rank among the row keys. The positions are cut
into `V = min(B, n)` strata of equal size, every global batch takes one row of each stratum, and the
step at which a position is trained is its index in a pseudo-random order of its stratum. The order
depends only on the keys, the seed, the epoch and the batch size: any number of ranks trains the
same batches. Out of core, blocks of consecutive positions are ordered first, so that consecutive
steps read the same few regions of the file. `docs/sampling.md` explains and measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Numbers",
    "RankOrder",
    "SamplingPlan",
    "argsort",
    "by_step",
    "mix",
    "mix_positions",
    "mix_scalar",
    "mix_words",
    "rank_of_key",
]

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.integer[Any]]

_CHUNK_ROWS = 1 << 15  # Ordering this number of rows at a time keeps intermediate arrays in a core's cache.

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(value: UInt64) -> UInt64:
    """Returns each word mixed by the splitmix64 finaliser, a bijection on 64-bit words.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def mix_positions(base: np.uint64, position: npt.NDArray[np.integer[Any]]) -> UInt64:
    """Returns a pseudo-random 64-bit word for each position: the output of splitmix64 with seed `base`."""
    return mix(position.astype(np.uint64) * np.uint64(_GOLDEN) + base)


def mix_words(*words: int | Int64) -> UInt64:
    """Hashes integers to one 64-bit word, uint64 of shape `(1,)`; with arrays of equal shape, to a word per element."""
    state = np.zeros(1, np.uint64)
    for word in words:
        if isinstance(word, int):
            state = mix(state + np.uint64((word * _GOLDEN + _GOLDEN) & _MASK))
        else:
            state = mix(state + (word.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(_GOLDEN)))
    return state


def mix_scalar(*words: int) -> int:
    """Hashes integers to one 64-bit word."""
    return int(mix_words(*words)[0])


def argsort(keys: UInt64) -> Int64:
    """Returns the same as `np.argsort(keys, kind="stable")`; random keys take a fifth of the time.

    Sorting values is faster than sorting indices, so the index of each key replaces its low bits.
    The few keys that are equal in all other bits are sorted once more.
    """
    bits = np.uint64(max(0, len(keys) - 1).bit_length())
    index_bits = (np.uint64(1) << bits) - np.uint64(1)
    packed = (keys & ~index_bits) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index_bits).astype(np.int64)
    packed >>= bits
    same = packed[1:] == packed[:-1]
    if same.any():
        tied = np.append(same, False) | np.append(False, same)
        order[tied] = order[tied][np.argsort(keys[order[tied]], kind="stable")]
    return order


def by_step(steps: Numbers, count: int) -> tuple[Numbers, Int64]:
    """Returns the stable order that sorts `steps`, and where each of `count` steps ends in it, int64 `(count,)`."""
    # Parts are sorted one by one. Within each step, the indices of a part go behind the indices of the parts before.
    size = max(_CHUNK_ROWS, count)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    ends = np.cumsum(sum((np.bincount(part, minlength=count) for part in parts), np.zeros(count, np.int64)))
    next_of_step = np.concatenate([[0], ends[:-1]])  # Where the next index of each step goes.
    order = np.empty_like(steps)
    for number, part in enumerate(parts):
        # NumPy sorts integers of 16 bits by radix, which is faster.
        part_order = np.argsort(part.astype(np.uint16) if count <= 1 << 16 else part, kind="stable")
        rows = np.bincount(part, minlength=count)
        first_in_part = np.cumsum(rows) - rows
        targets = np.arange(len(part)) + np.repeat(next_of_step - first_in_part, rows)
        order[targets] = part_order + number * size
        next_of_step += rows
    return order, ends


def rank_of_key(key: Int64, world_size: int) -> Int64:
    """Returns the rank that holds each row: the space of int64 keys, read as unsigned, is cut into equal parts.

    Spark evaluates the same expression when it repartitions the rows.
    """
    top = (key.view(np.uint64) >> np.uint64(33)).astype(np.int64)
    return (top * world_size) >> 31


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """The order of training, as a pure function of the attributes.

    Attributes:
        rows: Number of training rows over all ranks, `n`.
        batch_size: Rows of a global batch, `B`.
        seed: Seed of the order.
        shuffle: Whether every epoch has its own order; otherwise batches follow the positions.
        block: Number of consecutive positions trained within as many steps, `k`. The blocks of a stratum are put in a
            pseudo-random order, then the rows within each block; 1 orders single rows.
    """

    rows: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    block: int = 1

    @property
    def steps(self) -> int:
        """Number of steps in an epoch; the last step may have fewer rows."""
        return -(-self.rows // self.batch_size)

    @property
    def _dtype(self) -> np.dtype[np.integer[Any]]:
        """The dtype of positions: int32 if that suffices, otherwise int64."""
        return np.dtype(np.int32 if self.rows < 1 << 31 else np.int64)

    def steps_of(self, lo: int, hi: int, epoch: int) -> Numbers:
        """Returns the step at which each of the positions `[lo, hi)` is trained in an epoch, int32 if that suffices.

        The result depends only on the plan and the arguments: a rank computes its own part, strata shared with its
        neighbours included, without communication.
        """
        if lo >= hi:
            return np.empty(0, self._dtype)
        if not self.shuffle:
            positions: Numbers = np.arange(lo, hi, dtype=self._dtype)
            return positions // min(self.batch_size, self.rows)
        if self.block > 1:
            return RankOrder(self, lo, hi, epoch).steps()
        shifted = self._shift(lo, hi, epoch)
        return np.concatenate([self._steps_of_shifted(first, last, epoch) for first, last in shifted])

    @property
    def _stratum_bits(self) -> np.uint64:
        """Number of bits that hold the number of a stratum."""
        return np.uint64(max(1, (min(self.batch_size, self.rows) - 1).bit_length()))

    def _offset(self, epoch: int) -> int:
        """Returns by how many positions an epoch shifts the strata cyclically.

        Without the shift, rows of one stratum would never share a batch.
        """
        return mix_scalar(self.seed, epoch, 1) % self.rows

    def _shift(self, lo: int, hi: int, epoch: int) -> list[tuple[int, int]]:
        """Returns the positions `[lo, hi)`, shifted cyclically by the epoch's offset: one interval, or two."""
        n = self.rows
        start, stop = lo + self._offset(epoch), hi + self._offset(epoch)
        pieces = ((min(start, n), min(stop, n)), (max(start, n) - n, max(stop, n) - n))
        return [(first, last) for first, last in pieces if first < last]

    def _steps_of_shifted(self, lo: int, hi: int, epoch: int) -> Numbers:
        """Returns `steps_of` for positions that are shifted by the epoch's offset already, `0 <= lo < hi <= rows`."""
        n = self.rows
        strata = min(self.batch_size, n)
        base = np.uint64(mix_scalar(self.seed, epoch, 0))
        bits = self._stratum_bits
        first_stratum = lo * strata // n
        end_stratum = (hi - 1) * strata // n + 1
        steps = np.empty(hi - lo, self._dtype)
        strata_at_once = max(1, _CHUNK_ROWS * strata // n)
        for stratum in range(first_stratum, end_stratum, strata_at_once):
            numbers = np.arange(stratum, min(stratum + strata_at_once, end_stratum) + 1, dtype=np.int64)
            edges = -(-(numbers * n) // strata)
            begin = int(edges[0])
            end = int(edges[-1])
            sizes = np.diff(edges)
            # One sort orders by stratum and draw: the stratum is in the top bits, the draw in the other bits. Ties keep
            # the order of their positions, so that every rank breaks them alike.
            draw = mix_positions(base, np.arange(begin, end, dtype=np.int64)) >> bits
            draw |= np.repeat(np.arange(len(sizes), dtype=np.uint64) << (np.uint64(64) - bits), sizes)
            step = np.empty(end - begin, self._dtype)
            step[argsort(draw)] = np.arange(end - begin) - np.repeat(edges[:-1] - begin, sizes)
            # The strata at both ends may go on beyond the positions that were asked for.
            steps[max(begin - lo, 0) : end - lo] = step[max(lo - begin, 0) : hi - begin]
        return steps


class RankOrder:
    """The order of one rank's rows in one epoch, in windows of `plan.block` steps.

    A window reads one block of each stratum. Only the order of the blocks is kept in memory, in 4 bytes for each
    block; the rows of a window are ordered on request.

    Attributes:
        epoch: The epoch.
        windows: Number of windows.
    """

    def __init__(self, plan: SamplingPlan, lo: int, hi: int, epoch: int) -> None:
        """Orders the blocks of the positions `[lo, hi)`."""
        self._plan = plan
        self._lo = lo
        self._hi = hi
        self.epoch = epoch
        self.windows = -(-plan.steps // plan.block)
        if not plan.shuffle or lo >= hi:
            return
        n = plan.rows
        strata = min(plan.batch_size, n)
        self._offset = plan._offset(epoch)
        self._base = np.uint64(mix_scalar(plan.seed, epoch, 2))
        numbers_of_parts, first_of_parts, last_of_parts = [], [], []
        for first, last in plan._shift(lo, hi, epoch):
            touched = np.arange(first * strata // n, (last - 1) * strata // n + 1, dtype=np.int64)
            numbers_of_parts.append(touched)
            first_of_parts.append(np.full(len(touched), first))
            last_of_parts.append(np.full(len(touched), last))
        numbers = np.concatenate(numbers_of_parts)
        self._start = -(-numbers * n // strata)
        self._end = -(-(numbers + 1) * n // strata)
        # A rank orders whole strata, and keeps its part of a stratum that it shares with its neighbours.
        self._first = np.maximum(self._start, np.concatenate(first_of_parts))
        self._last = np.minimum(self._end, np.concatenate(last_of_parts))
        self._blocks = self._order_blocks(np.uint64(mix_scalar(plan.seed, epoch, 0)))

    def _order_blocks(self, base: np.uint64) -> npt.NDArray[np.int32]:
        """Returns the order of the blocks of each stratum, int32 block numbers of shape `(strata, most blocks)`.

        A block cut off by the end of its stratum comes last, so that all strata finish a block at the
        same step.
        """
        block = self._plan.block
        whole = (self._end - self._start) // block
        number = np.arange(int(whole.max()), dtype=np.int64)
        position = self._start[:, None] + number * block
        draw = mix_positions(base, position) >> self._plan._stratum_bits
        draw[number >= whole[:, None]] = _MASK
        return np.argsort(draw, axis=1, kind="stable").astype(np.int32)

    def window(self, number: int) -> tuple[Int64, Int64]:
        """Returns the rank's rows in steps `[number * block, (number + 1) * block)`, and these steps, both int64.

        Positions ascend within each block.
        """
        plan, block = self._plan, self._plan.block
        if self._lo >= self._hi:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if not plan.shuffle:
            size = block * plan.batch_size
            positions = np.arange(max(self._lo, number * size), min(self._hi, (number + 1) * size), dtype=np.int64)
            return positions, positions // plan.batch_size
        return self._ordered(number, slice(None))

    def _ordered(self, number: int, strata: slice | npt.NDArray[np.bool_]) -> tuple[Int64, Int64]:
        """Returns the same as `window`, for some strata only."""
        block = self._plan.block
        start = self._start[strata]
        end = self._end[strata]
        # A stratum has this number of whole blocks, and then perhaps a block that its end cuts off.
        whole = (end - start) // block
        block_numbers = whole
        if number < self._blocks.shape[1]:
            block_numbers = np.where(number < whole, self._blocks[strata, number], whole)
        position = (start + block_numbers * block)[:, None] + np.arange(block, dtype=np.int64)
        exists = (position < end[:, None]) & (number <= whole)[:, None]
        draw = mix_positions(self._base, position)
        draw[~exists] = _MASK  # Positions that do not exist are sorted last; ties keep the order of their positions.
        step = np.empty_like(position)
        np.put_along_axis(step, np.argsort(draw, axis=1, kind="stable"), np.arange(block)[None, :], axis=1)
        in_rank = exists & (position >= self._first[strata][:, None]) & (position < self._last[strata][:, None])
        unshifted = position[in_rank] - self._offset
        return np.where(unshifted < 0, unshifted + self._plan.rows, unshifted), step[in_rank] + number * block

    def steps(self) -> Numbers:
        """Returns the step of each of the rank's positions, of shape `(hi - lo,)`."""
        steps = np.empty(max(0, self._hi - self._lo), self._plan._dtype)
        for number in range(self.windows):
            position, step = self.window(number)
            steps[position - self._lo] = step
        return steps

    def step_rows(self) -> Int64:
        """Returns the number of the rank's rows in each step, int64 of shape `(steps,)`, without ordering all rows."""
        plan = self._plan
        if self._lo >= self._hi:
            return np.zeros(plan.steps, np.int64)
        if not plan.shuffle:
            ends = np.clip(np.arange(plan.steps + 1) * plan.batch_size, self._lo, self._hi)
            return np.diff(ends)
        shared = (self._first > self._start) | (self._last < self._end)
        sizes = np.bincount((self._end - self._start)[~shared], minlength=plan.steps + 1)
        # A step has one row of each stratum that has more rows than the number of the step.
        rows = sizes[::-1].cumsum()[::-1][1:].astype(np.int64)
        if shared.any():
            for number in range(self.windows):
                np.add.at(rows, self._ordered(number, shared)[1], 1)
        return rows
