"""The learning rate over the steps, and which of them `microBatchSize=\"auto\"` tries."""

from __future__ import annotations

import io
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.checkpoint.tensors import storable
from sparktorch.train.loop.micro_batches import MicroBatches
from sparktorch.train.recipe.lr_schedule import Schedule
from sparktorch.train.recipe.recipe import Recipe


@pytest.mark.parametrize("reference", [32, 256])
def test_scaling_to_a_smaller_or_larger_batch_starts_from_the_users_own_rate(reference: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    config = TrainConfig(batch_size=64, reference_batch_size=reference, warmup_steps=4)
    schedule = Schedule(Recipe(module="none"), config, optimizer, steps=3)
    rates = []
    for _ in range(5):
        schedule.step(lambda: None)
        rates.append(schedule.learning_rate)
    target = 0.1 * 64 / reference
    assert rates == pytest.approx([0.1 + (target - 0.1) * share for share in (0.25, 0.5, 0.75, 1, 1)])


def test_what_is_restored_keeps_the_kernels_of_how_parameters_are_divided_now() -> None:
    config = TrainConfig(batch_size=64, warmup_steps=0)
    saved, found = (
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, fused=fused)
        for rate, fused in ((0.2, True), (0.1, None))
    )
    before, after = (Schedule(Recipe(module="none"), config, optimizer, steps=3) for optimizer in (saved, found))
    after.load_state_dict(before.state_dict())
    assert (found.param_groups[0]["lr"], found.param_groups[0]["fused"]) == (0.2, None)


def test_numbers_of_numpy_in_a_state_are_saved_as_those_of_python() -> None:
    state = {
        "rates": [np.float64(0.5), np.int64(3)],
        "groups": ({np.str_("lr"): np.float32(0.25)},),
        "seen": {np.True_},
    }
    file = io.BytesIO()
    torch.save(storable(state, "schedule"), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_schedule_that_begins_with_a_skipped_step_is_no_warning(interval: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    recipe = Recipe(module="none", scheduler="StepLR", scheduler_params={"step_size": 1})
    schedule = Schedule(recipe, TrainConfig(schedule_interval=interval), optimizer, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(lambda: None)
        schedule.epoch_done({"loss": 1.0}, validated=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


WORLD = World(rank=0, world_size=1, local_rank=0, host="here", address="127.0.0.1", device="cpu")
ROWS = [7, 5, 6, 4, 7, 5, 8, 8, 3, 9]


def planned(split: MicroBatches, rows: list[int], *, varies: bool = False) -> list[bool]:
    dataset = mock.Mock(varies=varies)
    dataset.step_rows.return_value = torch.tensor(rows)
    split.begin(dataset, 0, 0)
    for step, tried in enumerate(split.tried):
        if tried:
            assert split.fits(step, ran_out=False)
    return split.tried


def split_of(*, min_rows: int = 1) -> MicroBatches:
    config = TrainConfig(batch_size=32, micro_batch_size="auto")
    return MicroBatches(config, WORLD, steps=len(ROWS), min_rows=min_rows, same_count=False)


def steps(tried: list[bool]) -> list[int]:
    return [step for step, found in enumerate(tried) if found]


def test_first_steps_are_tried_and_then_those_that_need_more_than_any_before() -> None:
    split = split_of()
    assert steps(planned(split, ROWS)) == [0, 1, 2, 3, 4, 6, 9]
    assert steps(planned(split, ROWS)) == []
    assert steps(planned(split, [9, 10, 10, 11, 3, 3, 3, 3, 3, 3])) == [1, 3]


def test_rows_of_different_sizes_are_tried_in_every_step() -> None:
    split = split_of()
    assert [all(planned(split, ROWS, varies=True)) for _ in range(2)] == [True, True]


def test_a_full_device_halves_its_micro_batches_until_they_cannot_be_divided() -> None:
    split = split_of(min_rows=2)
    planned(split, ROWS)
    sizes = []
    while not split.cannot_split_further(9):
        assert not split.fits(9, ran_out=True)
        sizes.append((split.size, split.parts[9]))
    assert sizes == [(4, 3), (2, 4)]
