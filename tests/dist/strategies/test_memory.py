"""A rank that gathers parameters takes no more memory from step to step, or none anew, as its host has it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from tests.support.ranks import in_group

WIDTH, LAYERS = 1024, 4
MODEL = LAYERS * WIDTH**2 * 4
FILLED, ROOMY = 100_000, 1  # ranks on a host


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _most() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def _mapped() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def _grown(world: World, strategy: str, on_host: int, count: Callable[[], int]) -> int:
    config = TrainConfig(strategy=strategy, strategy_params={"min_parameters": WIDTH})
    shared = build_strategy(config, replace(world, local_size=on_host))
    plain = Recipe(module=Deep).build_module(0)
    module = shared.prepare(plain, Start())
    optimizer = shared.optimizer(Recipe(module=Deep, optimizer="SGD"), plain)
    took = []
    for _ in range(10):
        optimizer.zero_grad()
        module(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()
        took.append(count())
    return took[-1] - took[3]


@pytest.mark.landing
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_steps_do_not_make_a_rank_grow_on_a_full_host_and_take_little_memory_anew_on_one_with_room(
    strategy: str,
) -> None:
    assert max(in_group(2, _grown, strategy, FILLED, _most)) < 0.25 * MODEL
    assert max(in_group(2, _grown, strategy, ROOMY, _mapped)) < 15 * MODEL
