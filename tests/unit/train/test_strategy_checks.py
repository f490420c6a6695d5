"""What a strategy refuses of options, settings and modules before a job, and what it must not refuse."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.adapters.huggingface.folder import opened
from sparktorch.adapters.huggingface.loss import ModelLossStep
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_module, check_strategy
from tests.support.nets import Chain, Paired, Tower, Unit
from tests.support.strategies import FEW, job_for
from tests.support.tiny_transformers import llama

TWO = {"pipeline": 2}
PAIR = {"fc1": "colwise", "fc2": "rowwise"}


@pytest.mark.parametrize(
    ("strategy", "params", "message"),
    [
        ("ddp", {"bucket_mb": 1}, "unknown key strategyParams.bucket_mb"),
        ("ddp", {"static_graph": True}, "strategyParams.static_graph does not go together with micro-batches"),
        ("zero3", {"pipeline": 2, "min_parameters": 5}, "strategyParams.pipeline is no option of strategy 'zero3'"),
        ("localSGD", {"period": 0}, "strategyParams.period must be at least 1, got 0"),
        ("mesh", {"shard": 2, "plan": {"first.0": "colwise"}}, "there are no tensor ranks"),
        ("mesh", {"shard": 2, "split": ["norm"]}, "no pipeline ranks"),
        ("mesh", {**TWO, "schedule": "gpipe", "stages_per_rank": 2}, "several stages of a rank take turns by '1f1b'"),
        ("mesh", {**TWO, "micro_batches": 1}, "'1f1b' keeps 2 ranks busy"),
        ("mesh", {"tensor": 2, "plan": {"part": "heads"}}, "strategyParams.plan['part'] 'heads' is unknown"),
        ("mesh", {**TWO, "param_dtype": "bf16"}, "strategyParams.param_dtype is set"),
    ],
)
def test_options_that_a_strategy_does_not_have_are_refused(strategy: str, params: dict[str, Any], message: str) -> None:
    job = job_for(strategy=strategy, strategy_params=params)
    with pytest.raises(ConfigError) as caught:
        check_strategy(job.config, job.recipe)
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("params", "config", "says"),
    [
        (TWO, {"compile": True}, "compile is set"),
        (TWO, {"precision": "fp16"}, "precision 'fp16' scales the loss, and strategy 'mesh'"),
    ],
)
def test_settings_that_a_mesh_does_not_support_are_refused(
    params: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    job = job_for(strategy="mesh", strategy_params=params, **config)
    with pytest.raises(ConfigError, match=says):
        check_strategy(job.config, job.recipe)


@pytest.mark.parametrize("optimizer", ["Rprop", torch.optim.Adafactor, "Muon"])
def test_optimizers_of_whole_parameters_are_refused_where_these_are_divided(optimizer: Any) -> None:
    for strategy, params in (("zero2", {}), ("mesh", {"shard": 2}), ("mesh", {"tensor": 2})):
        recipe = {"optimizer": optimizer, "optimizer_params": {}}
        job = job_for(recipe=recipe, strategy=strategy, strategy_params=params)
        with pytest.raises(ConfigError, match="computes with whole parameters"):
            check_module(job.config, job.recipe, 2, Tower(), FEW)


class Tempered(Tower):
    """Has a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), Unit(lambda x, by: x * by, by=self.temperature)]


