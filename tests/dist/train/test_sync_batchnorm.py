"""Synchronised batch normalisation trains on N ranks what it trains in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import input_name
from sparktorch.errors import ModuleError
from sparktorch.train.loop.engine import Engine
from sparktorch.train.numerics.sync_batchnorm import RealRows, synchronise
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import WIDTH, Table
from tests.support.parts import Convolved, NormalisedImages, NormalisedScore, OwnNorm
from tests.support.ranks import train_on
from tests.support.reference import plain_training
from tests.support.small import small_job

TABLE = Table.random(203, weighted=True)


def job_for(module: Any, **config: Any) -> TrainJob:
    recipe = {"module": module, "optimizer": "SGD", "learning_rate": 0.05}
    return small_job(TABLE, recipe, **{"batch_size": 41, "seed": 7, "sync_batch_norm": True, **config})


def check(job: TrainJob, table: Table, partitions: list[Any]) -> None:
    expected, _ = plain_training(table, job)
    expected.pop("strides", None)
    state, _ = train_on(partitions, job)
    state.pop("strides", None)
    for name in expected:  # squares of 300 have no more digits than this
        torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("module", "ranks", "strategy"),
    [(NormalisedScore, 1, "ddp"), (NormalisedScore, 3, "zero1"), (NormalisedImages, 3, "zero3")],
)
def test_statistics_are_those_of_the_rows_of_all_ranks(module: type[nn.Module], ranks: int, strategy: str) -> None:
    check(job_for(module, strategy=strategy), TABLE, [part.batches() for part in TABLE.parts(ranks)])


def test_small_batches_leave_a_rank_without_rows_in_every_step() -> None:
    table = Table.random(21)
    near = partial(NormalisedScore, far=0)  # so few rows are all rounding where they are far away
    job = replace(job_for(near, batch_size=3), columns=table.columns)
    check(job, table, [part.batches() for part in table.parts(4)])


@pytest.mark.parametrize("module", [NormalisedScore, NormalisedImages])
def test_a_step_of_one_row_does_not_count_on_any_number_of_ranks(module: type[nn.Module]) -> None:
    table = Table.random(7)
    job = replace(
        job_for(partial(module, far=0) if module is NormalisedScore else module, batch_size=3), columns=table.columns
    )
    alone, together = (train_on([part.batches() for part in table.parts(ranks)], job)[0] for ranks in (1, 3))
    assert {int(value) for name, value in alone.items() if "num_batches" in name} == {6}  # two steps of each epoch
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_normalisation_of_another_kind_is_refused() -> None:
    with pytest.raises(ModuleError, match="cannot synchronise '1', a OwnNorm with a forward of its own"):
        synchronise(nn.Sequential(nn.Linear(2, 2), OwnNorm(2)), RealRows())


def test_normalisation_over_a_group_of_ranks_is_refused() -> None:
    norm = nn.SyncBatchNorm(2)
    norm.process_group = object()
    with pytest.raises(ModuleError, match="cannot synchronise '0', a SyncBatchNorm with a process group of its own"):
        synchronise(nn.Sequential(norm), RealRows())


def test_only_training_looks_at_other_ranks() -> None:
    module = NormalisedImages().eval()
    x = torch.randn(3, 5)
    expected = module(x)
    names = list(module.state_dict())
    synchronise(module, RealRows())
    torch.testing.assert_close(module(x), expected, atol=0, rtol=0)
    assert list(module.state_dict()) == names
    assert type(module.norm) is nn.BatchNorm2d


def test_channels_last_lays_out_images_and_weights_and_changes_nothing_else() -> None:
    partitions = [part.batches() for part in TABLE.parts(2)]
    state, _ = train_on(partitions, job_for(Convolved, channels_last=True))
    strides = state.pop("strides").tolist()
    expected, _ = plain_training(TABLE, job_for(Convolved))
    expected.pop("strides")
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    assert strides[4:] == [8, 1, 4, 2]


def test_images_that_a_module_is_called_with_are_laid_out_by_channels() -> None:
    seen: list[tuple[int, ...]] = []
    recipe = Recipe(module=partial(nn.Conv2d, 2, 4, 2), optimizer="SGD")
    engine = Engine(recipe, TrainConfig(channels_last=True), World(), steps=1)
    engine.unwrapped.register_forward_pre_hook(lambda _, given: seen.append(given[0].stride()))
    engine.module(torch.zeros(3, 2, 4, 5))
    assert seen == [(40, 1, 10, 2)]


def of_torch() -> nn.Module:
    """Returns a module that holds torch's own synchronised normalisation."""
    module: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(NormalisedScore(far=0))
    return module


def test_a_module_with_torchs_own_synchronised_normalisation_counts_no_placeholder_rows() -> None:
    table = Table.random(21)
    job = replace(job_for(of_torch, batch_size=3, sync_batch_norm=False, strategy="zero3"), columns=table.columns)
    check(job, table, [part.batches() for part in table.parts(4)])


class HalfSynchronised(nn.Module):
    """Normalises its input over the rows of all ranks, and then over the rows of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.all_ranks = nn.SyncBatchNorm(WIDTH)
        self.one_rank = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.one_rank(self.all_ranks(x))).squeeze(-1)
        return out


def test_beside_synchronised_normalisation_a_rank_with_one_row_counts_it_once_or_not_at_all() -> None:
    table = Table.random(3)
    job = replace(
        job_for(HalfSynchronised, batch_size=3, epochs=1, sync_batch_norm=False, strategy="zero3"),
        columns=table.columns,
    )
    partitions = [table.take(np.array(rows)).batches() for rows in ([0], [1, 2])]
    state, _ = train_on(partitions, job)
    assert int(state["one_rank.num_batches_tracked"]) == 0, "rank 0 has one row"
    assert int(state["all_ranks.num_batches_tracked"]) == 1
    expected = 0.1 * torch.as_tensor(table.arrays[input_name(0)]).mean(0)
    torch.testing.assert_close(state["all_ranks.running_mean"], expected, atol=1e-6, rtol=1e-6)
