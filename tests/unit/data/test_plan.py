"""The arithmetic of sampling: who is trained when, as properties that hold for any sizes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparktorch.data.sampling.plan import RankOrder, SamplingPlan, argsort, by_step, mix, rank_of_key

settings.register_profile("sparktorch", max_examples=100, deadline=None, database=None)
settings.load_profile("sparktorch")

_MASK = 2**64 - 1

rows = st.integers(1, 700)
batch_sizes = st.integers(1, 900)
seeds = st.integers(-(2**63), 2**64 - 1)
epochs = st.integers(0, 2**31)
blocks = st.just(1) | st.integers(1, 80)
shuffled = st.builds(SamplingPlan, rows=rows, batch_size=batch_sizes, seed=seeds, block=blocks)
plans = shuffled | st.builds(SamplingPlan, rows=rows, batch_size=batch_sizes, shuffle=st.just(False), block=blocks)


@st.composite
def cuts(draw: st.DrawFn, total: int) -> list[int]:
    """Borders of ranks over the positions, empty ranks included."""
    inner = draw(st.lists(st.integers(0, total), max_size=6))
    return [0, *sorted(inner), total]


def steps(plan: SamplingPlan, epoch: int = 0) -> npt.NDArray[np.int64]:
    return plan.steps_of(0, plan.rows, epoch)


@pytest.mark.parametrize(
    ("block", "epoch", "expected"),
    [
        (1, 0, [0, 0, 3, 1, 2, 2, 1, 0, 1, 2, 3]),
        (1, 1, [0, 1, 2, 0, 0, 2, 3, 1, 3, 1, 2]),
        (2, 0, [2, 1, 0, 3, 2, 1, 0, 2, 0, 1, 3]),
        (2, 1, [0, 1, 0, 2, 1, 0, 3, 2, 2, 3, 1]),
    ],
)
def test_a_training_of_today_takes_the_steps_of_one_from_before(block: int, epoch: int, expected: list[int]) -> None:
    plan = SamplingPlan(rows=11, batch_size=3, seed=7, block=block)
    assert steps(plan, epoch).tolist() == expected


@given(plan=plans, epoch=epochs)
@example(plan=SamplingPlan(rows=1, batch_size=1), epoch=0)
@example(plan=SamplingPlan(rows=5, batch_size=5), epoch=0)
@example(plan=SamplingPlan(rows=64, batch_size=65), epoch=3)
def test_every_position_is_trained_once_in_batches_of_exactly_the_batch_size(plan: SamplingPlan, epoch: int) -> None:
    sizes = np.bincount(steps(plan, epoch), minlength=plan.steps)
    assert len(sizes) == plan.steps == -(-plan.rows // plan.batch_size)
    assert sizes.sum() == plan.rows
    assert (sizes[:-1] == plan.batch_size).all()
    assert 1 <= sizes[-1] <= plan.batch_size


@given(data=st.data(), plan=plans, epoch=epochs)
def test_any_cut_into_ranks_trains_the_same_steps(data: st.DataObject, plan: SamplingPlan, epoch: int) -> None:
    borders = data.draw(cuts(plan.rows))
    parts = [plan.steps_of(lo, hi, epoch) for lo, hi in pairwise(borders)]
    assert np.concatenate(parts).tolist() == steps(plan, epoch).tolist()


@given(data=st.data(), plan=shuffled, epoch=epochs)
def test_a_ranks_share_of_a_step_is_its_share_of_the_strata(
    data: st.DataObject, plan: SamplingPlan, epoch: int
) -> None:
    strata = min(plan.batch_size, plan.rows)
    lo, hi = sorted((data.draw(st.integers(0, plan.rows)), data.draw(st.integers(0, plan.rows))))
    sizes = np.bincount(plan.steps_of(lo, hi, epoch), minlength=plan.steps)
    full = sizes if plan.rows % plan.batch_size == 0 else sizes[:-1]  # the last step lacks some strata
    assert (abs(full - (hi - lo) * strata / plan.rows) <= 2).all()


@given(rows=rows, batch_size=batch_sizes, epoch=epochs)
def test_without_shuffling_the_batches_follow_the_positions(rows: int, batch_size: int, epoch: int) -> None:
    plan = SamplingPlan(rows=rows, batch_size=batch_size, shuffle=False)
    assert steps(plan, epoch).tolist() == [position // batch_size for position in range(rows)]


@given(batch_size=st.integers(2, 100), seed=seeds, epoch=epochs)
def test_epochs_and_seeds_have_orders_of_their_own(batch_size: int, seed: int, epoch: int) -> None:
    plan = SamplingPlan(rows=1_000, batch_size=batch_size, seed=seed)
    other = SamplingPlan(rows=1_000, batch_size=batch_size, seed=seed ^ 1)
    order = steps(plan, epoch)
    assert np.array_equal(order, steps(plan, epoch))
    by_chance = 1_000 / plan.steps
    for different in (steps(plan, epoch + 1), steps(other, epoch)):
        assert (order == different).sum() < by_chance + 8 * np.sqrt(by_chance)


@given(data=st.data(), plan=plans, epoch=epochs)
@example(data=None, plan=SamplingPlan(rows=4, batch_size=4, block=9), epoch=0)
def test_the_windows_of_a_rank_are_its_part_of_the_order(data: st.DataObject, plan: SamplingPlan, epoch: int) -> None:
    whole = steps(plan, epoch)
    for lo, hi in pairwise(data.draw(cuts(plan.rows)) if data else [0, plan.rows]):
        order = RankOrder(plan, lo, hi, epoch)
        assert order.steps().tolist() == whole[lo:hi].tolist()
        assert order.step_rows().tolist() == np.bincount(whole[lo:hi], minlength=plan.steps).tolist()
        for number in range(order.windows):
            position, step = order.window(number)
            assert (np.diff(position) > 0).all()
            assert (step // plan.block == number).all()


@given(plan=shuffled, epoch=epochs)
def test_a_window_reads_one_block_of_each_stratum(plan: SamplingPlan, epoch: int) -> None:
    order = RankOrder(plan, 0, plan.rows, epoch)
    strata = min(plan.batch_size, plan.rows)
    for number in range(order.windows):
        position, _ = order.window(number)
        runs = np.count_nonzero(np.diff(position) != 1) + 1
        assert runs <= strata + 1  # one is cut in two where the positions begin anew


@pytest.mark.parametrize("block", [1, 4])
def test_no_two_rows_are_kept_apart_for_ever(block: int) -> None:
    plan = SamplingPlan(rows=40, batch_size=10, block=block)
    met = np.zeros((40, 40), bool)
    for epoch in range(300):
        order = steps(plan, epoch)
        met |= order[:, None] == order[None, :]
    assert met.all()


@pytest.mark.parametrize("block", [1, 5])
def test_every_step_is_equally_likely_for_every_position(block: int) -> None:
    plan = SamplingPlan(rows=60, batch_size=6, block=block)
    orders = np.stack([steps(plan, epoch) for epoch in range(2_000)])
    counts = np.stack([(orders == step).sum(0) for step in range(plan.steps)])
    assert abs(counts - 200).max() < 6 * np.sqrt(200)


def test_neighbours_meet_in_a_window_in_any_order_and_windows_come_in_any_order() -> None:
    plan = SamplingPlan(rows=32_000, batch_size=32, seed=1, block=10)  # strata of 1,000 rows, 100 blocks each
    order = steps(plan, 4).astype(float)
    gap = np.diff(order)
    near = abs(gap) < plan.block
    assert abs(near.mean() - 0.9) < 0.01  # nine of ten neighbours share a block
    assert abs((gap[near] > 0).mean() - 0.5) < 6 / np.sqrt(near.sum())
    for lag in (10, 20, 100, 500):  # rows of other blocks, of the same stratum for the most part
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        assert abs(correlation) < 8 / np.sqrt(plan.rows / plan.block)
    within = np.arange(plan.rows) % 1_000
    assert abs(np.corrcoef(within, order)[0, 1]) < 8 / np.sqrt(plan.rows / plan.block)


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50), ranks=st.integers(1, 300))
@example(keys=[0, -1, 2**63 - 1, -(2**63)], ranks=2)
def test_a_rank_holds_its_range_of_the_unsigned_keys(keys: list[int], ranks: int) -> None:
    found = rank_of_key(np.array(keys, np.int64), ranks)
    top = [(key & _MASK) >> 33 for key in keys]  # 31 bits decide, as in the JVM
    assert found.tolist() == [bits * ranks // 2**31 for bits in top]
    assert found.min() >= 0
    assert found.max() < ranks
    order = np.argsort(np.array(keys, np.int64).view(np.uint64))
    assert (np.diff(found[order]) >= 0).all(), "the order of the ranks is that of the positions"


def reference_mix(word: int) -> int:
    """The splitmix64 finaliser over Python's integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@given(words=st.lists(st.integers(0, _MASK), min_size=1, max_size=50))
