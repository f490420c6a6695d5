"""Ranks that keep their rows on disk train what one process trains from memory, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch import Callback
from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.train.callbacks import FitContext
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Mlp, Score
from tests.support.ranks import DEVICE, control_server, run_ranks, train_job, train_on

TABLE = Table.random(1_001, classes=3, weighted=True, validated=True)
ON_DISK = StorageConfig(kind="disk", budget=1)


class Ends(Callback):
    """Ends one rank after a step, the first time: by an exception, an interrupt, or a signal."""

    ranks = "all"

    def __init__(self, folder: Path, how: str, *, rank: int = 1, step: int = 9) -> None:
        self._flag, self._how, self._place = folder / "ended", how, (rank, step)

    def on_step_end(self, context: FitContext) -> None:
        if (context.world.rank, context.step) != self._place or self._flag.exists():
            return
        self._flag.touch()
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"raises": ValueError, "interrupted": KeyboardInterrupt}[self._how]("on purpose")


def job_for(table: Table, *, storage: StorageConfig = ON_DISK, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": 64, "epochs": 3, "seed": 11, "shuffle_block": 4, **config}
    classes = table.columns.classes
    return train_job(
        table,
        Recipe(module=Mlp if classes else Score, loss="CrossEntropyLoss" if classes else "MSELoss"),
        TrainConfig(task="classification" if classes else "regression", **values),
        storage=storage,
    )


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


def test_an_empty_rank_takes_part() -> None:
    job = job_for(TABLE)
    alone, _ = train_on([TABLE.batches()], job)
    state, metas = train_on([[], TABLE.batches()], job)
    torch.testing.assert_close(state, alone, atol=1e-5, rtol=0)
    assert [meta["rows"] for meta in metas] == [0, metas[1]["rows"]]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_training_from_disk_goes_on_from_its_checkpoint_to_the_same_bits(strategy: str, tmp_path: Path) -> None:
    table = Table.random(600, weighted=True)

    def job(folder: str, *callbacks: Callback, **changed: Any) -> TrainJob:
        made = replace(
            job_for(table, strategy=strategy, epochs=2),
            checkpoint=CheckpointConfig(directory=str(tmp_path / folder), unit="step", owner="me"),
            **changed,
        )
        return replace(made, recipe=replace(made.recipe, callbacks=callbacks))

    expected, _ = train_on(parts(table, 2), job("calm", storage=StorageConfig()))
    with control_server() as server:
        ended = run_ranks(server, parts(table, 2), job("rough", Ends(tmp_path, "killed", step=13)))
    assert -signal.SIGKILL in [rank.exitcode for rank in ended]
    found, _ = train_on(parts(table, 2), job("rough"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", ["raises", "interrupted"])
def test_a_rank_that_fails_ends_its_threads(how: str, tmp_path: Path) -> None:
    job = job_for(TABLE)
    job = replace(job, recipe=replace(job.recipe, callbacks=(Ends(tmp_path, how),)))
    with control_server() as server:
        ended = run_ranks(server, parts(TABLE, 2), job)
    assert all(rank.result is None for rank in ended)
    assert -signal.SIGKILL not in [rank.exitcode for rank in ended], "a process that does not end is killed"
