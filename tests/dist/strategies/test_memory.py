"""A rank that gathers parameters takes no more memory from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import build_strategy
from tests.support.ranks import in_group

WIDTH, LAYERS = 1024, 4
MODEL = LAYERS * WIDTH**2 * 4 / 1e6


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _most() -> float:
    """Returns the most MB that this process has taken."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3


def _grown(world: World, strategy: str, options: dict[str, Any]) -> float:
    """Returns by how many MB a rank's memory grows from the fourth step to the tenth."""
    config = TrainConfig(strategy=strategy, strategy_params={"min_parameters": WIDTH, **options})
    shared = build_strategy(config, world)
    plain = Recipe(module=Deep).build_module(0)
    module = shared.prepare(plain)
    optimizer = shared.optimizer(Recipe(module=Deep, optimizer="SGD"), plain)
    took = []
    for _ in range(10):
        optimizer.zero_grad()
        module(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()
        took.append(_most())
    return took[-1] - took[3]


@pytest.mark.landing
@pytest.mark.parametrize(("strategy", "options"), [("zero2", {}), ("zero3", {}), ("mesh", {"shard": 2})])
def test_steps_do_not_make_a_rank_grow(strategy: str, options: dict[str, Any]) -> None:
    assert max(in_group(2, _grown, strategy, options)) < 0.25 * MODEL