def test_mix_is_splitmix64(words: list[int]) -> None:
    assert mix(np.array(words, np.uint64)).tolist() == [reference_mix(word) for word in words]


@given(data=st.data(), bits=st.sampled_from([2, 8, 64]), size=st.integers(0, 200))
def test_keys_are_sorted_as_by_a_stable_sort_of_all_their_bits(data: st.DataObject, bits: int, size: int) -> None:
    drawn = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size))
    shift = data.draw(st.integers(0, 64 - bits))
    keys = np.array(drawn, np.uint64) << np.uint64(shift)
    assert argsort(keys).tolist() == np.argsort(keys, kind="stable").tolist()


@given(size=st.integers(0, 300), count=st.integers(1, 40), chunk=st.integers(1, 200), seed=st.integers(0, 99))
def test_places_come_by_their_steps_however_many_are_sorted_at_a_time(
    size: int, count: int, chunk: int, seed: int
) -> None:
    numbers = np.random.default_rng(seed).integers(0, count, size, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparktorch.data.sampling.plan._CHUNK_ROWS", chunk)
        places, ends = by_step(numbers, count)
    assert places.tolist() == np.argsort(numbers, kind="stable").tolist()
    assert ends.tolist() == np.cumsum(np.bincount(numbers, minlength=count)).tolist()
