"""Attention divided by heads: it computes and trains what the whole attention does, on any mesh."""

from __future__ import annotations

import copy
import logging
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import local, local_parts, whole
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.mesh import Mesh, MeshOptions
from sparktorch.train.strategies.registry import check_module
from sparktorch.train.tensor_parallel.styles import check_plan, shard_layers
from sparktorch.worker import TrainJob
from tests.dist.strategies.test_strategies import FEW_STEPS, TABLE, job_for, plain
from tests.support.attention_nets import Encoder, Translator
from tests.support.ranks import control_server, in_group, of_two_ranks, run_ranks, train_on
from tests.support.resume import Counts

# Not Adam: a bias of the keys has no gradient but rounding, of which Adam makes steps.
STEEP: dict[str, Any] = {
    "optimizer": "SGD",
    "optimizer_params": {"momentum": 0.9},
    "learning_rate": 0.05,
}
FEW = Batch((torch.ones(2, 5),), None, None, 2)
SMALL = partial(Encoder, layers=1)
MESHES: dict[str, tuple[int, Any, dict[str, int], dict[str, Any]]] = {
    "heads": (2, Encoder, {"tensor": 2}, {"accumulation_steps": 1}),
    "uneven shards of heads": (4, partial(Encoder, 6, 2, layers=1), {"shard": 2, "tensor": 2}, FEW_STEPS),
    "encoder and decoder": (2, Translator, {"tensor": 2}, FEW_STEPS),
}


def heads_job(module: Any, sizes: dict[str, int], *, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    params = {"min_parameters": 200, **sizes}
    made = {"module": module, **STEEP, **(recipe or {})}
    return job_for(recipe=made, strategy="mesh", strategy_params=params, **config)


def descended(module: Any, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    sizes = {name: config[name] for name in ("batch_size", "epochs") if name in config}
    return plain(of=module, kind=torch.optim.SGD, lr=0.05, momentum=0.9, **sizes)


@pytest.mark.parametrize("case", MESHES)
def test_ranks_with_some_heads_train_what_one_plain_loop_trains(case: str) -> None:
    ranks, module, sizes, config = MESHES[case]
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], heads_job(module, sizes, **config))
    expected, loss = descended(module, config)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.landing
def test_stages_of_a_pipeline_have_some_heads_of_their_layers() -> None:
    module = Encoder
    job = heads_job(module, {"pipeline": 2, "tensor": 2, "micro_batches": 2}, **FEW_STEPS)
    state, metas = train_on([part.batches() for part in TABLE.parts(4)], job)
    expected, loss = descended(module, FEW_STEPS)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)
    assert metas[0]["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.landing
def test_a_checkpoint_of_some_heads_is_gone_on_with_on_another_mesh_and_in_one_process(tmp_path: Path) -> None:
    config = {**FEW_STEPS, "ema_decay": 0.5}

    def job(strategy: dict[str, Any], **kill: int) -> TrainJob:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        recipe = {"callbacks": [Counts(folder, **kill)]}
        made = heads_job(SMALL, {"tensor": 2}, recipe=recipe, **config)
        checkpoint = CheckpointConfig(directory=str(tmp_path / "saved"), unit="step", interval=1, owner="me")
        return replace(made, config=replace(made.config, **strategy), checkpoint=checkpoint)

    def mesh(**sizes: int) -> dict[str, Any]:
        return {"strategy": "mesh", "strategy_params": {"min_parameters": 200, **sizes}}

    def killed(ranks: int, made: TrainJob) -> None:
        with control_server() as server:
            ended = run_ranks(server, [part.batches() for part in TABLE.parts(ranks)], made)
        assert any(rank.exitcode == -signal.SIGKILL for rank in ended), [rank.error for rank in ended]

    killed(4, job(mesh(shard=2, tensor=2), rank=3, step=2))
    killed(4, job(mesh(data=2, tensor=2), rank=3, step=4))
    state, _ = train_on([TABLE.batches()], job({"strategy": "ddp", "strategy_params": {}}))
    expected, _ = train_on([TABLE.batches()], job_for(recipe={"module": SMALL, **STEEP}, **config))
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)


