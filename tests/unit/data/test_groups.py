"""Samples of groups: whole groups and windows, in memory and on disk, each with its own rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.base.batch import Batch, micro_batches
from sparktorch.data.columns import GROUP, LABEL, ORDER, VALIDATION, WEIGHT, Window
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.sampling.groups import Samples
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError
from tests.support.frames import Table, replaced
from tests.support.groups import grouped, samples_of
from tests.unit.data.conftest import Make

SIZES = [1, 7, 30, 4, 12, 3, 25, 9, 2, 16, 40, 5]
WINDOW = Window(context=4, horizon=2, step=3)


def batches_of(table: Table, samples: list[Any], *, block: int = 1, epoch: int = 0) -> Iterator[list[Any]]:
    plan = SamplingPlan(rows=len(samples), batch_size=4, seed=3, block=block)
    steps = plan.steps_of(0, len(samples), epoch)
    for step in range(plan.steps):
        yield [samples[number] for number in np.flatnonzero(steps == step)]


def sorted_rows(batch: Batch, window: Window | None) -> list[list[float]]:
    """Returns, of each sample, its features and labels as numbers, samples in order."""
    assert batch.label is not None
    x, y, found = batch.inputs[0], batch.label, []
    ends = range(1, len(x) + 1) if batch.sizes is None else batch.sizes.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    for start, end in zip(starts, ends, strict=True):
        found.append([*x[start:end].flatten().tolist(), *y[start:end].flatten().tolist()])
    return sorted(found)


def expected_rows(table: Table, samples: list[Any], window: Window | None) -> list[list[float]]:
    found = []
    for rows in samples:
        seen, told = (rows, rows) if window is None else (rows[: window.context], rows[window.context :])
        found.append([*table.arrays["x0"][seen].ravel().tolist(), *table.arrays[LABEL][told].tolist()])
    return sorted(found)


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("window", [None, WINDOW], ids=["groups", "windows"])
def test_batches_hold_the_samples_of_a_plain_loop(shard_of: Make, window: Window | None, block: int) -> None:
    table = grouped(SIZES, window=window, validated=True)
    trained, validated = samples_of(table)
    plan = SamplingPlan(rows=len(trained), batch_size=4, seed=3, block=block)
    shard = shard_of(table, plan=plan, budget=400 if block > 1 else 1 << 20)
    assert (shard.rows, shard.validation_rows) == (len(trained), len(validated))
    for epoch in range(2):
        found = list(shard.epoch(epoch))
        for batch, samples in zip(found, batches_of(table, trained, block=block, epoch=epoch), strict=True):
            assert batch.rows == len(samples)
            assert sorted_rows(batch, window) == expected_rows(table, samples, window)
    rows = [row for batch in shard.validation(3) for row in sorted_rows(batch, window)]
    assert sorted(rows) == expected_rows(table, validated, window)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["groups", "windows"])
def test_a_sample_weighs_the_mean_of_the_rows_that_it_predicts(shard_of: Make, window: Window | None) -> None:
    table = grouped(SIZES, window=window, weighted=True)
    table = table.with_values(WEIGHT, np.random.default_rng(1).uniform(0, 2, len(table)))
    shard = shard_of(table, batch_size=4)
    weights = shard.step_weights(0)
    trained, _ = samples_of(table)
    batches = list(shard.epoch(0))
    for batch, weight, samples in zip(batches, weights, batches_of(table, trained), strict=True):
        told = [rows if window is None else rows[window.context :] for rows in samples]
        means = [table.arrays[WEIGHT][rows].mean() for rows in told]
        assert batch.weight is not None
        assert sorted(batch.weight.tolist()) == pytest.approx(sorted(means))
        assert float(weight) == pytest.approx(sum(means))


def test_inputs_that_are_known_ahead_have_all_rows_of_a_window() -> None:
    table = grouped(SIZES, window=Window(context=4, horizon=2, known_ahead=(1,)))
    first = table.columns.inputs[0]
    columns = replace(table.columns, inputs=(first, replace(first, name="x1")))
    table = Table({**table.arrays, "x1": -table.arrays["x0"]}, columns)
    shard = read_shard(table.batches(), columns)
    shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=9))
    batch = next(shard.epoch(0))
    past, ahead = batch.inputs
    assert batch.label is not None
    assert [past.shape, ahead.shape, batch.label.shape] == [(9, 4, 5), (9, 6, 5), (9, 2)]
    assert torch.equal(past, -ahead[:, :4])


@pytest.mark.parametrize("window", [None, WINDOW], ids=["groups", "windows"])
def test_micro_batches_have_the_samples_of_a_batch_and_placeholders_weigh_nothing(window: Window | None) -> None:
    table = grouped(SIZES, window=window)
    shard = read_shard(table.batches(), table.columns)
    shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=5))
    batch = next(shard.epoch(0))
    parts = micro_batches(batch, 2, min_rows=2)
    assert sum(part.rows for part in parts) == 5
    rows = [row for part in parts for row in sorted_rows(part, window)]
    assert sorted(rows) == sorted_rows(batch, window)
    one, nothing = micro_batches(batch.slice(0, 1), 2, min_rows=1)
    assert (one.rows, nothing.rows) == (1, 0)
    assert nothing.weight is not None
    assert not nothing.weight.any()


@pytest.mark.parametrize(("sizes", "window"), [([], None), ([3], WINDOW)], ids=["no groups", "one that is too short"])
def test_a_rank_without_samples_joins_steps_with_placeholders(
    shard_of: Make, sizes: list[int], window: Window | None
) -> None:
    table = grouped([9, *sizes], window=window)
    table = table.take(table.arrays[GROUP] != grouped([9]).arrays[GROUP][0])
    shard = shard_of(table, plan=SamplingPlan(rows=2, batch_size=1))
    whole = next(shard.epoch(0, min_rows=2)).complete()
    assert shard.rows == 0
    assert (whole.sample_count, whole.inputs[0].shape[-1]) == (2, 5)
    assert whole.label is not None
    assert whole.weight is not None
    assert whole.weight.tolist() == [0, 0]


def test_a_batch_that_is_filled_up_has_label_and_sizes_of_real_groups_first() -> None:
    table = grouped(SIZES, weighted=True)
    shard = read_shard(table.batches(), table.columns)
    shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=1))
    batch = next(shard.epoch(0, min_rows=3))
    assert batch.sizes is not None
    assert batch.label is not None
    real = int(batch.sizes[0])
    assert (batch.rows, batch.sample_count, len(batch.label), batch.sizes[1:].tolist()) == (1, 3, real, [real, real])
    whole = batch.complete()
    assert whole.weight.tolist()[1:] == [0, 0]  # type: ignore[union-attr]
    for tensor in (whole.inputs[0], whole.label):  # the others are the same group again
        assert torch.equal(tensor, tensor[:real].repeat(3, *[1] * (tensor.dim() - 1)))  # type: ignore[index, union-attr]


@pytest.mark.parametrize("window", [None, WINDOW], ids=["groups", "windows"])
def test_a_step_without_samples_shows_one_of_the_rank(shard_of: Make, window: Window | None) -> None:
    table = grouped([12], window=window)
    shard = shard_of(table, plan=SamplingPlan(rows=100, batch_size=1, shuffle=False))
    *_, last = shard.epoch(0)
    whole = last.complete()
    assert (last.rows, whole.weight.tolist()) == (0, [0])  # type: ignore[union-attr]
    assert sorted_rows(whole, window) == expected_rows(table, samples_of(table)[0][:1], window)


def test_places_that_are_there_twice_are_refused() -> None:
    twice = grouped([3, 3])
    twice.arrays[ORDER][:] = 7
    with pytest.raises(ColumnError, match="4 values of column 'at' are there twice in a group of column 'query'"):
        read_shard(twice.batches(), twice.columns)


def test_a_group_that_validates_in_part_is_refused() -> None:
    table = grouped(SIZES, validated=True)
    table.arrays[VALIDATION][table.arrays[ORDER].argmax()] ^= True
    with pytest.raises(ColumnError, match="column 'held_out' marks some rows of a group and not others"):
        read_shard(table.batches(), table.columns)


def test_rows_without_a_group_are_refused_or_dropped() -> None:
    (batch,) = grouped([4, 4]).batches()
    values = batch.column(GROUP).to_pylist()
    batch = replaced(batch, GROUP, pa.array([None, *values[1:]], pa.int64()))
    columns = grouped([1]).columns
    with pytest.raises(ColumnError, match="column 'query' has 1 row with null values"):
        read_shard([batch], columns)
    shard = read_shard([batch], replace(columns, drop_nulls=True))
    assert (shard.rows, shard.dropped) == (2, 1)


def test_the_fingerprint_changes_with_the_rows_and_not_with_their_arrival() -> None:
    table = grouped(SIZES)
    tables = table, table.shuffled(5), grouped(SIZES, seed=1)
    one, again, other = (read_shard(each.batches(), each.columns).fingerprint for each in tables)
    assert one == again != other
    short = read_shard(table.batches(), replace(table.columns, groups=replace(table.columns.groups, window=WINDOW)))
    assert short.groups == {"groups": 12, "short": 5, "largest": 40, "rows": sum(SIZES), "gaps": 0, "marked": 0}


def test_rows_that_arrive_group_by_group_are_put_in_order() -> None:
    table = grouped(SIZES, window=WINDOW)
    draw = np.random.default_rng(2).random(len(table))
    table = table.take(np.lexsort((draw, table.arrays[GROUP].view(np.uint64))))
    shard = read_shard(table.batches(size=200), table.columns)
    shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=shard.rows))
    trained, _ = samples_of(table)
    assert sorted_rows(next(shard.epoch(0)), WINDOW) == expected_rows(table, trained, WINDOW)


def test_samples_that_are_read_together_have_each_of_their_rows_once() -> None:
    rows = np.random.default_rng(1).permutation(20)
    samples = Samples(rows, np.array([0, 2, 4, 10, 13, 19]), np.full(6, 5))
    numbers = np.array([4, 0, 3, 1])
    some, read = samples.only(numbers)
    assert sorted(read) == sorted(set(read)) == sorted(rows[[*range(7), *range(10, 18), 19]])
    for at, number in enumerate([*numbers, samples.count]):  # and the placeholder
        found, expected = some.locate(torch.tensor([at]))[0], samples.locate(torch.tensor([number]))[0]
        assert read[found].tolist() == expected.tolist()


def test_weights_of_steps_take_memory_for_rows_and_not_for_those_of_each_window(tmp_path: Path) -> None:
    table = grouped([3000], window=Window(context=500, horizon=2), weighted=True)
    for storage in (RowStorage(), RowStorage(tmp_path, budget=0)):
        shard = read_shard(table.batches(), table.columns, storage=storage)
        shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=100, block=8))
        shard.step_rows(0)
        tracemalloc.start()
        shard.step_weights(0)
        assert tracemalloc.get_traced_memory()[1] < 200 * len(table)
        tracemalloc.stop()
        shard.close()


def test_the_last_rows_of_each_group_are_the_horizon_of_its_last_window() -> None:
    table = grouped(SIZES, window=Window(context=4, horizon=3, step=3), validated=True)
    groups, places = table.arrays[GROUP], table.arrays[ORDER] // 3600
    ends = {group: places[groups == group].max() for group in groups.tolist()}
    table = table.with_values(VALIDATION, [at > ends[group] - 3 for group, at in zip(groups, places, strict=True)])
    shard = read_shard(table.batches(), table.columns)
    assert shard.validation_rows == sum(size >= 7 for size in SIZES)


def test_steps_are_those_of_all_rows_also_of_dropped_ones() -> None:
    table = grouped([30, 12], window=Window(context=3, horizon=1, even=("bigint", "")))
    (batch,) = table.batches()
    places, labels = table.arrays[ORDER] // 3600, batch.column(LABEL).to_pylist()
    one = table.arrays[GROUP] == np.unique(table.arrays[GROUP])[0]
    columns = replace(table.columns, drop_nulls=True)
    for nulls in (places % 2 == 1, np.isin(places, [5, 6, 11]) & one, places > 9):
        values = [None if null else label for null, label in zip(nulls, labels, strict=True)]
        shard = read_shard([replaced(batch, LABEL, pa.array(values, batch.column(LABEL).type))], columns)
        runs = [
            np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
            for at in (np.sort(places[mask & ~nulls]) for mask in (one, ~one))
        ]
        assert shard.rows == sum(max(0, len(run) - 3) for group in runs for run in group)
        assert shard.groups is not None
        assert shard.groups["gaps"] == sum(len(group) - 1 for group in runs)
