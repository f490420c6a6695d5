"""Micro-batches, precision, and what is validated when; the rest is in tests/dist/strategies/test_conformance.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Counting, Score
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
