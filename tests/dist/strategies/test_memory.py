"""A rank that gathers parameters takes no more memory from step to step, or none anew, as its host has it."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.fsdp import _KEPT
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


def _resident() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _most()


def _mapped() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def _grown(world: World, strategy: str, options: dict[str, Any], on_host: int, count: Callable[[], int]) -> int:
    config = TrainConfig(strategy=strategy, strategy_params={"min_parameters": WIDTH, **options})
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


STRATEGIES = pytest.mark.parametrize(
    ("strategy", "options"), [("zero2", {}), ("zero3", {}), ("mesh", {"shard": 2})], ids=["zero2", "zero3", "mesh"]
)


@pytest.mark.landing
@STRATEGIES
def test_steps_do_not_make_a_rank_grow_on_a_host_that_ranks_fill(strategy: str, options: dict[str, Any]) -> None:
    assert max(in_group(2, _grown, strategy, options, FILLED, _most)) < 0.25 * MODEL


@pytest.mark.landing
@STRATEGIES
def test_steps_are_given_little_memory_anew_on_a_host_with_room(strategy: str, options: dict[str, Any]) -> None:
    assert max(in_group(2, _grown, strategy, options, ROOMY, _mapped)) < 15 * MODEL


def _grown_by(world: World, strategy: str, options: dict[str, Any]) -> float:
    torch.set_num_threads(1)
    config = TrainConfig(strategy=strategy, strategy_params={"min_parameters": WIDTH, **options})
    shared, recipe = build_strategy(config, world), Recipe(module=Deep, optimizer="AdamW")
    plain = recipe.build_module(0)
    before = _resident()
    module = shared.prepare(plain, Start())
    optimizer = shared.optimizer(recipe, plain)
    for _ in range(30):
        optimizer.zero_grad()
        module(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()
    return (_most() - before) / MODEL


@pytest.mark.landing
@STRATEGIES
def test_a_rank_on_a_host_with_room_grows_by_less_than_what_it_asks_for(strategy: str, options: dict[str, Any]) -> None:
    assert max(in_group(2, _grown_by, strategy, options)) < _KEPT
