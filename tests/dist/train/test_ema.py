"""The moving average of the weights is torch's, on any number of ranks, and is what the model gets."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparktorch.base.config import TrainConfig
from sparktorch.train.numerics.ema import MovingAverage
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.parts import Steps
from tests.support.ranks import train_on
from tests.support.reference import Part, global_batches, validation_rows

DECAY = 0.9
TABLE = Table.random(403, weighted=True, validated=True)
JOB = TrainJob(
    columns=TABLE.columns,
    recipe=Recipe(module=Steps, optimizer="SGD", optimizer_params={"momentum": 0.9}, learning_rate=0.05),
    config=TrainConfig(task="regression", batch_size=64, epochs=3, seed=11, ema_decay=DECAY),
    max_imbalance=None,
)

STRATEGIES: dict[str, dict[str, int]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {"min_parameters": 10},
    "zero3": {"min_parameters": 10},
    "localSGD": {"period": 1},
    "parameterServer": {"staleness": 0},
}


def loss_of(module: nn.Module, part: Part) -> torch.Tensor:
    losses: torch.Tensor = (module(part.x) - part.y) ** 2
    return (losses * part.w).sum() / part.w.sum()


def by_torch() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Returns the last weights, the averages, and the validation losses of the averages by epoch."""
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_average_is_validated_and_returned_while_the_weights_train_on(strategy: str, ranks: int) -> None:
    last, averages, losses = by_torch()
    assert not torch.allclose(last["layers.0.weight"], averages["layers.0.weight"], atol=1e-3)
    job = replace(JOB, config=replace(JOB.config, strategy=strategy, strategy_params=STRATEGIES[strategy]))
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    assert int(state.pop("steps")) == int(last["steps"])  # buffers are not averaged
    del averages["steps"]
    torch.testing.assert_close(state, averages, atol=1e-5, rtol=0)
    assert [record["val_loss"] for record in metas[0]["history"]] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_early_stopping_keeps_the_average_of_the_best_validation(ranks: int) -> None:
    config = replace(JOB.config, epochs=40, patience=2, ema_decay=0.5)
    job = replace(JOB, recipe=replace(JOB.recipe, learning_rate=0.4), config=config)
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    losses = [record["val_loss"] for record in metas[0]["history"]]
    assert len(losses) == losses.index(min(losses)) + 1 + 2 < 40
    module = Steps().eval()
    module.load_state_dict(state)
    with torch.no_grad():
        loss = float(loss_of(module, validation_rows(TABLE)))
    assert loss == pytest.approx(min(losses), abs=1e-5)


def test_an_average_goes_on_from_where_it_was() -> None:
    def moved(layer: nn.Linear, average: MovingAverage, by: float) -> None:
        with torch.no_grad():
            layer.weight.fill_(by)
        average.update()

    layer, again = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    first = MovingAverage(layer.parameters(), DECAY)
    second = MovingAverage(again.parameters(), DECAY)
    moved(layer, first, 1.0)
    moved(layer, first, 2.0)
    saved = first.named_tensors({layer.weight: "weight"})
    second.named_tensors({again.weight: "weight"})["weight"].copy_(saved["weight"])
    for part, average in ((layer, first), (again, second)):
        moved(part, average, 3.0)
        with average.swapped_in():
            assert part.weight.tolist() == [pytest.approx([DECAY * (DECAY + 0.2) + 0.3] * 2)]
        assert part.weight.tolist() == [[3.0, 3.0]]


@pytest.fixture
def mesh() -> Iterator[Any]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_that_are_divided_among_ranks_are_averaged_in_their_parts(mesh: Any) -> None:
    whole = torch.arange(6.0).view(3, 2)
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    average = MovingAverage([parameter], DECAY)
    average.update()
    with torch.no_grad():
        parameter.mul_(2)
    average.update()
    with average.swapped_in():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), whole * (DECAY + 0.2))
    torch.testing.assert_close(parameter.full_tensor(), whole * 2)
