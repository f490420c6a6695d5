"""Odd modules and few rows train on several ranks as in one process, and the rows of a batch are those written here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, input_name
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import WIDTH, Table
from tests.support.nets import Logarithm, Normalised, Seen, Spare, mean_cross_entropy
from tests.support.ranks import train_job, train_on
from tests.support.small import small_job

ROWS, BATCH, EPOCHS, SEED = 1_001, 64, 3, 11
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def job_for(table: Table, **config: Any) -> TrainJob:
    return small_job(table, {"optimizer_params": {"weight_decay": 0.05}, "learning_rate": 3e-3}, **config)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_normalised_modules_train_steps_of_one_row_with_a_loss_that_is_a_mean() -> None:
    table = Table.random(5, classes=3)
    job = job_for(table, epochs=2, batch_size=4)
    job = replace(job, recipe=replace(job.recipe, module=Normalised, loss=mean_cross_entropy))
    for ranks in (1, 2):
        state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
        assert all(value.isfinite().all() for value in state.values())
        assert np.isfinite(metas[0]["history"][-1]["loss"])


@pytest.mark.parametrize("module", [Spare, Logarithm])
def test_a_module_that_one_process_trains_is_trained_by_several(module: type[nn.Module]) -> None:
    table = Table.random(ROWS)
    job = job_for(table, epochs=1, unused_parameters=module is Spare)
    job = replace(job, recipe=replace(job.recipe, module=module), placeholder=table.batches()[0].slice(7, 1))
    alone, _ = train_on([table.batches()], job)
    for partitions in ([part.batches() for part in table.parts(2)], [table.batches(), []]):
        assert_same_weights(train_on(partitions, job)[0], alone)


def test_ranks_train_the_rows_that_are_written_here(tmp_path: Path) -> None:
    rows = 11
    random = Table.random(rows)
    x = np.zeros((rows, WIDTH), np.float32)
    x[:, 0] = np.arange(rows)
    keys = (np.arange(rows, dtype=np.uint64) * np.uint64(2**64 // rows)).view(np.int64)
    table = replace(random, arrays={**random.arrays, input_name(0): x, KEY: keys})
    job = train_job(
        table,
        Recipe(module=Seen, module_params={"folder": str(tmp_path)}),
        TrainConfig(task="regression", batch_size=4, epochs=2, seed=7),
    )
    train_on([part.batches() for part in table.parts(2)], job)
    files = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    steps = [sorted(int(number) for line in both for number in line.split()) for both in zip(*files, strict=True)]
    assert steps == [[1, 3, 7, 8], [0, 4, 6, 9], [2, 5, 10], [0, 3, 4, 9], [2, 5, 7, 10], [1, 6, 8]]
