"""One suite of strategies x features: any number of ranks trains, and records, what one plain loop of torch does."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from sparktorch.data.columns import LABEL, WEIGHT
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.parts import Steps
from tests.support.ranks import preload, train_on
from tests.support.reference import balanced, plain_steps, plain_training, split_rows
from tests.support.small import small_job

preload("sklearn.utils.class_weight")

RATE, STEPS = 0.05, 7
NUMBERS = Table.random(403, weighted=True)
VALIDATED = Table.random(403, weighted=True, validated=True)
CLASSES = Table.random(301, classes=3, weighted=True, validated=True)
UNWEIGHTED = Table.random(301, classes=3, validated=True)
MOMENTUM: dict[str, Any] = {"optimizer": "SGD", "learning_rate": RATE, "optimizer_params": {"momentum": 0.9}}
ADAMW: dict[str, Any] = {"learning_rate": 3e-3, "optimizer_params": {"weight_decay": 0.05}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {"min_parameters": 10},
    "zero3": {"min_parameters": 10},
    "mesh": {"min_parameters": 10, "shard": 2},
    "localSGD": {"period": 1},
    "parameterServer": {"staleness": 0},
}


def own_options(module: nn.Module) -> list[dict[str, Any]]:
    """The groups of `GROUPS`, as torch's optimizers take them."""
    named = dict(module.named_parameters())
    return [
        {"params": [named["layers.2.weight"]]},
        {"params": [named["layers.0.bias"], named["layers.2.bias"]], "weight_decay": 0.0, "lr": 0.04},
        {"params": [named["layers.0.weight"]], "lr": 0.0025},
    ]


GROUPS = [{"params": "*.bias", "weight_decay": 0.0, "lr": 0.04}, {"params": ["layers.0.*"], "lr": 0.0025}]


def scaled_options(module: nn.Module) -> list[dict[str, Any]]:
    """The same where the batch is twice as large as the one that the rates are for."""
    return [{**group, **({"lr": 2 * group["lr"]} if "lr" in group else {})} for group in own_options(module)]


def thawed(module: nn.Module) -> list[nn.Parameter]:
    """What is left to train where the first layer's weight is frozen."""
    module.get_parameter("layers.0.weight").requires_grad_(False)
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Feature(NamedTuple):
    """Rows, and what a training of them is asked for."""

    table: Table
    recipe: dict[str, Any]
    config: dict[str, Any]
    groups: Any = nn.Module.parameters


SMALL = {"learning_rate": 0.01, "optimizer_params": {"weight_decay": 0.2}}
FEATURES: dict[str, Feature] = {
    "nothing": Feature(Table.random(1_001), ADAMW, {}),
    "weights and validation": Feature(CLASSES, ADAMW, {}),
    "no shuffling": Feature(NUMBERS, ADAMW, {"shuffle": False}),
    "fewer rows than ranks": Feature(Table.random(2, weighted=True).with_values(WEIGHT, [1.5]), ADAMW, {}),
    "one row": Feature(Table.random(1, weighted=True).with_values(WEIGHT, [1.5]), ADAMW, {"batch_size": 1}),
    "a batch larger than the data": Feature(Table.random(40), ADAMW, {"batch_size": 1_000}),
    "a norm": Feature(NUMBERS, MOMENTUM, {"clip_norm": 0.1}),
    "elements cut off": Feature(NUMBERS, MOMENTUM, {"clip_value": 0.02}),
    "a schedule by step": Feature(
        NUMBERS, {**MOMENTUM, "scheduler": "CosineAnnealingLR"}, {"schedule_interval": "step"}
    ),
    "a schedule by epoch": Feature(
        NUMBERS, {**MOMENTUM, "scheduler": "StepLR", "scheduler_params": {"step_size": 1, "gamma": 0.3}}, {}
    ),
    "a schedule of momentum": Feature(
        NUMBERS,
        {**ADAMW, "scheduler": "OneCycleLR", "scheduler_params": {"max_lr": RATE, "total_steps": 3 * STEPS + 1}},
        {"schedule_interval": "step"},
    ),
    "a plateau": Feature(
        NUMBERS,
        {
            **MOMENTUM,
            "scheduler": "ReduceLROnPlateau",
            "scheduler_params": {"patience": 0, "threshold": 1e9, "threshold_mode": "abs"},
        },
        {},
    ),
    "frozen parameters": Feature(
        NUMBERS, {**SMALL, "freeze": ["*", "!layers.2.*", "!layers.0.bias"]}, {}, groups=thawed
    ),
    "groups": Feature(NUMBERS, {**SMALL, "parameter_groups": GROUPS}, {}, groups=own_options),
    "groups, a schedule, warm-up and scaling": Feature(
        NUMBERS,
        {**MOMENTUM, "learning_rate": 0.01, "parameter_groups": GROUPS, "scheduler": "CosineAnnealingLR"},
        {"reference_batch_size": 32, "warmup_steps": 7, "schedule_interval": "step"},
        groups=scaled_options,
    ),
    "an average": Feature(VALIDATED, {**MOMENTUM, "module": Steps}, {"ema_decay": 0.9}),
    "weights of classes": Feature(UNWEIGHTED, SMALL, {"class_weights": (0.5, 3.0, 1.25)}),
    "balanced classes": Feature(UNWEIGHTED, SMALL, {"class_weights": "balanced", "micro_batch_size": 7}),
    "balanced weights of classes": Feature(CLASSES, SMALL, {"class_weights": "balanced", "micro_batch_size": 7}),
}
CASES = {
    "nothing": ["ddp 1", "ddp 3", "mesh 2"],
    "weights and validation": ["ddp 1", "ddp 3", "zero2 2"],
    "no shuffling": ["ddp 3"],
    "fewer rows than ranks": ["ddp 3"],
    "one row": ["ddp 3"],
    "a batch larger than the data": ["ddp 2"],
    "a norm": ["ddp 1", "ddp 2", "zero1 3", "zero3 3"],
    "elements cut off": ["ddp 2", "zero3 3"],
    "a schedule by step": ["ddp 2", "zero1 3"],
    "a schedule by epoch": ["ddp 1", "zero1 3"],
    "a schedule of momentum": ["parameterServer 1", "parameterServer 2"],
    "a plateau": ["ddp 3"],
    "frozen parameters": ["ddp 2", "zero3 3"],
    "groups": ["ddp 1", "ddp 3", "zero3 2", "parameterServer 2"],
    "groups, a schedule, warm-up and scaling": ["zero1 1", "zero1 3"],
    "an average": ["ddp 1", "ddp 3", "zero3 3", "localSGD 2", "parameterServer 2"],
    "weights of classes": ["ddp 1", "ddp 3"],
    "balanced classes": ["ddp 1", "ddp 3"],
    "balanced weights of classes": ["ddp 2", "zero3 3"],
}