class Having(Tower):
    """Has another part."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Ageing(nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.tensor(0)


class Adapted(Paired):
    peft_config: Any = {}


def renormed() -> nn.Module:
    return Having(table=nn.Embedding(4, 2, max_norm=1.0))


def mixed() -> nn.Module:
    return Having(last=nn.Linear(5, 5, dtype=torch.float64))


def strided() -> nn.Module:
    return nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Embedding(5, 4, sparse=True))


def ageing() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), Ageing(4, 1))


@pytest.mark.parametrize(
    ("module", "strategy", "params", "says"),
    [
        (Tempered, "zero2", {}, "'temperature' is a scalar"),
        (Tempered, "mesh", TWO, ""),
        (renormed, "zero3", {}, "'?table'? has max_norm"),
        (strided, "zero3", {}, "'weight' is not contiguous"),
        (
            mixed,
            "zero1",
            {},
            "'first.0.weight' is of torch.float32 and 'last.weight' of torch.float64, and strategy 'z",
        ),
        (mixed, "zero3", {}, "of torch.float32 and 'last.bias' of torch.float64, in one Having"),
        (partial(nn.LazyLinear, 1), "zero3", {}, "'weight' gets its shape in the first forward pass"),
        (normalised, "mesh", {"tensor": 2}, "1 has batch normalisation"),
        (normalised, "mesh", TWO, "1 has batch normalisation"),
        (sparse, "mesh", {"tensor": 2}, "1 has sparse gradients"),
        (sparse, "mesh", TWO, "1 has sparse gradients"),
        (ageing, "mesh", TWO, "1 has extra state"),
        (Adapted, "mesh", TWO, "the module has adapters"),
    ],
)
def test_modules_that_several_ranks_cannot_have_are_refused(
    module: Any, strategy: str, params: dict[str, Any], says: str
) -> None:
    job = job_for(strategy=strategy, strategy_params=params)
    with pytest.raises(ModuleError, match=says) if says else nullcontext():
        check_module(job.config, Recipe(module=module), 2, module(), FEW)


def test_one_rank_divides_parameters_only_to_change_their_dtypes() -> None:
    job = job_for(strategy="zero3")
    for module in (Tempered(), renormed(), strided(), mixed()):
        check_module(job.config, job.recipe, 1, module, FEW)
    job = job_for(strategy="zero3", strategy_params={"reduce_dtype": "bf16"})
    with pytest.raises(ModuleError, match="'temperature' is a scalar"):
        check_module(job.config, job.recipe, 1, Tempered(), FEW)


@pytest.mark.parametrize(
    ("module", "style", "says"),
    [
        (nn.Linear(6, 8), "colwise", "whose (8, 6) weights are not divisible by 3 under 'colwise'"),
        (nn.Tanh(), "colwise", "a torch.nn.modules.activation.Tanh"),
        (nn.Embedding(9, 4, max_norm=1.0), "rowwise", "with max_norm or scale_grad_by_freq"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "rowwise", "divides only nn.Linear and nn.Embedding"),
        (nn.MultiheadAttention(6, 3), "colwise", "write attention with an nn.Linear for each of them"),
    ],
)
def test_layers_that_a_plan_cannot_divide_are_refused(module: nn.Module, style: str, says: str) -> None:
    held = nn.ModuleDict({"part": module, "other": nn.Linear(1, 1)})
    job = job_for(sizes={"tensor": 3, "plan": {"part": style}})
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_module(job.config, Recipe(module=held), 3, held, FEW)


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (Paired(), {"tensor": 5}, "no layers that are known to be divisible by 5"),
        (Paired(), {"tensor": 2, "plan": {"frist.*": "colwise"}}, r"(?s)'frist.\*' matches no part.*first"),
        (Tower(), {"tensor": 3, "plan": {"tied": "colwise"}}, "whose weights are tied"),
        (
            nn.Sequential(nn.Linear(5, 5), nn.Sequential(*(nn.Linear(5, 5) for _ in range(20))), nn.Linear(5, 1)),
            {**TWO, "min_parameters": 400, "activation_checkpointing": True},
            "Sequential in stages has no part of min_parameters=400 or more",
        ),
    ],
)
def test_modules_that_options_of_a_mesh_do_not_fit_are_refused(
    module: nn.Module, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_module(job_for(sizes=options).config, Recipe(module=module), 2, module, FEW)


@pytest.mark.parametrize(
    ("kind", "sizes", "says"),
    [
        ("LlamaForCausalLM", {"tensor": 4}, "num_key_value_heads is 2"),
        ("LlamaForSequenceClassification", {"pipeline": 2}, "computes the loss of its rows"),
    ],
)
def test_heads_that_cannot_be_divided_and_losses_of_rows_are_refused(kind: str, sizes: Any, says: str) -> None:
    found = opened(llama(kind), {}, seed=0)
    assert found is not None
    recipe = HuggingFaceRecipe(**found, loss=None, training_step=ModelLossStep())
    config = job_for(sizes=sizes).config
    check_strategy(config, recipe)
    with pytest.raises(ConfigError, match=says):
        check_module(config, recipe, 4, recipe.build_module(0), FEW)


class Drawing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand_like(x))

    def stages(self) -> list[nn.Module]:
        return [Unit(lambda x: x + torch.rand_like(x)), *super().stages()]


@pytest.mark.parametrize("module", [Drawing, partial(Chain, dropout=0.5)])
def test_a_module_that_draws_numbers_is_not_taken_for_one_that_mixes_rows(module: Any) -> None:
    made, job = module(), job_for(recipe={"module": module}, sizes=TWO)
    check_module(job.config, job.recipe, 2, made, FEW)
    assert made.training
