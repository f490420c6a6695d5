"""Clipping, accumulation, schedules and precision give on N ranks what a plain torch loop gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Counting, Score
from tests.support.ranks import train_job, train_on
from tests.support.reference import epoch_batches, tensors

ROWS, BATCH, EPOCHS, SEED, RATE = 403, 64, 3, 11, 0.05
STEPS = -(-ROWS // BATCH)
TABLE = Table.random(ROWS, weighted=True)
Step = Callable[[torch.optim.Optimizer, nn.Module, int], None]


def job_for(*, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, **config}
    made: dict[str, Any] = {"module": Score, "optimizer": "SGD", "learning_rate": RATE, **(recipe or {})}
    return train_job(
        TABLE, Recipe(optimizer_params={"momentum": 0.9}, **made), TrainConfig(task="regression", **values)
    )


def plain(
    before_step: Step = lambda *_: None, after_step: Step = lambda *_: None, after_epoch: Step = lambda *_: None
) -> dict[str, torch.Tensor]:
    config = TrainConfig(batch_size=BATCH, epochs=EPOCHS, seed=SEED)
    torch.manual_seed(SEED)
    module = Score()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        for number, (x, y, w) in enumerate(map(tensors, epoch_batches(TABLE, config, epoch)), epoch * STEPS + 1):
            optimizer.zero_grad()
            ((module(x) - y) ** 2 * w).sum().div(w.sum()).backward()
            before_step(optimizer, module, number)
            optimizer.step()
            after_step(optimizer, module, number)
        after_epoch(optimizer, module, epoch)
    return module.state_dict()


def check(job: TrainJob, expected: dict[str, torch.Tensor], strategy: str) -> list[dict[str, Any]]:
    job = replace(job, config=replace(job.config, strategy=strategy))
    history: list[dict[str, Any]] = []
    for count in (1, 3) if strategy == "ddp" else (3,):
        state, metas = train_on([part.batches() for part in TABLE.parts(count)], job)
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
        history = metas[0]["history"]
    return history


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_the_norm_of_the_gradient_is_that_of_the_whole_batch(strategy: str) -> None:
    def clip(_: Any, module: nn.Module, __: int) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    expected = plain(clip)
    assert not torch.allclose(expected["layers.0.weight"], plain()["layers.0.weight"], atol=1e-3)
    check(job_for(clip_norm=0.1), expected, strategy)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_elements_of_the_gradient_are_cut_off(strategy: str) -> None:
    def clip(_: Any, module: nn.Module, __: int) -> None:
        nn.utils.clip_grad_value_(module.parameters(), 0.02)

    check(job_for(clip_value=0.02), plain(clip), strategy)


def test_micro_batches_send_their_gradients_once_a_step() -> None:
    def counts(**split: int) -> tuple[int, int]:
        job = job_for(recipe={"module": Counting}, **split)
        state, _ = train_on([part.batches() for part in TABLE.parts(2)], job)
        return int(state["forwards"]), int(state["collectives"])

    forwards, collectives = counts()
    assert forwards == STEPS * EPOCHS
    assert collectives >= forwards
    assert counts(accumulation_steps=4) == (4 * forwards, collectives)


def by_torch(make: Callable[[torch.optim.Optimizer], Any], *, by_step: bool) -> dict[str, torch.Tensor]:
    made: list[Any] = []

    def first(optimizer: torch.optim.Optimizer, _: Any, __: int) -> None:
        if not made:
            made.append(make(optimizer))

    def step(*_: Any) -> None:
        made[0].step()

    return plain(first, after_step=step) if by_step else plain(first, after_epoch=step)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedules_of_torch_step_by_epoch_or_by_step(strategy: str) -> None:
    cosine = by_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS * STEPS), by_step=True)
    history = check(job_for(recipe={"scheduler": "CosineAnnealingLR"}, schedule_interval="step"), cosine, strategy)
    rates = [record["learning_rate"] for record in history]
    assert RATE > rates[0] > rates[1] > rates[2] > 0

    staged = by_torch(lambda o: lr_scheduler.StepLR(o, 1, 0.3), by_step=False)
    options = {"scheduler": "StepLR", "scheduler_params": {"step_size": 1, "gamma": 0.3}}
    history = check(job_for(recipe=options), staged, strategy)
    assert [record["learning_rate"] for record in history] == pytest.approx([RATE, RATE * 0.3, RATE * 0.09])


def test_a_plateau_of_the_loss_lowers_the_rate_on_every_rank() -> None:
    def after(optimizer: torch.optim.Optimizer, _: Any, epoch: int) -> None:
        if epoch == 1:
            optimizer.param_groups[0]["lr"] = RATE * 0.1

    options = {
        "scheduler": "ReduceLROnPlateau",
        "scheduler_params": {"patience": 0, "threshold": 1e9, "threshold_mode": "abs"},
    }
    history = check(job_for(recipe=options), plain(after_epoch=after), "ddp")
    assert [record["learning_rate"] for record in history] == pytest.approx([RATE, RATE, RATE * 0.1])


def test_bfloat16_trains_close_to_float32_and_keeps_its_weights_in_it() -> None:
    expected = plain()
    state, metas = train_on([part.batches() for part in TABLE.parts(2)], job_for(precision="bf16"))
    assert all(value.dtype == torch.float32 for value in state.values())
    difference = max(float((state[name] - expected[name]).abs().max()) for name in expected)
    assert 1e-5 < difference < 0.1
    assert metas[0]["history"][-1]["loss"] < metas[0]["history"][0]["loss"]


@pytest.mark.parametrize(
    ("strategy", "clips"),
    [("ddp", {}), ("ddp", {"clip_norm": 0.2}), ("zero3", {"clip_norm": 0.2, "clip_value": 0.05})],
)
def test_the_history_tells_the_norm_of_the_gradient_before_clipping(clips: dict[str, float], strategy: str) -> None:
    norms: list[float] = []

    def measure(_: Any, module: nn.Module, number: int) -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
        if "clip_value" in clips:
            nn.utils.clip_grad_value_(module.parameters(), clips["clip_value"])
        if clips:
            nn.utils.clip_grad_norm_(module.parameters(), clips["clip_norm"])

    plain(measure)
    _, metas = train_on([part.batches() for part in TABLE.parts(2)], job_for(strategy=strategy, **clips))
    every = strategy == "ddp" and clips.keys() == {"clip_norm"}
    for epoch, record in enumerate(metas[0]["history"]):
        steps = range(epoch * STEPS, (epoch + 1) * STEPS)
        seen = [norms[step] for step in steps if every or step % 32 == 0 or step == steps[-1]]
        assert record["gradient_norm"] == pytest.approx(sum(seen) / len(seen), rel=1e-4)
        assert record["gradient_norm_max"] == pytest.approx(max(seen), rel=1e-4)


def test_validation_runs_every_few_epochs_and_after_the_last() -> None:
    table = Table.random(ROWS, validated=True)
    job = replace(job_for(epochs=5, validation_interval=2), columns=table.columns)
    _, metas = train_on([part.batches() for part in table.parts(2)], job)
    assert ["val_loss" in record for record in metas[0]["history"]] == [False, True, False, True, True]
