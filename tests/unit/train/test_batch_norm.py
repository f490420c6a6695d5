"""Running statistics of batch normalisation in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.loop.engine import Engine
from sparktorch.train.numerics.sync_batchnorm import RealRows
from sparktorch.train.recipe.recipe import Recipe


def engine_for(norm: type[nn.Module]) -> Engine:
    recipe = Recipe(module=lambda: nn.Sequential(norm(2), nn.Linear(2, 1)), optimizer="SGD")
    return Engine(recipe, TrainConfig(task="regression", batch_size=4), World(), steps=1)


def step(engine: Engine, real_rows: int) -> None:
    """Takes a step of a batch that is filled up to two rows."""
    inputs = torch.tensor([[3.0, 5.0], [4.0, 7.0]])
    engine.micro_batches.parts, engine.micro_batches.tried = [1], [False]
    engine.training_mode()
    engine.step(Batch((inputs,), torch.zeros(real_rows, 1), None, real_rows, names=("x",)), 1.0, 0)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_a_step_of_one_row_does_not_count_in_one_process(norm: type[nn.Module]) -> None:
    engine = engine_for(norm)
    layer = engine.unwrapped[0]
    step(engine, real_rows=1)
    assert int(layer.num_batches_tracked) == 0
    assert layer.running_mean.tolist() == [0, 0]
    step(engine, real_rows=2)
    assert int(layer.num_batches_tracked) == 1
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.35, 0.6]))


@pytest.mark.parametrize(("rows", "expected"), [(0, []), (1, [0, 1]), (2, [0, 1, 2, 3])])
def test_rows_that_a_module_has_multiplied_are_as_real_as_those_of_the_batch(rows: int, expected: list[int]) -> None:
    real_rows = RealRows()
    real_rows.set_from(Batch((torch.zeros(2, 5),), None, None, rows))
    assert real_rows.part_of(torch.arange(4)).tolist() == expected
