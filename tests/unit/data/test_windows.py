"""Windows of groups: where they end, what interrupts them, and what their weights take."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparktorch.data.columns import GROUP, LABEL, ORDER, VALIDATION, Window
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage
from tests.support.frames import replaced
from tests.support.groups import grouped

SIZES = [1, 7, 30, 4, 12, 3, 25, 9, 2, 16, 40, 5]


def test_weights_of_steps_take_memory_for_rows_and_not_for_those_of_each_window(tmp_path: Path) -> None:
    table = grouped([3000], window=Window(context=500, horizon=2), weighted=True)
    for storage in (RowStorage(), RowStorage(tmp_path, budget=0)):
        shard = read_shard(table.batches(), table.columns, storage=storage)
        shard.place(0, SamplingPlan(rows=shard.rows, batch_size=100, block=8))
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
