"""Layers divided among ranks that compute on the same rows: what modules and loops may do with them."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

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
from tests.support.tiny_transformers import causal, llama, qwen, shortened

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


def test_ranks_whose_texts_are_padded_to_another_length_are_told_to_pad_them_alike() -> None:
    table = texts.sentences(shortened, labelled=False)
    job = texts.job_for(table, llama(), strategy="mesh", strategy_params={"tensor": 2}, batch_size=6)
    with pytest.raises(ModuleError, match=r"(?s)tensors of other shapes.*pad inputs to a fixed length"):
        trained(job, 2, table=table)


class InPlace(nn.Module):
    """Layers whose activation works in place, and attention whose parts are never called."""

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
        (InPlace, {"sequence": True}),
        (Shifted, {"plan": {"table": "rowwise"}}),
    ],
)
def test_parameters_between_divided_layers_and_changes_in_place_train_as_in_one_process(
    module: type[nn.Module], options: dict[str, Any]
) -> None:
    recipe = {**DESCENT, "module": module}
    close(trained(job_for(recipe=recipe, sizes={"tensor": 2, **options}, **FEW_STEPS), 2), plain(recipe, **FEW_STEPS))


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
    with pytest.raises(ModuleError, match="Stage, with its layers divided, returns something else"):
        trained(job_for(recipe={"module": module}, sizes=sizes, accumulation_steps=1), 4)


def test_attention_is_gathered_as_a_whole_under_zero3() -> None:
    recipe = {**DESCENT, "module": InPlace}
    job = job_for(recipe=recipe, strategy="zero3", strategy_params={"min_parameters": 10}, **FEW_STEPS)
    close(trained(job, 2), plain(recipe, **FEW_STEPS))


@dataclass
class Output:
    value: torch.Tensor


class Odd(nn.Module):
    """Returns what is asked for, of a divided layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, scale: Any = 1.0, *, kind: str = "plain") -> Any:
        if kind == "failing":
            raise ValueError("as asked")
        out = self.net(x) * scale
        if kind == "complex":
            return torch.complex(out, out)
        return Output(out) if kind == "dataclass" else {"twice": 2 * out, "rows": out} if kind == "dict" else out


def calls(world: World) -> None:
    """Does with a wrapped module what own loops do, in one of two ranks."""
    config = job_for(sizes={"tensor": 2}).config
    torch.manual_seed(0)
    odd = Odd()
    module = build_strategy(config, world).prepare(copy.deepcopy(odd), Start())
    x = torch.randn(2 + world.rank, 5).requires_grad_()
    module(x).sum().backward()
    (expected,) = torch.autograd.grad(odd(x).sum(), x)
    assert torch.allclose(cast(torch.Tensor, x.grad), expected, atol=1e-6)
    module.zero_grad()
    outputs = module(x.detach(), kind="dict")
    outputs["rows" if world.rank else "twice"].sum().backward()  # each rank uses another one
    assert module(x.detach(), kind="complex").requires_grad
    before = torch.get_rng_state()
    with contextlib.suppress(ValueError):
        module(x.detach(), kind="failing")
    torch.randint(2**31, ())  # the one draw of an exchange
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**31, ()), torch.randint(2**31, ())
    assert torch.equal(after, torch.get_rng_state())
    with pytest.raises(ModuleError, match="type Output"):
        module(x.detach(), kind="dataclass")
    with pytest.raises(ModuleError, match="with other numbers"):
        module(x.detach(), torch.tensor(float(world.rank)))


def test_own_loops_get_gradients_of_inputs_and_differing_calls_are_refused_in_all_ranks() -> None:
    in_group(2, calls)


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
