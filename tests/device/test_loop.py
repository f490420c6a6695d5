"""Every feature of the loop trains on a device what it trains on the CPU, and no step waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.recipe import Recipe
from tests.device.jobs import DEVICE, close, job_of, trained, waits_in_steps, within
from tests.support.frames import Table
from tests.support.nets import Mlp, Score
from tests.support.ranks import in_group, train_job, train_on


class Normed(nn.Module):
    """Normalises its hidden layer; cumulatively, torch's own normalisation reads a counter from the device."""

    def __init__(self, kind: str, momentum: float | None = 0.1) -> None:
        super().__init__()
        normed = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=momentum)  # a bias would have no gradient
        self.layers = nn.Sequential(*normed, nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).squeeze(-1)
        return out


class Convolved(nn.Module):
    """Looks at each row as an image of one channel of 2 x 3."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.convolution(x.view(-1, 1, 2, 3)).tanh().flatten(1)).squeeze(-1)
        return out


def step_with_metrics(module: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    error = (module(*batch.inputs) - batch.label) ** 2
    return error, {"absolute": error.sqrt()}


FEATURES: dict[str, dict[str, Any]] = {
    "clipped by norm": {"clip_norm": 0.1},
    "clipped by value": {"clip_value": 0.01},
    "average of weights": {"ema_decay": 0.9},
    "schedule and warm-up": {
        "schedule_interval": "step",
        "warmup_steps": 3,
        "recipe": {"scheduler": "CosineAnnealingLR"},
    },
    "groups of parameters": {"recipe": {"parameter_groups": ({"params": ["layers.*"], "lr": 0.01},)}},
    "SGD with momentum": {"recipe": {"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}}},
    "accumulated": {"accumulation_steps": 3},
    "channels last": {"channels_last": True, "recipe": {"module": Convolved}},
    "normalised": {"recipe": {"module": Normed}},
    "normalised over ranks": {"sync_batch_norm": True, "recipe": {"module": Normed}},
    "normalised over ranks, cumulatively": {
        "sync_batch_norm": True,
        "recipe": {"module": Normed, "module_params": {"kind": "dense", "momentum": None}},
    },
    "deterministic": {"deterministic": True},
    "training step": {"recipe": {"training_step": step_with_metrics, "loss": None}},
    "torchmetrics": {"recipe": {"metrics": {"mae": "MeanAbsoluteError"}}},
    "validated by step": {"validation_unit": "step", "validation_interval": 3, "patience": 2},
}
# What must wait in a step, by what its lines say, and why.
WAITING: dict[str, tuple[dict[str, Any], str]] = {
    "fp16": (
        {"precision": "fp16", "recipe": {"optimizer": "RMSprop", "optimizer_params": {"eps": 1.0}}},
        "self.scaler.step(self.optimizer)",
    ),  # whether a gradient overflowed decides about the step
    "steps left out": ({"non_finite": "skip"}, "return bool(finite)"),  # as here
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_waits_for_nothing(precision: str) -> None:
    # A simulated device casts nothing: what it trains is float32. Fused optimizers look for overflows on the device.
    expected, _ = trained(job_of(), device="cpu")
    state, metas = trained(job_of(precision=precision))
    close(state, expected, 1e-6 if DEVICE == "sim" else 1e-2)
    assert not waits_in_steps(metas)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_trains_on_devices_what_the_cpu_trains(feature: str) -> None:
    job = job_of(validated=True, weighted=True, **FEATURES[feature])
    expected, references = trained(job, ranks=2, device="cpu")
    state, metas = trained(job, ranks=2)
    close(state, expected)
    for record, reference in zip(metas[0]["history"], references[0]["history"], strict=True):
        named = [name for name in reference if name.endswith(("loss", "absolute", "mae", "gradient_norm"))]
        assert {name: record[name] for name in named} == pytest.approx({n: reference[n] for n in named}, abs=1e-5)
    assert not waits_in_steps(metas)


@pytest.mark.parametrize("feature", WAITING)
def test_what_must_wait_waits_in_known_places(feature: str) -> None:
    config, line = WAITING[feature]
    job = job_of(**config)
    state, metas = trained(job, ranks=2)
    reference = job if "fp16" not in feature else job_of(recipe=config["recipe"])
    close(state, trained(reference, ranks=2, device="cpu")[0], 1e-6 if DEVICE == "sim" else 1e-2)
    waits = waits_in_steps(metas)
    assert waits
    assert not [wait for wait in waits if line not in wait]


def test_a_validation_waits_as_often_however_many_batches_it_has() -> None:
    table = Table.random(300, classes=3, validated=True, weighted=True)

    def waits(**config: Any) -> list[list[str]]:
        job = train_job(
            table,
            Recipe(module=Mlp, loss="CrossEntropyLoss"),
            TrainConfig(task="classification", batch_size=50, epochs=2, patience=5, **config),
        )
        _, metas = train_on([part.batches() for part in table.parts(2)], job, device=DEVICE)
        return [[wait for wait in meta["waits"] if within(wait, "validate")] for meta in metas]

    whole, single = waits(), waits(validation_batch_size=1)
    assert [len(found) for found in single] == [len(found) for found in whole]
    assert not [wait for wait in whole[1] if within(wait, "state_dict")]  # rank 0 alone keeps the best weights
    assert len([wait for wait in whole[0] if within(wait, "state_dict")]) <= 2


@pytest.mark.parametrize("empty", [False, True])
def test_classes_are_weighed_and_a_rank_without_rows_stands_in(empty: bool) -> None:
    table = Table.random(200, classes=3, weighted=True)
    job = train_job(
        table,
        Recipe(module=Mlp, loss="CrossEntropyLoss"),
        TrainConfig(task="classification", batch_size=30, epochs=2, class_weights="balanced"),
    )
    expected, _ = train_on([table.batches()], job, device="cpu")
    parts = [table.batches(), []] if empty else [part.batches() for part in table.parts(2)]
    state, metas = train_on(parts, job, device=DEVICE)
    close(state, expected)
    assert not waits_in_steps(metas)


def _tried(world: World) -> bool:
    loss = torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(()))
    inputs, label = {"column 'x'": torch.ones(2, 5)}, torch.ones(2)
    found = dry_run(Recipe(module=Score, loss=loss), "regression", 0, inputs, label, device=world.device)
    return bool(found.outputs)


def test_a_loss_with_a_buffer_is_tried_on_a_device() -> None:
    assert in_group(1, _tried, device=DEVICE) == [True]
