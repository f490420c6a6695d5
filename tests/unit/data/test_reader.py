"""A rank's rows: every row once an epoch with its own label, stand-ins where there is none."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.base.batch import Batch, micro_batches, padding
from sparktorch.data.columns import KEY, LABEL, VALIDATION, WEIGHT, Columns, TensorSpec
from sparktorch.data.dataset import shards
from sparktorch.data.dataset.base import RankSteps, Shard
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.preprocess import Preprocess
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage, Runs
from sparktorch.errors import ColumnError
from tests.support.frames import Table, replaced
from tests.unit.data.conftest import Make

PLAN = SamplingPlan(rows=203, batch_size=20, seed=3)


def rows_in(batch: Batch) -> list[tuple[float, ...]]:
    """Returns one tuple of features, label and weight per row."""
    assert batch.label is not None
    features = batch.inputs[0][: len(batch.label)]  # the inputs may be filled up
    columns = [*features.T, batch.label, *([] if batch.weight is None else [batch.weight])]
    return [tuple(float(value) for value in row) for row in zip(*columns, strict=True)]


def rows_of(table: Table) -> list[tuple[float, ...]]:
    named = [*table.arrays["x0"].T, table.arrays[LABEL], *([table.arrays[WEIGHT]] if WEIGHT in table.arrays else [])]
    return [tuple(float(np.float32(value)) for value in row) for row in zip(*named, strict=True)]


@pytest.mark.parametrize(("weighted", "classes"), [(False, None), (True, 4)])
def test_the_order_of_the_epoch_is_that_of_the_plan_over_the_unsigned_keys(
    shard_of: Make, weighted: bool, classes: int | None
) -> None:
    table = Table.random(203, classes=classes, weighted=weighted)
    by_key = rows_of(table.by_key())
    steps = PLAN.steps_of(0, 203, 5)
    for step, batch in enumerate(shard_of(table, plan=PLAN).epoch(5)):
        expected = sorted(row for row, at in zip(by_key, steps, strict=True) if at == step)
        assert (batch.rows, sorted(rows_in(batch))) == (len(expected), expected)


@pytest.mark.parametrize(("rows", "min_rows", "weighted"), [(0, 2, True), (1, 1, False), (5, 2, False), (5, 2, True)])
def test_a_step_with_too_few_rows_has_its_inputs_filled_up(
    shard_of: Make, rows: int, min_rows: int, weighted: bool
) -> None:
    table = Table.random(5, classes=3, weighted=weighted).take(np.arange(rows))
    shard = shard_of(table, plan=PLAN, first=100)
    batches = list(shard.epoch(0, min_rows=min_rows))
    assert len(batches) == PLAN.steps
    assert sum(batch.rows for batch in batches) == rows
    filled = [batch for batch in batches if batch.rows < min_rows]
    assert filled
    for batch in filled:
        assert batch.inputs[0].shape == (min_rows, 5)
        assert batch.label is not None
        assert (batch.label.shape, batch.label.dtype) == ((batch.rows or min_rows,), torch.int64)
        if not batch.rows:
            assert batch.weight is not None
            assert batch.weight.tolist() == [0] * min_rows
    real = [row for batch in batches for row in rows_in(batch)[: batch.rows]]
    assert sorted(row[: 7 if weighted else 6] for row in real) == sorted(rows_of(table))


@pytest.mark.parametrize("weighted", [False, True])
def test_step_weights_are_the_weights_of_the_rows_of_each_step(shard_of: Make, weighted: bool) -> None:
    shard = shard_of(Table.random(203, weighted=weighted))
    expected = [batch.rows if batch.weight is None else float(batch.weight.double().sum()) for batch in shard.epoch(2)]
    assert shard.step_weights(2).tolist() == pytest.approx(expected, rel=1e-12)


def test_validation_rows_are_held_out_and_come_in_pieces(shard_of: Make) -> None:
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


def test_rows_that_do_not_say_whether_they_are_held_out_are_for_the_null_policy() -> None:
    table = Table.random(3, validated=True)
    batch = table.batches()[0]
    flags = batch.column(VALIDATION).take([None, 0, 1])
    batches = [replaced(batch, VALIDATION, flags)]
    with pytest.raises(ColumnError, match=f"column '{table.columns.validation}' has 1 row with null values") as caught:
        read_shard(batches, table.columns)
    assert caught.value.where["row"] == 0
    shard = read_shard(batches, replace(table.columns, drop_nulls=True))
    assert (shard.rows + shard.validation_rows, shard.dropped) == (2, 1)
    assert shard.validation_rows == sum(filter(None, flags.to_pylist()))


def test_the_fingerprint_is_that_of_the_training_rows_in_any_order_and_partitioning(shard_of: Make) -> None:
    table = Table.random(203, validated=True)
    fingerprint = shard_of(table).fingerprint
    trained = table.take(~table.arrays[VALIDATION])
    assert fingerprint == sum(int(key) for key in trained.arrays[KEY]) % 2**64
    assert shard_of(table.shuffled(seed=1)).fingerprint == fingerprint
    assert sum(read_shard(part.batches(), part.columns).fingerprint for part in table.parts(3)) % 2**64 == fingerprint
    assert shard_of(trained.take(np.arange(1, len(trained)))).fingerprint != fingerprint


def test_a_bad_row_is_counted_with_those_that_were_left_out_before_it() -> None:
    vectors = pa.array([[1.0, 2.0], None, [None, 1.0], [3.0, 4.0], [5.0]], pa.list_(pa.float32()))
    batch = pa.RecordBatch.from_pydict({"x0": vectors, KEY: pa.array(range(5), pa.int64())})
    spec = TensorSpec(name="x0", column="c", dtype="float32", shape=(2,))
    with pytest.raises(ColumnError, match="does not hold 2 values") as caught:
        read_shard([batch.slice(0, 1), batch], Columns(inputs=(spec,), drop_nulls=True))
    assert caught.value.where == {"column": "c", "row": 5}


def test_a_shard_keeps_nothing_of_the_batches_it_was_fed(shard_of: Make) -> None:
    table = Table.random(40)
    shard = shard_of(table)
    before = [rows_in(batch) for batch in shard.epoch(0)]
    batch = next(shard.epoch(0))
    batch.inputs[0].zero_()
    assert [rows_in(batch) for batch in shard.epoch(0)] == before
    assert shard.bytes == 40 * (5 * 4 + 4)


def test_an_epoch_that_is_ordered_ahead_is_the_same_epoch(shard_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.random(203, weighted=True)
    plain = shard_of(table)
    monkeypatch.setattr("sparktorch.data.dataset.base._AHEAD_ROWS", 10)
    ahead = read_shard(table.batches(size=30), table.columns)
    ahead.schedule(0, PLAN, epochs=3)
    made: list[tuple[int, str]] = []
    make = ahead._orders._make  # type: ignore[attr-defined]

    def watched(epoch: int) -> Any:
        made.append((epoch, threading.current_thread().name))
        return make(epoch)

    monkeypatch.setattr(ahead._orders, "_make", watched)  # type: ignore[attr-defined]
    next(ahead.epoch(0))  # as before the first step of a training with checkpoints
    for epoch in range(3):
        assert ahead.step_weights(epoch).tolist() == plain.step_weights(epoch).tolist()
        assert ahead.step_rows(epoch).tolist() == [batch.rows for batch in plain.epoch(epoch)]
        assert [rows_in(batch) for batch in ahead.epoch(epoch)] == [rows_in(batch) for batch in plain.epoch(epoch)]
    assert made == [(0, "MainThread"), (1, "sparktorch-order"), (2, "sparktorch-order")]


@pytest.mark.parametrize("first", [1, 4, 11])
def test_an_epoch_goes_on_from_any_step_as_it_would_have(
    shard_of: Make, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(shards, "_STEPS", 4)
    shard = shard_of(Table.random(203), plan=PLAN)
    whole, rest = list(shard.epoch(1)), list(shard.epoch(1, first=first))
    assert list(map(rows_in, rest)) == list(map(rows_in, whole[first:]))


def test_a_rank_without_rows_stands_in_with_the_spare_one_and_holds_nothing(shard_of: Make) -> None:
    table = Table.random(9, classes=3, weighted=True)
    shard = shard_of(table.take(np.arange(0)), plan=PLAN, placeholder=table.batches()[0].slice(4, 1))
    assert (shard.rows, shard.validation_rows, shard.bytes, shard.fingerprint) == (0, 0, 0, 0)
    assert shard.step_weights(0).tolist() == [0] * PLAN.steps
    spare = rows_of(table)[4]
    for batch in shard.epoch(0, min_rows=2):
        assert batch.rows == 0
        assert rows_in(batch) == [(*spare[:-1], 0.0)] * 2


def test_without_a_spare_row_a_rank_without_rows_holds_zeros_of_any_kind() -> None:
    kinds: list[dict[str, Any]] = [
        {"dtype": "int64"},
        {"shape": (2, 3)},
        {"shape": (2,), "sources": ("a", "b"), "dtype": "float16"},
        {"layout": "padded", "shape": (2,), "pad": 7},
        {"kind": "vector", "shape": (4,), "layout": "sparse_csr"},
        {"kind": "binary", "layout": "raw", "shape": (3,)},
        {"kind": "binary", "layout": "image", "dtype": "uint8", "shape": (3, 2, 5)},
    ]
    specs = [
        TensorSpec(**{"name": f"x{at}", "column": "c", "dtype": "float32", **kind}) for at, kind in enumerate(kinds)
    ]
    label = TensorSpec(name=LABEL, column="l", dtype="int64")
    shard = read_shard([], Columns(inputs=tuple(specs), label=label, classes=3, ignored=0))
    shard.schedule(0, PLAN)
    with closing(shard.epoch(0, min_rows=1)) as batches:
        batch = next(batches)
    shapes = [(), (2, 3), (2,), (1, 2), (1,), (4,), (3,), (3, 2, 5)]  # with the mask of the padded one
    assert [tensor.shape[1:] for tensor in batch.inputs] == shapes
    assert [tensor.to_dense().double().sum().item() for tensor in batch.inputs] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.label is not None
    assert (batch.rows, batch.label.tolist()) == (0, [0])
    text = TensorSpec(name="x0", column="c", dtype="float32", kind="any", sql="string")
    seen = Preprocess(lambda columns, **_: {"x": torch.tensor([len(word) for word in columns["c"].to_pylist()])}, ["c"])
    shard = read_shard([], Columns(inputs=(text,), preprocess=seen))
    shard.schedule(0, PLAN)
    with closing(shard.epoch(0)) as batches:
        assert next(batches).inputs[0].tolist() == [0]


def batches_of(shard: Shard, epoch: int, **options: Any) -> list[list[torch.Tensor | None]]:
    return [[*batch.inputs, batch.label, batch.weight, batch.loss_weight] for batch in shard.epoch(epoch, **options)]


@pytest.mark.parametrize(
    ("weighted", "shuffle", "budget"), [(True, True, 1), (False, True, 2_000), (True, False, 10**6)]
)
def test_batches_from_disk_are_those_from_memory_to_the_last_bit(
    tmp_path: Path, weighted: bool, shuffle: bool, budget: int
) -> None:
    table = Table.random(403, classes=3, weighted=weighted, validated=True)
    memory = read_shard(table.batches(size=30), table.columns)
    storage = RowStorage(tmp_path, budget=0)
    disk = read_shard(table.batches(size=30), table.columns, storage=storage, budget=max(budget, 40))
    for shard in (memory, disk):
        plan = SamplingPlan(rows=700, batch_size=20, seed=3, shuffle=shuffle, block=8)
        shard.schedule(150, plan, epochs=9)
        shard.weigh_classes([1.0, 0.5, 3.0])
    assert memory.weight_by_class(3) == pytest.approx(disk.weight_by_class(3), rel=1e-12)
    for epoch, first in ((0, 0), (1, 0), (1, 13), (2, 34)):
        assert memory.step_weights(epoch).tolist() == pytest.approx(disk.step_weights(epoch).tolist(), rel=1e-12)
        assert memory.step_rows(epoch).tolist() == disk.step_rows(epoch).tolist()
        ours, theirs = (batches_of(shard, epoch, first=first) for shard in (memory, disk))
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    seen = [[(*batch.inputs, batch.weight) for batch in s.validation(16, batches=9)] for s in (memory, disk)]
    torch.testing.assert_close(*seen, rtol=0, atol=0)
    disk.close()


def test_a_step_has_a_seed_of_its_own_in_each_rank() -> None:
    steps = RankSteps(SamplingPlan(rows=100, batch_size=10, seed=3), 40, 30, seeded=True)
    seeds = [context.seed for context in steps.contexts(2, 0, 10)]
    assert [context.epoch for context in steps.contexts(2, 0, 10)] == [2] * 10
    assert [seeds[0], seeds[1], seeds[9]] == [4080407407500865054, 1379048175642033642, 443196961249873548]
    assert steps.contexts(2, 4, 6) == steps.contexts(2, 0, 10)[4:6]


@pytest.mark.parametrize(
    ("budget", "rows", "runs"),
    [
        pytest.param(10**6, 160, 21, id="whole windows: a block of each of 20 strata"),
        pytest.param(8 * 20 * 24, 80, 80, id="half of each block"),
        pytest.param(1_000, 20, 20, id="one step"),
    ],
)
def test_no_more_rows_are_read_at_a_time_than_the_budget_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, rows: int, runs: int
) -> None:
    table = Table.random(2_000).by_key()
    loaded: list[Runs] = []

    def read(stored: Rows, runs: Runs, *, inputs: bool, read: Any = Rows._read) -> Any:
        loaded.append(runs)
        return read(stored, runs, inputs=inputs)

    monkeypatch.setattr(Rows, "_read", read)
    shard = read_shard(table.batches(), table.columns, storage=RowStorage(tmp_path, budget=0), budget=budget)
    shard.schedule(0, SamplingPlan(rows=2_000, batch_size=20, block=8))
    assert sum(batch.rows for batch in shard.epoch(0)) == 2_000
    assert max(found.count for found in loaded) == rows + 1  # and the last row, to fill up with
    assert max(len(found.starts) for found in loaded) <= runs + 1
    shard.close()


def test_the_system_is_told_of_the_next_window_before_the_steps_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[list[int]]] = {"prefetch": [], "load": []}
    for name, windows in asked.items():
        call = getattr(Rows, name)

        def watched(stored: Rows, numbers: Any, windows: Any = windows, call: Any = call, **options: Any) -> Any:
            windows.append(list(numbers))
            return call(stored, numbers, **options)

        monkeypatch.setattr(Rows, name, watched)
    table = Table.random(2_000).by_key()
    shard = read_shard(table.batches(), table.columns, storage=RowStorage(tmp_path, budget=0))
    shard.schedule(0, SamplingPlan(rows=2_000, batch_size=20, block=8))
    with closing(shard.epoch(0)) as batches:
        next(batches)
        assert (len(asked["prefetch"]), len(asked["load"])) == (1, 1)
        assert sum(batch.rows for batch in batches) == 1_980
    assert asked["prefetch"] == asked["load"][1:]
    shard.close()


def test_positions_are_the_places_of_the_rows_where_they_keep_them(tmp_path: Path) -> None:
    table = Table.random(100, validated=True)
    trained = rows_of(table.take(~table.arrays[VALIDATION]))
    for storage in (RowStorage(), RowStorage(tmp_path, budget=0)):
        shard = read_shard(table.batches(size=30), table.columns, storage=storage, by_key=False)
        shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=7, shuffle=False))
        assert [row for batch in shard.epoch(0) for row in rows_in(batch)] == trained
        shard.close()


@pytest.mark.parametrize(("disk", "room", "ahead"), [(False, 1.0, 1), (True, 2.0, 2), (False, 100.0, 4)])
def test_no_more_is_decoded_ahead_than_the_budget_has_room_for(
    tmp_path: Path, disk: bool, room: float, ahead: int
) -> None:
    part = 20 * 1_000 * 4
    made = threading.Semaphore(0)
    taken: list[int] = []

    def widened(columns: Any, *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
        taken.append(len(taken))
        made.release()
        return {"x": torch.tensor(columns["n"], dtype=torch.float32)[:, None].expand(-1, 1_000).contiguous()}

    spec = TensorSpec(name="x0", column="n", dtype="float32", kind="any", sql="bigint")
    batch = pa.RecordBatch.from_pydict({"x0": pa.array(range(400)), KEY: pa.array(np.arange(400) << 40)})
    columns = Columns(inputs=(spec,), preprocess=Preprocess(widened, ["n"]))
    storage = RowStorage(tmp_path, budget=0) if disk else RowStorage()
    shard = read_shard([batch], columns, storage=storage, budget=int(2 * room * part))
    shard.schedule(0, SamplingPlan(rows=400, batch_size=20, block=8, shuffle=False))
    with closing(shard.epoch(0)) as batches:
        for asked in range(1, 5):
            next(batches)
            while len(taken) < asked + ahead:
                assert made.acquire(timeout=20)
            assert len(taken) == asked + ahead
    shard.close()


def test_rows_of_a_step_come_by_length_so_that_micro_batches_are_padded_little() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 40, 200)
    table = {
        "x0": pa.array([[float(n)] * n for n in lengths], pa.list_(pa.float32())),
        LABEL: pa.array(lengths, pa.float32()),
        KEY: pa.array(draw.permutation(200) << 40),
    }
    words = TensorSpec(name="x0", column="words", dtype="float32", layout="padded", pad=-1)
    columns = Columns(inputs=(words,), label=TensorSpec(name=LABEL, column="l", dtype="float32"))
    shares, seen = {}, {}
    for by_length in (False, True):
        shard = read_shard([pa.RecordBatch.from_pydict(table)], columns, by_length=by_length)
        shard.schedule(0, SamplingPlan(rows=200, batch_size=64, seed=1))
        steps = [micro_batches(batch, 4, min_rows=1) for batch in shard.epoch(0)]
        for part in (part for step in steps for part in step):
            (values, mask), counts = part.inputs, part.label
            assert counts is not None
            assert values.shape == mask.shape == (part.rows, max(1, int(counts.max())))
            assert mask.sum(1).tolist() == counts.tolist() == part.lengths[0].tolist()
            assert torch.equal(values, torch.where(mask, counts[:, None], -1))
        places, elements = map(sum, zip(*map(padding, steps), strict=True))
        assert elements == lengths.sum()
        shares[by_length] = 1 - elements / places
        seen[by_length] = [sorted(n for part in step for n in part.label.tolist()) for step in steps]  # type: ignore[union-attr]
    assert seen[False] == seen[True]  # the same rows in every step
    assert shares[True] < 0.2 < 0.4 < shares[False]
