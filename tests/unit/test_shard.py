"""A rank's rows: every row once an epoch with its own label, stand-ins where there is none."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.data.columns import KEY, LABEL, VALIDATION, WEIGHT, Columns, TensorSpec, input_name
from sparktorch.data.plan import SamplingPlan
from sparktorch.data.shard import Batch, Shard
from sparktorch.data.tensors import to_arrow
from sparktorch.errors import ColumnError
from tests.support.frames import Table, record_batches, replaced

PLAN = SamplingPlan(rows=203, batch_size=20, seed=3)


def shard_of(table: Table, *, plan: SamplingPlan | None = None, first: int = 0) -> Shard:
    shard = Shard(table.batches(size=30), table.columns)
    shard.place(first, plan or SamplingPlan(rows=shard.rows, batch_size=20, seed=3))
    return shard


def rows_in(batch: Batch) -> list[tuple[float, ...]]:
    """Returns one tuple of features, label and weight per row."""
    assert batch.label is not None
    features = batch.inputs[0][: len(batch.label)]  # the inputs may be filled up
    columns = [*features.T, batch.label, *([] if batch.weight is None else [batch.weight])]
    return [tuple(float(value) for value in row) for row in zip(*columns, strict=True)]


def rows_of(table: Table) -> list[tuple[float, ...]]:
    named = [*table.arrays["x0"].T, table.arrays[LABEL], *([table.arrays[WEIGHT]] if WEIGHT in table.arrays else [])]
    return [tuple(float(np.float32(value)) for value in row) for row in zip(*named, strict=True)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [None, 4])
def test_an_epoch_holds_every_row_once_with_its_own_label_and_weight(weighted: bool, classes: int | None) -> None:
    table = Table.random(203, classes=classes, weighted=weighted)
    shard = shard_of(table)
    for epoch in range(2):
        batches = list(shard.epoch(epoch))
        assert [batch.rows for batch in batches] == [20] * 10 + [3]
        assert sorted(row for batch in batches for row in rows_in(batch)) == sorted(rows_of(table))


def test_the_order_of_the_epoch_is_that_of_the_plan_over_the_unsigned_keys() -> None:
    table = Table.random(203)
    by_key = rows_of(table.by_key())
    steps = PLAN.steps_of(0, 203, 5)
    for step, batch in enumerate(shard_of(table, plan=PLAN).epoch(5)):
        assert sorted(rows_in(batch)) == sorted(row for row, at in zip(by_key, steps, strict=True) if at == step)


def test_two_ranks_hold_the_two_parts_of_every_batch() -> None:
    table = Table.random(203, weighted=True)
    parts = table.parts(2)
    shards = [
        shard_of(parts[0], plan=PLAN),
        shard_of(parts[1], plan=PLAN, first=len(parts[0])),
    ]
    whole = shard_of(table, plan=PLAN)
    for ours, theirs, all_of_it in zip(*(shard.epoch(1) for shard in (*shards, whole)), strict=True):
        assert sorted(rows_in(ours) + rows_in(theirs)) == sorted(rows_in(all_of_it))
    totals = sum(shard.step_weights(1) for shard in shards)
    torch.testing.assert_close(totals, whole.step_weights(1), rtol=1e-12, atol=0)


def test_labels_of_classes_are_integers_and_other_tensors_have_the_dtypes_of_their_specs() -> None:
    batch = next(shard_of(Table.random(50, classes=3, weighted=True)).epoch(0))
    assert batch.label is not None
    assert batch.weight is not None
    assert (batch.inputs[0].dtype, batch.label.dtype, batch.weight.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
    )
    assert next(shard_of(Table.random(50)).epoch(0)).weight is None


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_with_too_few_rows_has_its_inputs_filled_up(rows: int, least: int, weighted: bool) -> None:
    table = Table.random(5, classes=3, weighted=weighted).take(np.arange(rows))
    shard = shard_of(table, plan=PLAN, first=100)
    batches = list(shard.epoch(0, least=least))
    assert len(batches) == PLAN.steps
    assert sum(batch.rows for batch in batches) == rows
    filled = [batch for batch in batches if batch.rows < least]
    assert filled
    for batch in filled:
        assert batch.inputs[0].shape == (least, 5)
        assert batch.label is not None
        assert (batch.label.shape, batch.label.dtype) == ((batch.rows or least,), torch.int64)
        if not batch.rows:
            assert batch.weight is not None
            assert batch.weight.tolist() == [0] * least
    real = [row for batch in batches for row in rows_in(batch)[: batch.rows]]
    assert sorted(row[: 7 if weighted else 6] for row in real) == sorted(rows_of(table))


@pytest.mark.parametrize("weighted", [False, True])
def test_step_weights_are_the_weights_of_the_rows_of_each_step(weighted: bool) -> None:
    shard = shard_of(Table.random(203, weighted=weighted))
    found = shard.step_weights(2)
    expected = [batch.rows if batch.weight is None else batch.weight.double().sum() for batch in shard.epoch(2)]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([float(weight) for weight in expected], rel=1e-12)


def test_validation_rows_are_held_out_and_come_in_pieces() -> None:
    table = Table.random(203, weighted=True, validated=True)
    held_out = table.arrays[VALIDATION]
    shard = shard_of(table)
    assert (shard.rows, shard.validation_rows) == ((~held_out).sum(), held_out.sum())
    trained = [row for batch in shard.epoch(0) for row in rows_in(batch)]
    validated = list(shard.validation(16))
    assert sorted(trained) == sorted(rows_of(table.take(~held_out)))
    assert sorted(row for batch in validated for row in rows_in(batch)) == sorted(rows_of(table.take(held_out)))
    assert max(batch.rows for batch in validated) == 16
    assert [*shard_of(Table.random(9)).validation(16)] == []


def test_a_null_flag_is_no_flag() -> None:
    table = Table.random(3, validated=True)
    batch = table.batches()[0]
    flags = batch.column(VALIDATION).take([None, 0, 1])
    shard = Shard([replaced(batch, VALIDATION, flags)], table.columns)
    assert shard.rows + shard.validation_rows == 3
    assert shard.validation_rows == sum(bool(flag) for flag in flags.to_pylist())


def test_the_fingerprint_is_that_of_the_training_rows_in_any_order_and_partitioning() -> None:
    table = Table.random(203, validated=True)
    fingerprint = shard_of(table).fingerprint
    trained = table.take(~table.arrays[VALIDATION])
    assert fingerprint == sum(int(key) for key in trained.arrays[KEY]) % 2**64
    assert shard_of(table.shuffled(seed=1)).fingerprint == fingerprint
    assert sum(Shard(part.batches(), part.columns).fingerprint for part in table.parts(3)) % 2**64 == fingerprint
    assert shard_of(trained.take(np.arange(1, len(trained)))).fingerprint != fingerprint


def test_a_bad_row_is_counted_over_the_batches() -> None:
    table = Table.random(203)
    batches = table.batches(size=50)
    bad = replaced(batches[2], "x0", to_arrow(np.zeros((50, 4), np.float32)))
    with pytest.raises(ColumnError, match="50 rows of column 'features' do not hold 5 values") as caught:
        Shard([*batches[:2], bad], table.columns)
    assert caught.value.where["row"] == 100


def test_a_shard_keeps_nothing_of_the_batches_it_was_fed() -> None:
    table = Table.random(40)
    shard = shard_of(table)
    before = [rows_in(batch) for batch in shard.epoch(0)]
    batch = next(shard.epoch(0))
    batch.inputs[0].zero_()
    assert [rows_in(batch) for batch in shard.epoch(0)] == before
    assert shard.bytes == 40 * (5 * 4 + 4)


def test_an_epoch_that_is_ordered_ahead_is_the_same_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.random(203, weighted=True)
    plain = shard_of(table)
    monkeypatch.setattr("sparktorch.data.shard._AHEAD_ROWS", 10)
    ahead = Shard(table.batches(size=30), table.columns)
    ahead.place(0, PLAN, epochs=3)
    made: list[tuple[int, str]] = []
    make = ahead._make_order

    def watched(epoch: int) -> Any:
        made.append((epoch, threading.current_thread().name))
        return make(epoch)

    monkeypatch.setattr(ahead, "_make_order", watched)
    next(ahead.epoch(0))  # as before the first step of a training with checkpoints
    for epoch in range(3):
        assert ahead.step_weights(epoch).tolist() == plain.step_weights(epoch).tolist()
        assert ahead.step_rows(epoch).tolist() == [batch.rows for batch in plain.epoch(epoch)]
        assert [rows_in(batch) for batch in ahead.epoch(epoch)] == [rows_in(batch) for batch in plain.epoch(epoch)]
    assert made == [(0, "MainThread"), (1, "sparktorch-order"), (2, "sparktorch-order")]


def test_several_inputs_arrive_in_the_order_of_forward() -> None:
    specs = tuple(TensorSpec(name=input_name(i), column=f"c{i}", dtype="int64" if i else "float32") for i in range(3))
    arrays = {spec.name: np.full(4, i, spec.dtype) for i, spec in enumerate(specs)}
    keys = np.arange(4)
    shard = Shard(record_batches({**arrays, KEY: keys}), Columns(inputs=specs))
    shard.place(0, SamplingPlan(rows=4, batch_size=4))
    batch = next(shard.epoch(0))
    assert [tensor.tolist() for tensor in batch.inputs] == [[0.0] * 4, [1] * 4, [2] * 4]
    assert [tensor.dtype for tensor in batch.inputs] == [torch.float32, torch.int64, torch.int64]
    assert batch.label is None


def test_a_rank_without_rows_stands_in_with_the_spare_one_and_holds_nothing() -> None:
    table = Table.random(9, classes=3, weighted=True)
    shard = Shard([], table.columns, spare=table.batches()[0].slice(4, 1))
    shard.place(0, PLAN)
    assert (shard.rows, shard.validation_rows, shard.bytes, shard.fingerprint) == (0, 0, 0, 0)
    assert shard.step_weights(0).tolist() == [0] * PLAN.steps
    spare = rows_of(table)[4]
    for batch in shard.epoch(0, least=2):
        assert batch.rows == 0
        assert rows_in(batch) == [(*spare[:-1], 0.0)] * 2
