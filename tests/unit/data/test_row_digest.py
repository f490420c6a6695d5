"""Digests of rows: any change of a row shows, its place does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparktorch.data.columns import KEY, LABEL, VALIDATION, TensorSpec
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.fields.base import Vectors
from sparktorch.data.sampling.row_keys import RowDigests
from sparktorch.data.storage import RowStorage
from tests.support.frames import Table, record_batches
from tests.unit.data.test_plan import reference_mix as splitmix

MASK = 2**64 - 1
VECTOR = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})


def digests(values: np.ndarray[Any, Any], name: str = "x0") -> list[int]:
    found = RowDigests(np.zeros(len(values), np.uint64))
    found.add(name, values)
    return [int(digest) & MASK for digest in found.finish()]


def by_hand(row: np.ndarray[Any, Any], name: str) -> int:
    """Returns the digest of a row, word by word."""
    golden, salt, total = 0x9E3779B97F4A7C15, 0, 0
    for byte in name.encode():
        salt = splitmix((salt + byte * golden + golden) & MASK)
    for place, word in enumerate(row.view(np.uint32).tolist()):
        total += word * splitmix((salt + place * golden) & MASK)
    return splitmix(total & MASK)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_a_digest_is_the_weighted_sum_of_the_words_of_a_row(dtype: str) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7)).astype(dtype)
    assert digests(rows) == [by_hand(row, "x0") for row in rows]
    assert digests(rows, "y") == [by_hand(row, "y") for row in rows]


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8"])
def test_any_bit_that_changes_changes_the_digest_of_its_row_and_of_no_other(dtype: str) -> None:
    rows = np.random.default_rng(0).integers(-99, 99, (4, 3, 2)).astype(dtype)
    before = digests(rows)
    seen = {before[2]}
    for bit in range(8 * rows[2].nbytes):
        changed = rows.copy()
        changed[2].reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        after = digests(changed)
        assert after[:2] + after[3:] == before[:2] + before[3:]
        seen.add(after[2])
    assert len(seen) == 1 + 8 * rows[2].nbytes


def test_a_batch_of_which_no_row_is_left_is_digested() -> None:
    table = Table.random(60)
    table = replace(
        table.with_values(LABEL, [np.nan] * 30), columns=replace(table.columns, keyed=False, drop_nulls=True)
    )
    shard = read_shard(table.batches(size=30), table.columns, by_key=False)
    assert (shard.rows, shard.dropped) == (30, 30)
    kept = table.take(np.arange(30, 60))
    assert shard.fingerprint == read_shard(kept.batches(), kept.columns, by_key=False).fingerprint


def test_a_vector_has_the_same_digest_dense_and_sparse() -> None:
    spec = TensorSpec(name="x0", column="features", dtype="float32", shape=(4,), kind="vector")

    def dense(*values: float) -> dict[str, Any]:
        return {"size": None, "indices": [], "values": values}

    def sparse(held: dict[int, float]) -> dict[str, Any]:
        return {"size": 4, "indices": list(held), "values": list(held.values())}

    def digests_of(*rows: dict[str, Any]) -> list[int]:
        found = RowDigests(np.zeros(len(rows), np.uint64))
        Vectors(spec, RowStorage()).append(pa.array(rows, VECTOR), digests=found)
        return list(found.finish())

    expected = digests_of(dense(0, 1.5, 0, -2), dense(3, 0, 0, 0), dense(0, 0, 0, 0))
    assert digests_of(sparse({1: 1.5, 3: -2}), sparse({0: 3, 2: 0}), sparse({})) == expected
    assert digests_of(sparse({1: 1.5, 3: -2}), dense(3, 0, 0, 0), sparse({})) == expected
    assert digests_of(dense(0, 1.5, 0, -2), sparse({1: 3}), dense(0, 0, 0, 0))[1] not in expected


def test_the_fingerprint_of_rows_without_keys_is_that_of_their_tensors_in_any_order_and_partitioning() -> None:
    table = Table.random(203, weighted=True, validated=True)

    def fingerprint(*tables: Table, without: str = KEY) -> int:
        total = 0
        for one in tables:
            arrays = {name: values for name, values in one.arrays.items() if name != without}
            columns = replace(one.columns, keyed=False)
            total += read_shard(record_batches(arrays, size=30), columns, by_key=False).fingerprint
        return total % 2**64

    expected = fingerprint(table)
    assert fingerprint(table.shuffled(seed=1)) == fingerprint(*table.parts(3)) == expected
    assert fingerprint(table.take(~table.arrays[VALIDATION])) == expected
    for name in table.arrays.keys() - {KEY, VALIDATION}:
        moved = replace(table, arrays={**table.arrays, name: np.roll(table.arrays[name], 1, axis=0)})
        assert fingerprint(moved) != expected, name
    assert fingerprint(table, without="") != expected  # a key that stands for other columns