ROWS, WIDTH, HEADS = 3, 12, 4


def calls_of(rows: int) -> dict[str, dict[str, Any]]:
    """Arguments of attention to three of a row's five keys, or to itself, besides its inputs."""
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5)[None] >= torch.tensor([[5], [4], [3]])
    of_heads = (torch.rand(rows * HEADS, 5, 5) > 0.5) & (torch.arange(5) > 0)  # each query has a key
    return {
        "itself": {},
        "weights of each head": {"average_attn_weights": False},
        "no weights": {"need_weights": False},
        "padded keys": {"key_padding_mask": padding, "need_weights": False},
        "padded keys, weights": {"key_padding_mask": padding.float() * -3, "attn_mask": causal.float() * -2},
        "causal": {"attn_mask": causal, "is_causal": True, "need_weights": False},
        "causal, padded": {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding, "need_weights": False},
        "a mask of each head": {"attn_mask": torch.randn(rows * HEADS, 5, 5), "need_weights": False},
        "a mask of each head, padded": {"attn_mask": of_heads, "key_padding_mask": padding},
    }


def attention(world: World) -> dict[str, Any]:
    """What divided attention computes, beside the whole one."""
    mesh = of_two_ranks()
    found: dict[str, Any] = {}
    kinds: list[dict[str, Any]] = [{"batch_first": True}, {"bias": False}, {"kdim": 7, "vdim": 9, "batch_first": True}]
    for number, kind in enumerate(kinds):
        torch.manual_seed(number)
        plain = nn.ModuleDict({"it": nn.MultiheadAttention(WIDTH, HEADS, **kind)})
        nn.init.normal_(plain["it"].in_proj_bias) if kind.get("bias", True) else None
        divided = copy.deepcopy(plain)
        shard_layers(divided, mesh, check_plan(divided, {"it": "heads"}, 2), lambda part: None)
        shapes = {name: value.shape for name, value in plain.state_dict().items()}
        found[f"{kind} shapes"] = shapes == {name: value.shape for name, value in divided.state_dict().items()}
        for name, arguments in calls_of(ROWS).items():
            alike = "kdim" not in kind
            sizes = [WIDTH, kind.get("kdim", WIDTH), kind.get("vdim", WIDTH)]
            inputs = [torch.randn(ROWS, 5, size) for size in sizes]
            inputs = inputs if kind.get("batch_first") else [each.transpose(0, 1).contiguous() for each in inputs]
            results = []
            for module in (plain, divided):
                own = [each.clone().requires_grad_() for each in inputs]
                given = [own[0]] * 3 if alike and "mask of each head" not in name else own
                output, weights = module["it"](*given, **arguments)
                module.zero_grad()
                (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
                gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
                results.append((output, weights, [each.grad for each in own], gradients))
            try:
                torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
                found[f"{kind} {name}"] = True
            except AssertionError as error:
                found[f"{kind} {name}"] = str(error)
    large = nn.ModuleDict({"it": nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float16, batch_first=True)})
    nn.init.constant_(large["it"].in_proj_weight, 160 / WIDTH)  # products of queries and keys would be 76800
    x = torch.ones(1, 2, WIDTH, dtype=torch.float16)
    expected = large["it"](x, x, x)
    shard_layers(large, mesh, check_plan(large, {"it": "heads"}, 2), lambda part: None)
    output = large["it"](x, x, x)
    found["large"] = all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(output, expected, strict=True))
    return found


def test_divided_attention_computes_what_the_whole_one_does_of_all_arguments() -> None:
    for found in in_group(2, attention):
        assert len(found) == 3 * 10 + 1
        assert not {name: value for name, value in found.items() if value is not True}