def job_for(feature: Feature, strategy: str) -> TrainJob:
    options = {"strategy": strategy, "strategy_params": STRATEGIES[strategy]}
    return small_job(feature.table, feature.recipe, **options, **feature.config)


def partitions(table: Table, ranks: int) -> list[Any]:
    """The rows in another order, and in batches of another size; the second of three ranks has none."""
    if ranks == 3:
        first, third = (part.batches(size=111) for part in table.shuffled(seed=3).parts(2))
        return [first, [], third]
    return [part.batches(size=37 * ranks) for part in table.shuffled(seed=ranks).parts(ranks)]


@cache
def by_hand(name: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    feature = FEATURES[name]
    return plain_training(feature.table, job_for(feature, "ddp"), feature.groups)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_any_number_of_ranks_trains_and_records_what_one_plain_loop_does(name: str, case: str) -> None:
    strategy, ranks = case.split()
    feature, (expected, records) = FEATURES[name], by_hand(name)
    job = job_for(feature, strategy)
    state, metas = train_on(partitions(feature.table, int(ranks)), job)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    for record, wanted in zip(metas[0]["history"], records, strict=True):
        assert {field: record.get(field) for field in wanted} == pytest.approx(wanted, abs=1e-5)
        assert ("val_loss" in record) == ("val_loss" in wanted)
    assert metas[0]["steps_per_epoch"] == math.ceil(len(split_rows(feature.table)[0]) / job.config.batch_size)
    assert metas[0]["steps_per_epoch"] == -(
        -len(split_rows(feature.table)[0]) // job_for(feature, strategy).config.batch_size
    )


@pytest.mark.parametrize(
    "name", ["a norm", "elements cut off", "a schedule by epoch", "groups", "frozen parameters", "an average"]
)
def test_a_feature_changes_what_is_trained(name: str) -> None:
    feature = FEATURES[name]
    recipe = {key: feature.recipe[key] for key in (*MOMENTUM, "module") if key in feature.recipe}
    without, _ = plain_training(feature.table, job_for(Feature(feature.table, recipe, {}), "ddp"))
    assert not torch.allclose(by_hand(name)[0]["layers.0.weight"], without["layers.0.weight"], atol=1e-4)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = split_rows(UNWEIGHTED)[0].arrays[LABEL]
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert balanced(UNWEIGHTED) == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("strategy", "clips"),
    [("ddp", {}), ("ddp", {"clip_norm": 0.2}), ("zero3", {"clip_norm": 0.2, "clip_value": 0.05})],
)
def test_the_history_tells_the_norm_of_the_gradient_before_clipping(clips: dict[str, float], strategy: str) -> None:
    job = job_for(Feature(NUMBERS, MOMENTUM, clips), strategy)
    norms = [step.norm for step in plain_steps(NUMBERS, job)]
    _, metas = train_on(partitions(NUMBERS, 2), job)
    every = strategy == "ddp" and clips.keys() == {"clip_norm"}
    for epoch, record in enumerate(metas[0]["history"]):
        steps = range(epoch * STEPS, (epoch + 1) * STEPS)
        seen = [norms[step] for step in steps if every or step % 32 == 0 or step == steps[-1]]
        assert record["gradient_norm"] == pytest.approx(sum(seen) / len(seen), rel=1e-4)
        assert record["gradient_norm_max"] == pytest.approx(max(seen), rel=1e-4)
