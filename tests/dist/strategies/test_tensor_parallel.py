"""Layers divided among ranks that compute on the same rows: what modules and loops may do with them."""

from __future__ import annotations

import copy
import logging
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.sharding.dtensor import local, step_on_both, whole
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from sparktorch.train.tensor_parallel.styles import shard_layers
from tests.dist.train import test_huggingface as texts
from tests.support.nets import Bags, Gated, Paired
from tests.support.ranks import in_group, of_two_ranks
from tests.support.strategies import FEW_STEPS, SGD, alike, close, job_for, plain, trained
from tests.support.tiny_transformers import causal, llama, masked, qwen, shortened

PAIR = {"fc1": "colwise", "fc2": "rowwise"}


def test_a_table_of_embeddings_is_divided_by_rows() -> None:
    recipe, sizes = {"module": Bags}, {"tensor": 2, "plan": {"table": "rowwise"}}
    close(trained(job_for(recipe=recipe, sizes=sizes, **FEW_STEPS), 2), plain(recipe, **FEW_STEPS))


@pytest.mark.parametrize(("shard", "model"), [(1, qwen()), (2, llama())], ids=["qwen3", "llama"])
def test_a_model_of_transformers_is_divided_by_its_own_plan(shard: int, model: Any) -> None:
    table = texts.sentences(causal, labelled=False)
    params = {"tensor": 2, "shard": shard}
    job = texts.job_for(table, model, strategy="mesh", strategy_params=params, micro_batch_size=7, epochs=1)
    alike(trained(job, 2 * shard, table=table), trained(texts.job_for(table, model, epochs=1), table=table))


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification"])
def test_a_model_computes_its_own_loss_of_the_rows_of_all_ranks_that_share_its_layers(kind: str) -> None:
    table = texts.sentences(masked, labelled=True)
    config = {"micro_batch_size": 7, "epochs": 1}
    job = texts.job_for(table, llama(kind), strategy="mesh", strategy_params={"tensor": 2}, **config)
    alike(trained(job, 2, table=table), trained(texts.job_for(table, llama(kind), epochs=1), table=table))


def test_ranks_whose_texts_are_padded_to_another_length_are_told_to_pad_them_alike() -> None:
    table = texts.sentences(shortened, labelled=False)
    job = texts.job_for(table, llama(), strategy="mesh", strategy_params={"tensor": 2}, batch_size=6)
    with pytest.raises(ModuleError, match=r"(?s)tensors of other shapes.*pad inputs to a fixed length"):
        trained(job, 2, table=table)


class InPlace(nn.Module):
    """Layers whose activation works in place, and a layer of torch's, whose attention stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x).view(-1, 2, 4)
        out = self.layer(inner)
        out += inner
        last: torch.Tensor = self.last(out.mean(1)).squeeze(-1)
        return last


class Shifted(nn.Module):
    """Changes its input in place, by a parameter, and what a table returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.table = nn.Parameter(torch.ones(5)), nn.Embedding(2, 8)
        self.fc1, self.fc2 = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.shift
        kind = self.table((x[:, 0] > 0).long())
        kind *= 2.0
        out: torch.Tensor = self.fc2(torch.tanh(self.fc1(x) + kind)).squeeze(-1)
        return out


# Not Adam: a bias of the keys has no gradient but rounding, of which Adam makes steps.
DESCENT: dict[str, Any] = {**SGD, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Gated, {"plan": {**PAIR, "act": "sum_gradients"}}),
        (InPlace, {}),
        (Shifted, {"plan": {"table": "rowwise"}}),
    ],
)
def test_parameters_between_divided_layers_and_changes_in_place_train_as_in_one_process(
    module: type[nn.Module], options: dict[str, Any]
) -> None:
    recipe = {**DESCENT, "module": module}
    close(trained(job_for(recipe=recipe, sizes={"tensor": 2, **options}, **FEW_STEPS), 2), plain(recipe, **FEW_STEPS))


