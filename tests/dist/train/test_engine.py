"""Micro-batches, precision, rows of a batch, odd modules; the rest is in tests/dist/strategies/test_conformance.py."""

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
from tests.support.nets import Counting, Logarithm, Score, Seen, Spare
from tests.support.ranks import train_job, train_on
from tests.support.reference import plain_training, validated
from tests.support.small import small_job, trained

ROWS, EPOCHS, STEPS, RATE = 403, 3, 7, 0.05
TABLE = Table.random(ROWS, weighted=True)
VALIDATED = Table.random(ROWS, weighted=True, validated=True)


def job_for(table: Table = TABLE, *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    made = {"optimizer": "SGD", "learning_rate": RATE, "optimizer_params": {"momentum": 0.9}, **(recipe or {})}
    return small_job(table, made, **config)


def test_micro_batches_send_their_gradients_once_a_step() -> None:
    def counts(**split: int) -> tuple[int, int]:
        state, _ = trained(TABLE, job_for(recipe={"module": Counting}, **split))
        return int(state["forwards"]), int(state["collectives"])

    forwards, collectives = counts()
    assert forwards == STEPS * EPOCHS
    assert collectives >= forwards
    assert counts(accumulation_steps=4) == (4 * forwards, collectives)


def test_bfloat16_trains_close_to_float32_and_keeps_its_weights_in_it() -> None:
    expected, _ = plain_training(TABLE, job_for())
    state, history = trained(TABLE, job_for(precision="bf16"))
    assert all(value.dtype == torch.float32 for value in state.values())
    difference = max(float((state[name] - expected[name]).abs().max()) for name in expected)
    assert 1e-5 < difference < 0.1
    assert history[-1]["loss"] < history[0]["loss"]


def test_validation_runs_every_few_epochs_and_after_the_last() -> None:
    _, history = trained(VALIDATED, job_for(VALIDATED, epochs=5, validation_interval=2))
    assert ["val_loss" in record for record in history] == [False, True, False, True, True]


def test_early_stopping_keeps_the_average_of_the_best_validation() -> None:
    job = job_for(VALIDATED, recipe={"learning_rate": 0.4}, epochs=40, patience=2, ema_decay=0.5)
    state, history = trained(VALIDATED, job)
    losses = [record["val_loss"] for record in history]
    assert len(losses) == losses.index(min(losses)) + 1 + 2 < 40
    module = Score()
    module.load_state_dict(state)
    assert validated(VALIDATED, job, module)["val_loss"] == pytest.approx(min(losses), abs=1e-5)


def test_a_decay_of_0_trains_the_weights_of_no_average() -> None:
    plain, zero, averaged = (trained(VALIDATED, job_for(VALIDATED, ema_decay=decay))[0] for decay in (None, 0.0, 0.5))
    assert all(torch.equal(zero[name], plain[name]) for name in plain)
    assert not all(torch.equal(averaged[name], plain[name]) for name in plain)


@pytest.mark.parametrize("module", [Spare, Logarithm])
def test_a_module_that_one_process_trains_is_trained_by_several(module: type[nn.Module]) -> None:
    table = Table.random(ROWS)
    job = job_for(table, recipe={"module": module, "learning_rate": 3e-3}, epochs=1, unused_parameters=module is Spare)
    job = replace(job, placeholder=table.batches()[0].slice(7, 1))
    alone, _ = train_on([table.batches()], job)
    for partitions in ([part.batches() for part in table.parts(2)], [table.batches(), []]):
        torch.testing.assert_close(train_on(partitions, job)[0], alone, atol=1e-5, rtol=0.0)


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
