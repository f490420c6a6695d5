"""A loss that is not finite stops the training with its place, or its step is left out on every rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import KEY, LABEL
from sparktorch.data.sampling.plan import SamplingPlan, rank_of_key
from sparktorch.distributed.client import PeerFailure
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.non_finite import LossWatch
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Mlp, NormalisedLogarithm
from tests.support.ranks import control_server, in_group, run_ranks, train_job, train_on
from tests.support.reference import epoch_batches, plain_training, tensors
from tests.support.small import small_job

ROWS, BATCH, EPOCHS, SEED, RATE = 301, 32, 3, 11, 0.05
STEPS = -(-ROWS // BATCH)
MARK = 1_000.0
CLEAN = Table.random(ROWS, weighted=True)
MARKED = CLEAN.with_values(LABEL, [MARK], at=101)  # one row spoils its batch


def spoilt_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.where(label == MARK, math.nan, (output - label) ** 2)


def endless_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.where(label == MARK, math.inf, (output - label) ** 2)


def spoilt_gradient(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    root = torch.where(label == MARK, 0 * output, 1).sqrt()
    return torch.where(label == MARK, root, (output - label) ** 2)


def spoilt_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = spoilt_loss(module(batch.inputs[0]), batch.label)
    return losses, {"loss": losses}


def constant_step(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
    return (module(batch.inputs[0]) - batch.label) ** 2, {"loss": 7.0, "seven": 7.0}


def job_for(config: dict[str, Any] | None = None, **recipe: Any) -> TrainJob:
    made = {"loss": spoilt_loss, "optimizer": "SGD", "optimizer_params": {"momentum": 0.9}, "learning_rate": RATE}
    return small_job(MARKED, {**made, **recipe}, batch_size=BATCH, **(config or {}))


def place_of_mark(ranks: int) -> tuple[int, int]:
    rows = MARKED.by_key()
    position = int(np.flatnonzero(rows.arrays[LABEL] == MARK)[0])
    plan = SamplingPlan(rows=ROWS, batch_size=BATCH, seed=SEED)
    rank = rank_of_key(rows.arrays[KEY][position : position + 1], ranks)[0]
    return int(rank), int(plan.steps_of(0, ROWS, 0)[position])


@pytest.mark.parametrize(
    ("recipe", "config", "value", "ranks"),
    [
        ({}, {}, "nan", 1),
        ({"loss": endless_loss}, {"accumulation_steps": 3}, "inf", 3),
        ({"loss": None, "training_step": spoilt_step}, {}, "nan", 3),
    ],
    ids=["", "micro-batches", "training step"],
)
def test_a_loss_that_is_not_finite_is_an_error_with_its_place(
    recipe: dict[str, Any], config: dict[str, Any], value: str, ranks: int
) -> None:
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in MARKED.parts(ranks)], job_for(config, **recipe))
        failure, primary = server.first_failure()
    rank, step = place_of_mark(ranks)
    assert type(failure) is ModuleError
    assert primary
    assert failure.what == f"the loss is {value}"
    assert "learningRate" in failure.hint
    place = {"rank": rank, "host": f"host-{rank}", "epoch": 1, "step": step + 1}
    assert failure.where == {"param": "nonFiniteLoss", **place}
    assert ended[rank].error == "ModuleError"
    assert all(other.error for other in ended)


@pytest.mark.parametrize(
    ("loss", "config", "step"),
    [
        (spoilt_loss, {}, spoilt_step),
        (spoilt_gradient, {"strategy": "zero3"}, None),
        (spoilt_loss, {"ema_decay": 0.9}, None),
        (endless_loss, {"micro_batch_size": 5}, None),
    ],
)
def test_a_step_is_left_out_on_all_ranks_if_it_is_spoilt_on_one(loss: Any, config: dict[str, Any], step: Any) -> None:
    job = job_for(
        {"non_finite": "skip", **config}, **({"loss": None, "training_step": step} if step else {"loss": loss})
    )
    expected, records = plain_training(MARKED, replace(job, recipe=replace(job.recipe, loss=loss)))
    assert [record["skipped_steps"] for record in records] == [1] * EPOCHS
    first, second = (part.batches() for part in MARKED.parts(2))
    for parts in ([MARKED.batches()], [first, [], second]):
        state, metas = train_on(parts, job)
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
        history = metas[0]["history"]
        assert [record["skipped_steps"] for record in history] == [1] * EPOCHS
        for name in ("loss", "train_loss") if step else ("loss",):  # what a training step measures is left out, too
            assert [record[name] for record in history] == pytest.approx([of["loss"] for of in records], abs=1e-5)


def test_a_metric_of_the_name_of_the_loss_does_not_take_its_place() -> None:
    table = Table.random(ROWS, validated=True)
    job = replace(job_for(loss=None, training_step=constant_step), columns=table.columns)
    record = train_on([part.batches() for part in table.parts(2)], job)[1][0]["history"][-1]
    assert (record["train_loss"], record["train_seven"], record["val_seven"]) == pytest.approx((7, 7, 7))
    assert 0 < record["val_loss"] < 1


def test_without_a_spoilt_step_nothing_is_left_out_and_nothing_changes() -> None:
    parts = [part.batches() for part in CLEAN.parts(2)]
    stopped, _ = train_on(parts, job_for({"strategy": "zero1"}))
    state, metas = train_on(parts, job_for({"strategy": "zero1", "non_finite": "skip"}))
    assert all(torch.equal(state[name], stopped[name]) for name in stopped)
    assert [record["skipped_steps"] for record in metas[0]["history"]] == [0] * EPOCHS


def test_running_statistics_of_a_step_that_is_left_out_are_put_back() -> None:
    table = Table.random(ROWS, classes=3).with_values("x0", [0.0], at=101)
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": 1, "seed": SEED, "non_finite": "skip"}
    job = train_job(
        table,
        Recipe(module=NormalisedLogarithm, loss="CrossEntropyLoss", optimizer="SGD", learning_rate=RATE),
        TrainConfig(task="classification", **values),
    )
    torch.manual_seed(SEED)
    module = NormalisedLogarithm()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for rows in epoch_batches(table, job.config, 0):
        x, y, _ = tensors(rows)
        if (x == 0).any():
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(train_on([table.batches()], job)[0], module.state_dict(), atol=1e-5, rtol=0)
    spread, metas = train_on([part.batches() for part in table.parts(2)], job)
    assert all(value.isfinite().all() for value in spread.values())
    assert metas[0]["history"][0]["skipped_steps"] == 1
    assert int(spread["norm.num_batches_tracked"]) == STEPS - 1


def test_an_epoch_of_which_nothing_is_left_has_no_loss() -> None:
    table = CLEAN.with_values(LABEL, [MARK] * ROWS)
    initial = job_for().recipe.build_module(SEED).state_dict()
    state, metas = train_on([part.batches() for part in table.parts(2)], job_for({"non_finite": "skip"}))
    assert all(torch.equal(state[name], initial[name]) for name in initial)
    for record in metas[0]["history"]:
        assert record["skipped_steps"] == STEPS
        assert math.isnan(record["loss"])


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_fp16_scales_down_after_gradients_that_overflow(policy: str) -> None:
    # The first gradients, scaled by 65,536, are beyond float16: those steps are left out whatever the policy.
    table = Table.random(ROWS, classes=3)
    table = replace(table, arrays={**table.arrays, "x0": 100 * table.arrays["x0"]})
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "precision": "fp16"}
    job = train_job(
        table,
        Recipe(module=Mlp, loss="CrossEntropyLoss", optimizer="SGD", learning_rate=0.01),
        TrainConfig(task="classification", non_finite=policy, **values),
    )
    state, metas = train_on([part.batches() for part in table.parts(2)], job)
    history = metas[0]["history"]
    assert all(value.isfinite().all() for value in state.values())
    assert history[-1]["loss"] < history[0]["loss"]
    if policy == "skip":
        assert 0 < history[0]["skipped_steps"] < STEPS
        assert history[-1]["skipped_steps"] == 0


# Devices whose losses are not read at every step


@pytest.mark.parametrize("first", [0, 32, 99])
def test_losses_that_are_not_read_at_every_step_still_name_the_first_bad_one(first: int) -> None:
    watch, losses = LossWatch(World(), at_once=False), torch.zeros(100, dtype=torch.float64)
    taken: list[int] = []

    def train() -> None:
        for step in range(100):
            taken.append(step)
            losses[step] = math.nan if step >= first else 1.0
            watch.check(losses[step])
            watch.look_back(losses, step + 1)

    with pytest.raises(ModuleError, match="the loss is nan") as caught:
        train()
    assert caught.value.where["step"] == first + 1
    assert taken[-1] - first < 32


def _watch(world: World) -> Any:
    watch, losses = LossWatch(world, at_once=False), torch.zeros(80)
    try:
        for step in range(80):
            losses[step] = math.nan if step >= 40 + (world.rank == 0) else 1.0  # of rank 1 first, then of all
            watch.look_back(losses, step + 1)
    except (ModuleError, PeerFailure) as error:
        return type(error).__name__, step, getattr(error, "where", {}).get("step")


def test_the_rank_that_was_first_is_the_one_that_says_so() -> None:
    assert in_group(2, _watch) == [("PeerFailure", 63, None), ("ModuleError", 63, 41)]