def divided_by_hand(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides layers, and a norm between them by positions, with torch's own styles."""
    styles: dict[str, ParallelStyle] = {
        "first.0": ColwiseParallel(),
        "first.2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "last": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }
    return parallelize_module(module, mesh, styles, src_data_rank=None)


def exchanged(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return copy.deepcopy(module)


class Normed(nn.Module):
    """Layers over four positions with a norm behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.last = nn.Linear(5, 4 * 6), nn.LayerNorm(6), nn.Linear(6, 1)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(self.enter(x).unflatten(1, (4, 6))))).mean(1).squeeze(-1)
        return out


@pytest.mark.parametrize("shard", [1, 2])
def test_a_function_divides_a_module_with_torchs_own_styles_as_one_plain_loop_trains(shard: int) -> None:
    recipe, sizes = {"module": Normed}, {"tensor": 2, "shard": shard, "plan": f"{__name__}:divided_by_hand"}
    close(trained(job_for(recipe=recipe, sizes=sizes, **FEW_STEPS), 2 * shard), plain(recipe, **FEW_STEPS))


def test_a_function_that_returns_another_module_is_refused() -> None:
    sizes = {"tensor": 2, "plan": f"{__name__}:exchanged"}
    with pytest.raises(ModuleError, match="returned a Normed that is not the module which it got"):
        trained(job_for(recipe={"module": Normed}, sizes=sizes, **FEW_STEPS), 2)


@pytest.mark.parametrize(
    ("module", "plan", "says"),
    [
        (Gated, PAIR, "(?s)another gradient of 'act.weight' than the undivided one.*'sum_gradients'"),
        (Gated, {"fc2": "rowwise"}, "(?s)Gated, with its layers divided, fails: RuntimeError.*takes what a 'colwise'"),
    ],
)
def test_a_plan_that_computes_something_else_is_refused_before_the_first_step(
    module: type[nn.Module], plan: dict[str, str], says: str
) -> None:
    with pytest.raises(ModuleError, match=says):
        trained(job_for(recipe={"module": module}, sizes={"tensor": 2, "plan": plan}), 2)


def test_a_plan_that_computes_something_else_in_a_stage_is_refused_before_the_first_step() -> None:
    module = nn.Sequential(nn.Linear(5, 8), nn.Softmax(-1), nn.Linear(8, 4), nn.Linear(4, 1), nn.Flatten(0))
    sizes = {"tensor": 2, "pipeline": 2, "split": ["3"], "plan": {"0": "colwise", "2": "rowwise"}}
    with pytest.raises(ModuleError, match="Sequential, with its layers divided, returns something else"):
        trained(job_for(recipe={"module": module}, sizes=sizes, accumulation_steps=1), 4)


def test_attention_is_gathered_as_a_whole_under_zero3() -> None:
    recipe = {**DESCENT, "module": InPlace}
    job = job_for(recipe=recipe, strategy="zero3", strategy_params={"min_parameters": 10}, **FEW_STEPS)
    close(trained(job, 2), plain(recipe, **FEW_STEPS))


def calls(world: World) -> None:
    """Calls a wrapped module with the same rows in both ranks, and then with others."""
    config = job_for(sizes={"tensor": 2}).config
    torch.manual_seed(0)
    whole_module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 5).requires_grad_()
    module = build_strategy(config, world, in_users_loop=True).prepare(copy.deepcopy(whole_module), Start())
    module(x).sum().backward()
    (expected,) = torch.autograd.grad(whole_module(x).sum(), x)
    assert torch.allclose(cast(torch.Tensor, x.grad), expected, atol=1e-6)
    module = build_strategy(config, world, in_users_loop=True).prepare(copy.deepcopy(whole_module), Start())
    with pytest.raises(ModuleError, match=r"(?s)call the module with other rows.*take batches from context\.loader"):
        module(x.detach() + world.rank)


def test_own_loops_get_gradients_of_inputs_and_calls_with_other_rows_are_refused_in_all_ranks() -> None:
    in_group(2, calls)


def told(world: World) -> list[str]:
    """Returns what a rank logs where it divides a layer of torch's."""
    lines: list[str] = []
    handler = logging.Handler()  # in a rank, where no fixture of pytest's listens
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparktorch").addHandler(handler)
    config = job_for(sizes={"tensor": 2}).config
    build_strategy(config, world).prepare(nn.TransformerEncoderLayer(12, 2, 8), Start())
    return lines


def test_attention_of_torchs_stays_whole_unasked_which_is_told_once() -> None:
    first, second = in_group(2, told)
    assert ["'self_attn', an nn.MultiheadAttention" in line for line in first] == [True]
    assert second == []


def beyond(world: World) -> None:
    config = job_for(sizes={"tensor": 2, "plan": {"0": "rowwise"}}).config
    module = build_strategy(config, world).prepare(nn.Sequential(nn.Embedding(12, 4)), Start())
    module(torch.tensor([3]))
    with pytest.raises(RuntimeError, match="not one of the 12 rows"):
        module(torch.tensor([-1]))


def test_an_index_beyond_a_divided_table_is_refused() -> None:
    in_group(2, beyond)


def stepped(world: World, kind: str, params: dict[str, Any]) -> list[Any]:
    """The parameters, of which some are divided, after steps of an optimizer that takes lists of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if world.world_size > 1:
        shard_layers(module, of_two_ranks(), {"0": "colwise", "1": "rowwise"}, lambda part: None)
    groups = [{"params": module[:2].parameters()}, {"params": module[2:].parameters(), "lr": 0.1}]
    optimizer = getattr(torch.optim, kind)(groups, **params)
    if world.world_size > 1:
        step_on_both(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return [whole(parameter.detach()).tolist() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"fused": True}),
        ("SGD", {"foreach": True, "momentum": 0.9}),
    ],
)
def test_an_optimizer_steps_on_lists_of_divided_and_whole_parameters(kind: str, params: dict[str, Any]) -> None:
    expected = stepped(World(), kind, params)
    for found in in_group(2, stepped, kind, params):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=0)


def lists_of_all(world: World) -> None:
    """Gives torch's functions lists of all parameters of a module that a user's loop has."""
    strategy = build_strategy(job_for(sizes={"tensor": 2}).config, world, in_users_loop=True)
    module = strategy.prepare(Paired(), Start())
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    with strategy.gradients(module).no_sync():
        module(torch.rand(4, 5)).sum().backward()
    module(torch.rand(4, 5)).sum().backward()
    nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    optimizer.step()
    assert all(float(local(p.grad).abs().max()) <= 1.001e-3 for p in module.parameters() if p.grad is not None)


def test_in_a_users_loop_torch_takes_lists_of_all_parameters() -> None:
    in_group(2, lists_of_all)
