"""The moving average of the weights is torch's, on any number of ranks, and is what the model gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.parts import Steps
from tests.support.ranks import train_job, train_on
from tests.support.reference import Part, global_batches, validation_rows

DECAY = 0.9
TABLE = Table.random(403, weighted=True, validated=True)
JOB = train_job(
    TABLE,
    Recipe(module=Steps, optimizer="SGD", optimizer_params={"momentum": 0.9}, learning_rate=0.05),
    TrainConfig(task="regression", batch_size=64, epochs=3, seed=11, ema_decay=DECAY),
)

STRATEGIES: dict[str, dict[str, int]] = {
    "ddp": {},
    "zero3": {"min_parameters": 10},
    "localSGD": {"period": 1},
    "parameterServer": {"staleness": 0},
}


def loss_of(module: nn.Module, part: Part) -> torch.Tensor:
    losses: torch.Tensor = (module(part.x) - part.y) ** 2
    return (losses * part.w).sum() / part.w.sum()


def by_torch() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(JOB.config.seed)
    module = Steps()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    held_out = validation_rows(TABLE)
    losses: list[float] = [0.0] * JOB.config.epochs
    for epoch, part in global_batches(TABLE, JOB.config):
        optimizer.zero_grad()
        loss_of(module.train(), part).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        averaged.update_parameters(module)
        with torch.no_grad():
            losses[epoch] = float(loss_of(averaged.module.eval(), held_out))
    return module.state_dict(), averaged.module.state_dict(), losses


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), *((name, 3) for name in STRATEGIES)])
def test_the_average_is_validated_and_returned_while_the_weights_train_on(strategy: str, ranks: int) -> None:
    last, averages, losses = by_torch()
    assert not torch.allclose(last["layers.0.weight"], averages["layers.0.weight"], atol=1e-3)
    job = replace(JOB, config=replace(JOB.config, strategy=strategy, strategy_params=STRATEGIES[strategy]))
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    assert int(state.pop("steps")) == int(last["steps"])  # buffers are not averaged
    del averages["steps"]
    torch.testing.assert_close(state, averages, atol=1e-5, rtol=0)
    assert [record["val_loss"] for record in metas[0]["history"]] == pytest.approx(losses, abs=1e-5)


def test_early_stopping_keeps_the_average_of_the_best_validation() -> None:
    config = replace(JOB.config, epochs=40, patience=2, ema_decay=0.5)
    job = replace(JOB, recipe=replace(JOB.recipe, learning_rate=0.4), config=config)
    state, metas = train_on([part.batches() for part in TABLE.parts(2)], job)
    losses = [record["val_loss"] for record in metas[0]["history"]]
    assert len(losses) == losses.index(min(losses)) + 1 + 2 < 40
    module = Steps().eval()
    module.load_state_dict(state)
    with torch.no_grad():
        loss = float(loss_of(module, validation_rows(TABLE)))
    assert loss == pytest.approx(min(losses), abs=1e-5)
