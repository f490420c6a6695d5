"""N ranks train on whole groups, or on windows of them, what a plain loop trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import StorageConfig, TrainConfig
from sparktorch.data.columns import GROUP, LABEL, WEIGHT, Window
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.tasks.ranking.loss import LOSSES
from sparktorch.train.recipe.groups_loss import GroupsLossStep
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import WIDTH, Table
from tests.support.groups import grouped, parts, samples_of
from tests.support.nets import Score
from tests.support.ranking import PLAIN
from tests.support.ranks import train_job, train_on

SIZES = [int(size) for size in np.random.default_rng(3).integers(1, 60, 90)]
WINDOW = Window(context=6, horizon=2, step=2)
OfGroup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


class Forecast(nn.Module):
    """The next two values of a series, from its last six rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WINDOW.context * WIDTH, WINDOW.horizon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


def spread(output: torch.Tensor, label: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """One loss per group that no mean over its rows is."""
    pairs = zip(output.split(sizes.tolist()), label.split(sizes.tolist()), strict=True)
    return torch.stack([of_group(*pair) for pair in pairs])


def largest(output: torch.Tensor, label: torch.Tensor, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"largest": torch.stack([part.max() for part in output.split(sizes.tolist())])}


def job_for(table: Table, **config: Any) -> TrainJob:
    window = table.columns.groups.window  # type: ignore[union-attr]
    step = GroupsLossStep(spread, metrics=largest) if window is None else None
    recipe = Recipe(module=Score if window is None else Forecast, loss=None if step else "MSELoss", training_step=step)
    values: dict[str, Any] = {"batch_size": 16, "epochs": 2, "seed": 5, **config}
    storage = values.pop("storage", StorageConfig())
    return train_job(table, recipe, TrainConfig(task="regression", **values), storage=storage)


def of_group(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`spread` of one group."""
    return (scores - labels).square().sum().sqrt()


def loss_of(
    module: nn.Module, table: Table, samples: list[Any], loss: OfGroup = of_group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns losses and weights of samples, one by one."""
    window, losses, weights = table.columns.groups.window, [], []  # type: ignore[union-attr]
    for rows in samples:
        seen, told = (rows, rows) if window is None else (rows[: window.context], rows[window.context :])
        x, y = torch.from_numpy(table.arrays["x0"][seen]), torch.from_numpy(table.arrays[LABEL][told]).float()
        if window is None:
            losses.append(loss(module(x), y))
        else:
            losses.append((module(x[None])[0] - y).square().mean())
        weights.append(float(table.arrays[WEIGHT][told].mean()) if WEIGHT in table.arrays else 1.0)
    return torch.stack(losses), torch.tensor(weights)


def plain_training(
    table: Table, job: TrainJob, loss: OfGroup = of_group
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    config, (trained, validated) = job.config, samples_of(table)
    plan = SamplingPlan(rows=len(trained), batch_size=config.batch_size, seed=config.seed, block=config.shuffle_block)
    torch.manual_seed(config.seed)
    module = job.recipe.module()  # type: ignore[operator]
    optimizer = getattr(torch.optim, str(job.recipe.optimizer))(module.parameters(), lr=job.recipe.learning_rate)
    history = []
    for epoch in range(config.epochs):
        steps, total, whole = plan.steps_of(0, len(trained), epoch), 0.0, 0.0
        for step in range(plan.steps):
            samples = [trained[number] for number in np.flatnonzero(steps == step)]
            losses, weights = loss_of(module, table, samples, loss)
            optimizer.zero_grad()
            ((losses * weights).sum() / weights.sum()).backward()
            optimizer.step()
            total, whole = total + float((losses.detach() * weights).sum()), whole + float(weights.sum())
        history.append({"loss": total / whole})
        if validated:
            with torch.no_grad():
                losses, weights = loss_of(module, table, validated, loss)
                history[-1]["val_loss"] = float((losses * weights).sum() / weights.sum())
    return module.state_dict(), history


CASES = {
    "groups": grouped(SIZES, validated=True),
    "weighted groups": grouped(SIZES, weighted=True, validated=True),
    "windows": grouped(SIZES, window=WINDOW, validated=True),
    "weighted windows": grouped(SIZES, window=WINDOW, weighted=True),
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_trains_the_samples_that_one_plain_loop_trains(case: str, ranks: int) -> None:
    table = CASES[case]
    job = job_for(table)
    expected, history = plain_training(table, job)
    state, metas = train_on([part.batches(size=31) for part in parts(table.shuffled(ranks), ranks)], job)
    torch.testing.assert_close(state, expected, **TOLERANCE)
    for record, metrics in zip(metas[0]["history"], history, strict=True):
        assert {name: record.get(name) for name in metrics} == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("case", ["weighted groups", "weighted windows"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"storage": StorageConfig(kind="disk", budget=1), "shuffle_block": 4}, id="on disk"),
        pytest.param({"accumulation_steps": 3}, id="micro-batches"),
        pytest.param({"strategy": "zero3"}, id="zero3"),
    ],
)
def test_other_ways_to_take_a_step_train_the_same(case: str, config: dict[str, Any]) -> None:
    table = CASES[case]
    job = job_for(table, **config)
    state, _ = train_on([part.batches() for part in parts(table, 2)], job)
    torch.testing.assert_close(state, plain_training(table, job)[0], **TOLERANCE)


def test_metrics_of_validation_are_means_over_groups() -> None:
    table = CASES["weighted groups"]
    job = job_for(table, epochs=1)
    _, validated = samples_of(table)
    found = []
    for ranks in (1, 3):
        state, metas = train_on([part.batches() for part in parts(table, ranks)], job)
        found.append(metas[0]["history"][0]["val_largest"])
    module = Score()
    module.load_state_dict(state)
    with torch.no_grad():
        most = [float(module(torch.from_numpy(table.arrays["x0"][rows])).max()) for rows in validated]
    weights = [table.arrays[WEIGHT][rows[0]] for rows in validated]
    assert found == pytest.approx([np.average(most, weights=weights)] * 2, abs=1e-5)


def test_ranks_without_groups_train_with_the_others() -> None:
    table = CASES["groups"]
    only = table.take(table.arrays[GROUP] == table.arrays[GROUP][0])
    few = Table({**only.arrays, "v": np.zeros(len(only), bool)}, only.columns)
    job = job_for(few, epochs=1)
    alone, _ = train_on([few.batches()], job)
    state, _ = train_on([few.batches(), []], job)
    torch.testing.assert_close(state, alone, **TOLERANCE)


def standardized(output: torch.Tensor, label: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """One loss per group, which one row or equal rows do not have."""
    pairs = zip(output.split(sizes.tolist()), label.split(sizes.tolist()), strict=True)
    return torch.stack([of_differing(*pair) for pair in pairs])


def of_differing(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (scores / scores.std() - labels / labels.std()).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("sizes", [[20], [9, 12, 30, 8, 20]], ids=["a rank without groups", "steps without groups"])
def test_a_loss_need_not_be_defined_for_placeholders(sizes: list[int], strategy: str) -> None:
    table = grouped(sizes)
    job = job_for(table, batch_size=1, strategy=strategy)
    job = replace(job, recipe=replace(job.recipe, training_step=GroupsLossStep(standardized)))
    expected, _ = plain_training(table, job, of_differing)
    state, _ = train_on([part.batches() for part in parts(table, 2)], job)
    torch.testing.assert_close(state, expected, **TOLERANCE)


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_train_a_ranking_as_a_plain_loop_over_its_groups(name: str) -> None:
    table = grouped(SIZES[:40], weighted=True)
    job = job_for(table, batch_size=12)
    # The gradient of the last bias is 0 but for rounding, which AdamW would scale up.
    ranking = {"training_step": GroupsLossStep(LOSSES[name]), "optimizer": "SGD", "learning_rate": 0.05}
    job = replace(job, recipe=replace(job.recipe, **ranking))
    expected, _ = plain_training(table, job, PLAIN[name])
    state, _ = train_on([part.batches() for part in parts(table, 3)], job)
    torch.testing.assert_close(state, expected, **TOLERANCE)
