"""A shard without a fold is the shard that holds only the rows outside of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.data.columns import FOLD, VALIDATION
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.dataset.shards import InMemoryShard
from sparktorch.data.sampling.plan import SamplingPlan
from tests.support.frames import Table

ROWS, FOLDS = 203, 3


def batches(table: Table, folds: np.ndarray) -> list[pa.RecordBatch]:
    found, start = [], 0
    for batch in table.batches(size=30):
        part = folds[start : start + batch.num_rows]
        columns = [*batch.columns, pa.array(part, pa.int32()), pa.array(part * 0.5 + np.arange(len(part)))]
        found.append(pa.RecordBatch.from_arrays(columns, [*batch.schema.names, FOLD, "c0"]))
        start += batch.num_rows
    return found


def shard(table: Table, folds: np.ndarray, *, by_key: bool = True) -> InMemoryShard:
    columns = replace(table.columns, folds=True, carried=("a",))
    made = read_shard(batches(table, folds), columns, by_key=by_key)
    assert isinstance(made, InMemoryShard)
    return made


def trained(made: InMemoryShard) -> list[list[Any]]:
    made.schedule(0, SamplingPlan(rows=made.rows, batch_size=20, seed=3), epochs=2)
    made.weigh_classes([3.0, 0.5, 1.0, 2.0])
    batches = [*made.epoch(0), *made.epoch(1, min_rows=64), *made.validation(16)]
    return [[*batch.inputs, batch.label, batch.weight, batch.loss_weight] for batch in batches]


@pytest.mark.parametrize("by_key", [True, False])
def test_a_shard_without_a_fold_has_the_batches_of_the_other_rows_alone(by_key: bool) -> None:
    draw = np.random.default_rng(4)
    table = Table.random(ROWS, classes=4, weighted=True)
    table.arrays[VALIDATION] = draw.random(ROWS) < 0.2
    table = replace(table, columns=replace(table.columns, validation="v"))
    folds = draw.integers(-1, FOLDS, ROWS)
    made = shard(table, folds, by_key=by_key)
    for fold in (*range(FOLDS), None):
        left = np.flatnonzero(folds != fold) if fold is not None else np.arange(ROWS)
        alone = shard(table.take(left), folds[left], by_key=by_key)
        made.leave_out(fold)
        assert (made.rows, made.validation_rows) == (alone.rows, alone.validation_rows)
        assert made.fingerprint == alone.fingerprint
        assert made.weight_by_class(4) == alone.weight_by_class(4)
        torch.testing.assert_close(trained(made), trained(alone), rtol=0, atol=0)


def test_a_fold_is_scored_with_all_its_rows_in_the_order_of_what_they_carry() -> None:
    folds = np.arange(ROWS) % FOLDS
    table = Table.random(ROWS, classes=4)
    made = shard(table, folds)
    assert made.folds is not None
    for fold in range(FOLDS):
        parts = list(made.inputs(fold, 25))
        assert [len(part[0]) for part in parts] == [len(part) for part in np.array_split(np.arange(68 - fold // 2), 3)]
        expected = torch.from_numpy(table.arrays["x0"][folds == fold].astype(np.float32))
        assert torch.equal(torch.cat([part[0] for part in parts]), expected)
        carried = np.concatenate([batch.column("c0").to_numpy() for batch in batches(table, folds)])
        assert np.array_equal(made.folds.carried(fold)["c0"], carried[folds == fold])
    assert list(made.inputs(FOLDS, 25)) == []
    assert sum(rows for rows, _, _ in made.folds.counts.values()) == ROWS
