"""Attention divided by heads: it computes what the whole attention does, of all arguments, and drops as it does."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.sharding.dtensor import local, local_parts, whole
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.mesh import Mesh, MeshOptions
from sparktorch.train.tensor_parallel.styles import check_plan, shard_layers
from tests.support.ranks import in_group, of_two_ranks
from tests.support.strategies import job_for

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


def attention(world: World) -> None:
    """Compares divided attention with the whole one."""
    mesh = of_two_ranks()
    kinds: list[dict[str, Any]] = [{"batch_first": True}, {"bias": False}, {"kdim": 7, "vdim": 9, "batch_first": True}]
    for number, kind in enumerate(kinds):
        torch.manual_seed(number)
        plain = nn.ModuleDict({"it": nn.MultiheadAttention(WIDTH, HEADS, **kind)})
        nn.init.normal_(plain["it"].in_proj_bias) if kind.get("bias", True) else None
        divided = copy.deepcopy(plain)
        shard_layers(divided, mesh, check_plan(divided, {"it": "heads"}, 2), lambda part: None)
        whole_shapes, shapes = ({n: v.shape for n, v in each.state_dict().items()} for each in (plain, divided))
        assert shapes == whole_shapes
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
            case = f"{sizes}, {name}: {{}}"
            torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5, msg=case.format)
    large = nn.ModuleDict({"it": nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float16, batch_first=True)})
    nn.init.constant_(large["it"].in_proj_weight, 160 / WIDTH)  # products of queries and keys would be 76800
    x = torch.ones(1, 2, WIDTH, dtype=torch.float16)
    expected = large["it"](x, x, x)
    shard_layers(large, mesh, check_plan(large, {"it": "heads"}, 2), lambda part: None)
    output = large["it"](x, x, x)
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-8)


def test_divided_attention_computes_what_the_whole_one_does_of_all_arguments() -> None:
    in_group(2, attention)


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


def placed(world: World) -> list[int]:
    """Returns which rows of packed weights one of four ranks has; and looks at what gathers of torch's say of them."""
    config = job_for(sizes={"shard": 2, "tensor": 2}).config
    strategy = Mesh(config, world, MeshOptions(shard=2, tensor=2, min_parameters=10**6))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.TransformerEncoderLayer(8, 4, 12, batch_first=True))
    state = copy.deepcopy(plain.state_dict())
    strategy.prepare(plain, Start())
    name = "0.self_attn.in_proj_weight"
    parameter = dict(plain.named_parameters())[name]
    parts = local_parts(parameter.detach())
    for part, (row, column) in parts:
        assert torch.equal(part, state[name][row : row + len(part), column : column + part.shape[1]])
    bias: Any = plain.get_submodule("0.self_attn").in_proj_bias
    with pytest.raises(ModuleError, match=r"context\.state_dict"):
        bias.full_tensor()
    weights: Any = parameter.detach()
    computed: list[Any] = [weights.clone(), weights.double(), weights.T, weights, bias]  # torch caches gathers
    for value in computed:
        with pytest.raises((ModuleError, AssertionError)):
            value.full_tensor()
    with pytest.raises((ModuleError, AssertionError)):
        _ = weights @ weights.T  # it gathers both
    assert all(torch.equal(whole(p.detach() * 1), state[n]) for n, p in plain.named_parameters())
    assert abs(float(weights.norm().full_tensor() - state[name].norm())) < 1e-4
    assert sum(part.numel() for part, _ in parts) == local(parameter).numel()
    return [row for part, (first, _) in parts for row in range(first, first + len(part))]


def test_packed_weights_are_found_in_all_places_and_put_together_in_their_order() -> None:
    assert sorted(row for rows in in_group(4, placed) for row in rows) == list(range(24))


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
    config = job_for(sizes={"tensor": 2}).config
    Mesh(config, world, MeshOptions(tensor=2, plan=plan)).prepare(nn.TransformerEncoderLayer(12, heads, 8), Start())
    return lines


def test_layers_that_stay_whole_unasked_are_told_once() -> None:
    said = "strategyParams.tensor is 2: 'self_attn', whose 3 heads are not divisible by 2, stays whole"
    assert in_group(2, told, 3, {}) == [[said], []]
    assert in_group(2, told, 3, {"linear1": "colwise", "linear2": "rowwise"}) == [[], []]
