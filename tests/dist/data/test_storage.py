"""Ranks that keep their rows on disk train what one process trains from memory, and leave nothing behind."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.config import StorageConfig
from sparktorch.worker import TrainJob
from tests.support.callbacks import FailsIn
from tests.support.frames import Table
from tests.support.ranks import DEVICE, control_server, run_ranks, train_on
from tests.support.small import small_job

TABLE = Table.random(1_001, classes=3, weighted=True, validated=True)
ON_DISK = StorageConfig(kind="disk", budget=1)


def job_for(table: Table, *, storage: StorageConfig = ON_DISK, **config: Any) -> TrainJob:
    return replace(small_job(table, **{"shuffle_block": 4, **config}), storage=storage)


def parts(table: Table, ranks: int) -> list[Any]:
    return [part.batches() for part in table.parts(ranks)]


@pytest.fixture(scope="module")
def from_memory() -> dict[str, torch.Tensor]:
    job = job_for(TABLE, storage=StorageConfig(), class_weights="balanced")
    return train_on([TABLE.batches()], job)[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks_trains_from_disk_what_one_trains_from_memory(
    ranks: int, from_memory: dict[str, torch.Tensor]
) -> None:
    table = TABLE.shuffled(seed=ranks) if ranks == 2 else TABLE.by_key()
    state, metas = train_on(parts(table, ranks), job_for(table, class_weights="balanced"))
    torch.testing.assert_close(state, from_memory, atol=1e-5, rtol=0)
    for meta in metas:
        assert meta["storage"] == "disk"
        assert 0 < meta["data_wait_share"] < 1
    shares = [meta["data_wait_share"] for meta in metas]
    mean = sum(record["data_wait_share"] for record in metas[0]["history"]) / 3
    assert min(shares) / 3 < mean < max(shares) * 3


def test_each_rank_goes_to_disk_by_itself_and_the_order_stays() -> None:
    table = Table.random(40_000).by_key()
    partitions = [table.take(rows).batches(size=1_000) for rows in (np.arange(39_900), np.arange(39_900, 40_000))]
    config: dict[str, Any] = {"batch_size": 2_048, "epochs": 1}
    state, metas = train_on(partitions, job_for(table, storage=StorageConfig(kind="auto", budget=1), **config))
    assert [meta["storage"] for meta in metas] == ["disk", "memory" if DEVICE == "cpu" else "device"]
    expected, _ = train_on(partitions, job_for(table, storage=StorageConfig(), **config))
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_rank_that_fails_ends_its_threads() -> None:
    job = job_for(TABLE)
    job = replace(job, recipe=replace(job.recipe, callbacks=(FailsIn("main"),)))
    with control_server() as server:
        ended = run_ranks(server, parts(TABLE, 2), job)
    assert all(rank.result is None for rank in ended)
    assert -signal.SIGKILL not in [rank.exitcode for rank in ended], "a process that does not end is killed"
