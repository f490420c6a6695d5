"""What a pipeline has between passes: the rows that it pads to, and what its module keeps."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.strategies.pipeline_mesh import PipelineMesh
from sparktorch.train.strategies.registry import build_strategy
from tests.dist.strategies.test_strategies import FEW_STEPS, TABLE, job_for
from tests.support.nets import Chain
from tests.support.ranks import in_group, train_on

TWO = {"pipeline": 2, "micro_batches": 2}


def squares(module: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    return (module(batch.inputs[0]) - batch.label).square().sum(), {}


def rows_of_passes(world: World, ranks: list[int]) -> list[int]:
    """The most rows of a pass after states of groups with so many ranks, which had 64 rows, are loaded."""
    job = job_for(recipe={"module": Chain}, strategy="mesh", strategy_params=TWO)
    strategy: Any = build_strategy(job.config, world)
    assert isinstance(strategy, PipelineMesh)
    batch = Batch((torch.randn(4, 5),), torch.zeros(4), None, 4)
    strategy.example = lambda: batch
    pipe: Any = strategy.prepare(Chain())
    found = []
    for count in ranks:
        strategy.load_own_state({"pipeline_rows": torch.tensor(64), "pipeline_ranks": torch.tensor(count)})
        strategy.run_pass(pipe, batch, squares, 1.0, nullcontext())
        found.append(pipe.most_rows)
    return found


def test_passes_are_padded_to_rows_of_before_only_where_as_many_ranks_had_them() -> None:
    assert in_group(2, rows_of_passes, [4, 2]) == [[8, 64], [8, 64]]


class Cooling(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.temperature


class InTheFirstRank(Callback):
    def on_epoch_end(self, context: Any, record: Any) -> None:
        context.module.temperature *= 0.5


class BeforeValidation(Callback):
    def on_step_end(self, context: Any, *_: Any) -> None:
        context.module.temperature *= 0.5


class OtherInEach(Callback):
    ranks = "all"

    def on_epoch_end(self, context: Any, record: Any) -> None:
        context.module.temperature = 2.0 + context.world.rank


class Numbered(Cooling):
    """Computes with another number in each process, and keeps one that it does not compute with."""

    def __init__(self, factor: float = 1e-6) -> None:
        super().__init__()
        self.process, self.temperature = os.getpid(), 1 + factor * os.getpid()


def trained(module: Any, *callbacks: Callback) -> None:
    recipe = {"module": module, "callbacks": list(callbacks)}
    job = job_for(recipe=recipe, strategy="mesh", strategy_params=TWO, **{**FEW_STEPS, "epochs": 2})
    train_on([part.batches() for part in TABLE.parts(2)], job)


@pytest.mark.parametrize("callback", [InTheFirstRank, BeforeValidation, OtherInEach])
def test_a_number_that_a_callback_sets_otherwise_in_another_rank_is_refused(callback: type[Callback]) -> None:
    with pytest.raises(
        ModuleError, match=r'(?s)in some ranks of a pipeline only, or to others, .*ranks = "all"'
    ) as found:
        trained(Cooling, callback())
    if callback is OtherInEach:  # after the first epoch: no step has been taken with it
        assert (found.value.where["epoch"], found.value.where["step"]) == (2, 1)


class Bounding(Chain):
    """Computes with a function that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: Any = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bound(super().forward(x))
        return found


class OtherBound(Callback):
    ranks = "all"

    def on_epoch_end(self, context: Any, record: Any) -> None:
        context.module.bound = torch.sigmoid


def test_an_attribute_that_becomes_another_function_is_refused() -> None:
    with pytest.raises(ModuleError, match="attribute 'bound' of the module is another object than when"):
        trained(Bounding, OtherBound())


def test_a_number_that_is_another_one_in_each_rank_is_refused_where_the_forward_pass_computes_with_it() -> None:
    trained(partial(Numbered, factor=0.0))
    with pytest.raises(ModuleError, match="its forward pass computes with numbers that are others in other ranks"):
        trained(Numbered)
