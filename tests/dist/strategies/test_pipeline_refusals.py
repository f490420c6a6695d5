"""What a pipeline refuses before the job, and what it must not refuse."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparktorch.base.batch import Batch
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.strategies.registry import check_module, check_strategy
from tests.dist.strategies.test_strategies import job_for
from tests.support.nets import Chain, Paired


class Deciding(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        found: torch.Tensor = super().forward(x)
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.other(torch.tanh(self.one(x)))
        return found


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.one(self.other(self.one(x)))
        return found


class Counting(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return super().forward(x)


class Dropping(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.random())


class Sharing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.enter.weight.mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Straight(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Doubled.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return found


class Recomputing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.enter, x, use_reentrant=False)
        found: torch.Tensor = self.out(self.layers(out)).squeeze(-1)
        return found


class Averaging(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


class Centring(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Drawing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand_like(x))


class Remembering(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Listing(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.losses.append(out.square())
        return out


class Replacing(Chain):
    def __init__(self, before: Any) -> None:
        super().__init__()
        self.out.seen = self.seen = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.seen = out.detach()
        return out


class Telling(Replacing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out.seen = len(x)  # type: ignore[assignment]
        return Chain.forward(self, x)


class Scaling(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            layer.scale = 1.0 / (number + 1)  # type: ignore[assignment]
        return super().forward(x)


class Holder:
    def __init__(self, factor: torch.Tensor) -> None:
        self.factor = factor


class Part(nn.Linear):
    def forward(self, x: torch.Tensor, holder: Any = None) -> torch.Tensor:
        return super().forward(x) * holder.factor


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Part(5, 5), Part(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        holder = Holder(x.mean())
        found: torch.Tensor = self.other(self.one(x, holder), holder)
        return found


class Evaluating(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.training else out * self.enter.weight.mean()


class Branching(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        found: torch.Tensor = torch.cond(out.sum() > 0, lambda y: y + 1, lambda y: y - 1, (out,))
        return found


class Coupling(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.enter(x) * 1.0
        half = out[:, :4]
        half += torch.tanh(self.layers[0](out))[:, :4]
        found: torch.Tensor = self.out(out).squeeze(-1)
        return found


class Scaled(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.enter.weight[0] *= 0.5
        return super().forward(x)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(5, 1, 8, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.unsqueeze(1), mask=torch.zeros(1, 1))
        return found


def deciding() -> nn.Module:
    return Deciding(nn.Linear(5, 4), nn.Linear(4, 1))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Embedding(5, 4, sparse=True))


class Ageing(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def ageing() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), Ageing(4, 1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


TWO = {"pipeline": 2}


@pytest.mark.parametrize(
    ("module", "options", "error", "says"),
    [
        (Paired, {"pipeline": 9}, ConfigError, r"(?s)makes 9 stages, and the module has \d layers"),
        (partial(nn.LSTM, 5, 4), TWO, ConfigError, r"(?s)has 0 layers.*LSTM alone is one layer.*strategyParams.shard"),
        (Chain, {**TWO, "split": ["layers.7"]}, ConfigError, r"(?s)calls no layer 'layers.7'.*layers\.\d"),
        (Chain, {**TWO, "split": ["layers.1", "out"]}, ConfigError, "names 2 layers, and 2 stages begin with 1"),
        (Chain, {"pipeline": 3, "split": ["out", "layers.1"]}, ConfigError, "not called in this order"),
        (Chain, {**TWO, "split": ["enter"]}, ConfigError, "with which the first stage begins anyway"),
        (deciding, TWO, ModuleError, r"(?s)cannot be recorded at .*test_pipeline_refusals.py:\d+, 'if x.sum\(\) > 0"),
        (Masking, TWO, ModuleError, r"(?s)cannot be recorded at .*pass is_causal=True or False beside the mask"),
        (Tied, TWO, ModuleError, "'one.weight' of stage 0 and 'other.weight' of stage 1 of the pipeline are one"),
        (Again, {**TWO, "split": ["other"]}, ModuleError, "'one' is called in stages 0 and 1"),
        (Counting, TWO, ModuleError, "changes buffer 'seen'"),
        (Dropping, TWO, ModuleError, "draws numbers of Python or NumPy"),
        (Straight, TWO, ModuleError, "calls Doubled above its layers"),
        (Recomputing, TWO, ModuleError, r"(?s)calls 'enter' in a checkpoint.*strategyParams.activation_checkpointing"),
        (Averaging, TWO, ModuleError, r"returns a tensor of shape \(\) for 2 rows"),
        (Centring, TWO, ModuleError, "another output of a row beside another one"),
        (Remembering, TWO, ModuleError, "sets attribute 'calls' of the module"),
        (Listing, TWO, ModuleError, "changes attribute 'losses' of the module"),
        (partial(Replacing, torch.zeros(2)), TWO, ModuleError, "sets attribute 'seen' of the module"),
        (partial(Replacing, np.zeros(2)), TWO, ModuleError, "sets attribute 'seen' of the module"),
        (partial(Telling, torch.zeros(2)), TWO, ModuleError, "sets attribute 'seen' of 'out' from outside"),
        (partial(Scaling, unused=40), TWO, ModuleError, "sets attribute 'scale' of 'layers.0' from outside"),
        (Holding, TWO, ModuleError, "an object with tensors, of type Holder, to 'one'"),
        (Evaluating, TWO, ModuleError, "parameter 'enter.weight' is used in stages 0 and 1"),
        (
            Coupling,
            {**TWO, "split": ["layers.0"]},
            ModuleError,
            r"(?s)in stage 1 .*one of 2 views of a value.*torch.cat",
        ),
        (Scaled, TWO, ModuleError, "changes 'enter.weight' in place"),
        (Branching, TWO, ModuleError, "takes functions, such as torch.cond|cannot be recorded"),
        (Paired, {**TWO, "wrap_classes": ["Sequential"]}, ConfigError, "wrap_classes names 'Sequential'"),
        (Sharing, TWO, ModuleError, "parameter 'enter.weight' is used in stages 0 and 1"),
        (Chain, {**TWO, "schedule": "gpipe", "stages_per_rank": 2}, ConfigError, "take turns by '1f1b'"),
        (normalised, TWO, ModuleError, "1 is batch normalisation"),
        (sparse, TWO, ModuleError, "1 has sparse gradients"),
        (ageing, TWO, ModuleError, "1 has extra state"),
        (Paired, {"shard": 2, "split": ["norm"]}, ConfigError, "no pipeline ranks"),
        (Paired, {**TWO, "micro_batches": 1}, ConfigError, "'1f1b' keeps 2 ranks busy"),
        (Paired, {**TWO, "schedule": "zigzag"}, ConfigError, "zigzag"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_job(
    module: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    job = job_for(recipe={"module": module}, strategy="mesh", strategy_params=options)
    torch.manual_seed(77)  # what a module that mixes rows does to these was less than 1e-2 of its output
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
        ({"precision": "fp16"}, "precision 'fp16' scales the loss, and strategyParams.pipeline"),
        ({"strategy_params": {**TWO, "param_dtype": "bf16"}}, "strategyParams.param_dtype is 'bf16'"),
    ],
)
def test_settings_that_a_pipeline_does_not_support_are_refused_before_the_job(
    config: dict[str, Any], says: str
) -> None:
    job = job_for(strategy="mesh", **{"strategy_params": TWO, **config})
    with pytest.raises(ConfigError, match=says):
        check_strategy(job.config, job.recipe)
