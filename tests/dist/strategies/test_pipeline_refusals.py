"""What a pipeline refuses before the job, and what it must not refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.strategies.registry import check_module, check_strategy
from tests.dist.strategies.test_strategies import job_for
from tests.support.nets import Chain, Paired, Unit


class Drawing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand_like(x))

    def stages(self) -> list[nn.Module]:
        return [Unit(lambda x: x + torch.rand_like(x)), *super().stages()]


class Ageing(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class Adapted(Paired):
    peft_config: Any = {}


def ageing() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), Ageing(4, 1))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Embedding(5, 4, sparse=True))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


TWO = {"pipeline": 2}


@pytest.mark.parametrize(
    ("module", "options", "error", "says"),
    [
        (Paired, {"pipeline": 9}, ConfigError, r"makes 9 stages, and Paired has \d units"),
        (partial(nn.LSTM, 5, 4), TWO, ModuleError, r"(?s)LSTM cannot be cut into stages.*def stages\(self\)"),
        (Paired, {**TWO, "wrap_classes": ["Linear", "Units"]}, ModuleError, "no part of class 'Units'"),
        (Chain, {**TWO, "schedule": "gpipe", "stages_per_rank": 2}, ConfigError, "take turns by '1f1b'"),
        (normalised, TWO, ModuleError, "1 has batch normalisation"),
        (sparse, TWO, ModuleError, "1 has sparse gradients"),
        (ageing, TWO, ModuleError, "1 has extra state"),
        (Adapted, TWO, ModuleError, "the module has adapters"),
        (Paired, {"shard": 2, "split": ["norm"]}, ConfigError, "no pipeline ranks"),
        (Paired, {**TWO, "micro_batches": 1}, ConfigError, "'1f1b' keeps 2 ranks busy"),
        (Paired, {**TWO, "schedule": "zigzag"}, ConfigError, "zigzag"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_job(
    module: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    job = job_for(recipe={"module": module}, strategy="mesh", strategy_params=options)
    with pytest.raises(error, match=says):
        check_module(job.config, job.recipe, 2, module(), Batch((torch.randn(2, 5),), None, None, 2))


@pytest.mark.parametrize("module", [Drawing, partial(Chain, dropout=0.5)])
def test_a_module_that_draws_numbers_is_not_taken_for_one_that_mixes_rows(module: Any) -> None:
    made, job = module(), job_for(recipe={"module": module}, strategy="mesh", strategy_params=TWO)
    check_module(job.config, job.recipe, 2, made, Batch((torch.ones(2, 5),), None, None, 2))
    assert made.training


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"compile": True}, "compile is set"),
        ({"precision": "fp16"}, "precision 'fp16' scales the loss, and strategy 'mesh'"),
        ({"strategy_params": {**TWO, "param_dtype": "bf16"}}, "strategyParams.param_dtype is set"),
    ],
)
def test_settings_that_a_pipeline_does_not_support_are_refused_before_the_job(
    config: dict[str, Any], says: str
) -> None:
    job = job_for(strategy="mesh", **{"strategy_params": TWO, **config})
    with pytest.raises(ConfigError, match=says):
        check_strategy(job.config, job.recipe)
