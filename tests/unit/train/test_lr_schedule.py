"""The learning rate over the steps."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.train.checkpoint.tensors import storable
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