def numbers(world: World, compiled: bool = False) -> dict[str, Any]:
    """What is drawn within and after attention with dropout, in a rank."""
    mesh = of_two_ranks()
    torch.manual_seed(3)
    module = nn.ModuleDict({"it": nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)})
    shard_layers(module, mesh, check_plan(module, {"it": "heads"}, mesh.size()), lambda part: None)
    attend = torch.compile(module["it"], backend="aot_eager") if compiled else module["it"]
    x = torch.ones(1, 8, 4)
    _, weights = attend(x, x, x, average_attn_weights=False)
    module.eval()
    _, kept = attend(x, x, x, average_attn_weights=False)
    return {"dropped": (weights[0] == 0).tolist(), "kept": bool((kept > 0).all()), "after": torch.rand(4).tolist()}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.landing)])
def test_each_head_drops_other_weights_and_afterwards_all_ranks_draw_the_same(
    compiled: bool, request: pytest.FixtureRequest
) -> None:
    first, second = (
        [drawn for drawn, _ in request.getfixturevalue("found_compiled")] if compiled else in_group(2, numbers)
    )
    assert first["dropped"] == second["dropped"]  # those of all heads, in both ranks
    assert 0.2 < torch.tensor(first["dropped"]).float().mean() < 0.8
    assert first["dropped"][0] != first["dropped"][1]
    assert first["kept"]
    assert first["after"] == second["after"]


def placed(world: World) -> dict[str, Any]:
    """Where a rank's parts of packed weights are, in four ranks; and what gathers of torch's say of them."""
    config = heads_job(Encoder, {"shard": 2, "tensor": 2}).config
    strategy = Mesh(config, world, MeshOptions(shard=2, tensor=2, min_parameters=10**6))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.TransformerEncoderLayer(8, 4, 12, batch_first=True))
    state = copy.deepcopy(plain.state_dict())
    strategy.prepare(plain, Start())
    name = "0.self_attn.in_proj_weight"
    parameter = dict(plain.named_parameters())[name]
    parts = local_parts(parameter.detach())
    equal = [
        torch.equal(part, state[name][offset[0] : offset[0] + len(part), offset[1] : offset[1] + part.shape[1]])
        for part, offset in parts
    ]
    bias: Any = plain.get_submodule("0.self_attn").in_proj_bias
    with pytest.raises(ModuleError) as error:
        bias.full_tensor()
    weights: Any = parameter.detach()
    computed: list[Any] = [weights.clone(), weights.double(), weights.T, weights, bias]  # torch caches gathers
    for value in computed:
        with pytest.raises((ModuleError, AssertionError)):
            value.full_tensor()
    with pytest.raises((ModuleError, AssertionError)):
        _ = weights @ weights.T  # it gathers both
    return {
        "equal": equal,
        "rows": [(offset[0], offset[0] + len(part)) for part, offset in parts],
        "whole": all(torch.equal(whole(p.detach() * 1), state[n]) for n, p in plain.named_parameters()),
        "norm": float(weights.norm().full_tensor() - state[name].norm()),
        "elements": sum(part.numel() for part, _ in parts) == local(parameter).numel(),
        "error": str(error.value),
    }


def test_packed_weights_are_found_in_all_places_and_put_together_in_their_order() -> None:
    found = in_group(4, placed)
    assert all(all(each["equal"]) and each["whole"] and each["elements"] for each in found)
    assert all(abs(each["norm"]) < 1e-4 for each in found)
    rows = sorted(row for each in found for first, end in each["rows"] for row in range(first, end))
    assert rows == list(range(24))
    assert all("context.state_dict" in each["error"] for each in found)


def compiled(world: World) -> list[bool]:
    """Whether divided layers under `torch.compile` have the gradients of the whole ones."""
    mesh = of_two_ranks()
    x = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    divided = copy.deepcopy(plain)
    shard_layers(divided, mesh, check_plan(divided, {}, 2), lambda part: None)
    assert hasattr(divided.self_attn.in_proj_weight, "device_mesh")
    for module in (plain, torch.compile(divided, backend="aot_eager")):
        module(x).square().sum().backward()
    pairs = zip(divided.parameters(), plain.parameters(), strict=True)
    return [torch.allclose(whole(own.grad), p.grad, atol=1e-4) for own, p in pairs]


def under_compile(world: World) -> tuple[dict[str, Any], list[bool]]:
    return numbers(world, compiled=True), compiled(world)


@pytest.fixture(scope="module")
def found_compiled() -> list[tuple[dict[str, Any], list[bool]]]:
    """What two ranks find under `torch.compile`, which takes a second to import."""
    return in_group(2, under_compile)


@pytest.mark.landing
def test_divided_attention_is_compiled(found_compiled: list[tuple[dict[str, Any], list[bool]]]) -> None:
    assert all(all(found) for _, found in found_compiled)


@pytest.mark.parametrize(
    ("part", "style", "says"),
    [
        (nn.MultiheadAttention(12, 3), "heads", "whose 3 heads are not divisible by 2"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "heads", "with add_bias_kv or add_zero_attn"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), "heads", "with add_bias_kv or add_zero_attn"),
        (nn.MultiheadAttention(4, 2), "colwise", "'colwise' divides only nn.Linear and nn.Embedding"),
        (nn.Linear(4, 4), "heads", "'heads' divides only nn.MultiheadAttention"),
        (type("Own", (nn.MultiheadAttention,), {})(4, 2), "heads", "'heads' divides only nn.MultiheadAttention"),
    ],
)
def test_attention_that_cannot_be_divided_by_heads_is_refused_before_the_job(
    part: nn.Module, style: str, says: str
) -> None:
    module = nn.ModuleDict({"part": part})
    config = heads_job(Encoder, {"tensor": 2}).config
    config = replace(config, strategy_params={"tensor": 2, "plan": {"part": style}})
    with pytest.raises(ConfigError, match=says):
        check_module(config, Recipe(module=module), 2, module, FEW)


def test_heads_that_are_not_divisible_stay_whole_where_no_plan_names_them() -> None:
    found = check_plan(nn.TransformerEncoderLayer(12, 3, 8), {}, 2)
    assert found == {"linear1": "colwise", "linear2": "rowwise"}
    decoder = check_plan(nn.TransformerDecoderLayer(12, 2, 8), {}, 2)
    attentions = ("self_attn", "multihead_attn")
    assert {name for name, style in decoder.items() if style == "heads"} == set(attentions)
    assert all(decoder[f"{name}.out_proj"] == "rowwise" for name in attentions)


def told(world: World, heads: int, plan: dict[str, str]) -> list[str]:
    """What a rank logs where it divides a layer."""
    lines: list[str] = []
    handler = logging.Handler()  # in a rank, where no fixture of pytest's listens
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparktorch").addHandler(handler)
    config = heads_job(Encoder, {"tensor": 2}).config
    Mesh(config, world, MeshOptions(tensor=2, plan=plan)).prepare(nn.TransformerEncoderLayer(12, heads, 8), Start())
    return lines


def test_layers_that_stay_whole_unasked_are_told_once() -> None:
    said = "strategyParams.tensor is 2: 'self_attn', whose 3 heads are not divisible by 2, stays whole"
    assert in_group(2, told, 3, {}) == [[said], []]
    assert in_group(2, told, 2, {}) == [[], []]
    assert in_group(2, told, 3, {"linear1": "colwise", "linear2": "rowwise"}) == [[], []]


def test_one_row_without_an_axis_of_rows_is_refused() -> None:
    assert all("gets a query of 2 axes" in found for found in in_group(2, alone))


def alone(world: World) -> str:
    module = nn.ModuleDict({"it": nn.MultiheadAttention(4, 2)})
    shard_layers(module, of_two_ranks(), check_plan(module, {"it": "heads"}, 2), lambda part: None)
    x = torch.ones(5, 4)
    with pytest.raises(ModuleError) as error:
        module["it"](x, x, x)
    return str(error.value)
