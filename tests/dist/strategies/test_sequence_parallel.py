"""Sequences that are divided between divided layers: they compute what whole ones do, and ranks keep less."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.plan.memory import plan
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import local, whole
from sparktorch.train.tensor_parallel.styles import SUMMED, check_plan, shard_layers
from tests.support.ranks import in_group, of_two_ranks


def stack(norm_first: bool, **kind: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first, **{"dropout": 0.0, **kind})
    return nn.TransformerEncoder(layer, 2, nn.RMSNorm(8))


def shared() -> nn.Module:
    module = stack(False)
    module.layers[1].norm2 = module.layers[0].norm2
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a norm of two layers": shared,
    "norms behind": partial(stack, False),
    "norms first": partial(stack, True, activation="gelu", bias=False),
    "single layers": lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),) * 2),
    "both stacks": lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True),
}


def divide_by_plan(module: nn.Module, mesh: DeviceMesh, *, sequence: bool = True, again: bool = True) -> dict[str, str]:
    """Divides the layers that are known to belong together; returns their styles."""
    styles = check_plan(module, {}, mesh.size(), sequence=sequence)
    shard_layers(module, mesh, styles, lambda part: None, sequence=sequence, recompute_allgather=again)
    return styles


def computed(world: World, again: bool) -> None:
    """Compares divided modules with whole ones, of sequences of several lengths."""
    mesh = of_two_ranks()
    for name, make in MODULES.items():
        torch.manual_seed(0)
        plain = make()
        for parameter in plain.parameters():
            nn.init.normal_(parameter, std=0.4)
        divided = copy.deepcopy(plain)
        styles = divide_by_plan(divided, mesh, again=again)
        for length, dtype in ((4, None), (5, None), (1, None), (3, torch.bfloat16)):
            x, results = torch.randn(3, length, 8), []
            for module in (plain, divided):
                own = x.clone().requires_grad_()
                given = (own, 2 * own[:, :2]) if name == "both stacks" else (own,)
                module.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    output = module.train()(*given)
                (output.square().sum() + output[:, 0].sum()).backward()
                for part in (n for n, style in styles.items() if style == SUMMED and module is divided):
                    for parameter in divided.get_submodule(part).parameters():
                        dist.all_reduce(parameter.grad)
                gradients = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
                with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype is not None):
                    evaluated = module.eval()(*given)
                results.append((output, evaluated.float(), own.grad, gradients))
            close = {"atol": 2e-5, "rtol": 1e-4} if dtype is None else {"atol": 0.5, "rtol": 0.1}
            case = f"{name}, {length}: {{}}"
            torch.testing.assert_close(results[1], results[0], **close, msg=case.format)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
    divided = copy.deepcopy(plain)
    divide_by_plan(divided, mesh)
    padding = torch.arange(4)[None] >= torch.tensor([[4], [3]])
    for arguments in ({"mask": causal}, {"src_key_padding_mask": padding}):
        with torch.no_grad():
            outputs = [module.eval()(torch.ones(2, 4, 8), **arguments) for module in (plain, divided)]
        keep = ~padding[..., None]  # torch's kernel for whole layers returns zeros for what is padded
        torch.testing.assert_close(outputs[1] * keep, outputs[0] * keep, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("again", [True, False])
def test_divided_sequences_of_any_length_are_computed_as_whole_ones(again: bool) -> None:
    in_group(2, computed, again)


def drawn(world: World) -> tuple[list[Any], list[float]]:
    """Returns what is dropped of a rank's positions, and drawn afterwards."""
    torch.manual_seed(3)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.5, batch_first=True), 1)
    divide_by_plan(module, of_two_ranks())
    dropped = []
    module.layers[0].dropout1.register_forward_hook(lambda part, args, out: dropped.append(out.to_local() == 0))
    module(torch.ones(1, 7, 8))
    after = torch.rand(4).tolist()
    module.eval()(torch.ones(1, 7, 8))
    assert not dropped[1].any()
    return dropped[0][:, :3].tolist(), after


def test_each_rank_drops_other_numbers_and_afterwards_all_draw_the_same() -> None:
    (dropped, after), (others, as_well) = in_group(2, drawn)
    assert dropped != others
    assert after == as_well


class Deep(nn.Module):
    """Layers of which nothing but their own activations is kept."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, nn.LayerNorm(16), enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)[..., 0].sum(-1)


class Sent(TorchDispatchMode):
    """Counts the collectives of a pass by what they do, and the dtypes of what they gather."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.gathered: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives itself
        self.found.update(kind for kind in ("all_reduce", "all_gather", "reduce_scatter") if kind in str(func))
        self.gathered.update([args[0].dtype] if "all_gather" in str(func) else [])
        return func(*args, **(kwargs or {}))


def kept(world: World) -> dict[str, Any]:
    """The bytes that autograd keeps of four rows in one of two ranks, but for parameters; and what a pass sends."""
    mesh, found = of_two_ranks(), {}
    for name in ("whole", "tensor", "sequence", "inputs kept"):
        module, tensors = Deep(), {}
        if name != "whole":
            divide_by_plan(module, mesh, sequence=name != "tensor", again=name != "inputs kept")
        own = {local(parameter.detach()).untyped_storage().data_ptr() for parameter in module.parameters()}

        def pack(tensor: torch.Tensor, own: Any = own, tensors: Any = tensors) -> torch.Tensor:
            storage = local(tensor.detach()).untyped_storage()
            if storage.data_ptr() not in own:
                tensors[storage.data_ptr()] = storage
            return tensor

        x = torch.ones(4, 8, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        found[name] = sum(storage.nbytes() for storage in tensors.values())
        with Sent() as sent:
            module(x).sum().backward()
        found[f"{name}, sent"] = dict(sent.found)
    with torch.autocast("cpu", torch.bfloat16), Sent() as sent:
        module(x)
    found["autocast, gathered"] = {str(dtype): count for dtype, count in sent.gathered.items()}
    return found


def test_a_rank_keeps_half_of_what_one_process_keeps_as_the_plan_says() -> None:
    first, (found, _) = Batch((torch.ones(2, 8, 16),), torch.ones(2), None, 2, names=("x",)), in_group(2, kept)
    assert found["sequence"] == pytest.approx(found["whole"] / 2, rel=0.02)
    needs = {}
    options = {"tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence": True}}
    options["inputs kept"] = {**options["sequence"], "recompute_allgather": False}
    for name, params in options.items():
        config = TrainConfig(task="regression", batch_size=4, strategy="mesh", strategy_params=params)
        table = plan(Recipe(module=Deep, optimizer="SGD"), config, 2, first)
        (needs[name],) = (need for need in table.needs if need.options == params)
    inputs = 4 * 8 * 16 * 4
    for name, need in needs.items():
        # The plan has the inputs of all rows, of which the rank keeps its positions besides.
        expected = found[name] + (inputs if "sequence" in need.options else 0)
        assert need.activations == pytest.approx(expected, rel=0.1), name
    # Six inputs of layers are gathered again, of which a rank sends its half; and the output, and the input's gradient.
    assert found["tensor, sent"] == {"all_reduce": 12}
    assert found["sequence, sent"] == {"all_gather": 12 + 6 + 2, "reduce_scatter": 12}
    # Of six inputs, a rank keeps the other half, too.
    assert found["inputs kept"] - found["sequence"] == 6 * inputs // 2
    assert found["inputs kept, sent"] == {"all_gather": 12 + 2, "reduce_scatter": 12}
    assert found["autocast, gathered"] == {"torch.bfloat16": 6, "torch.float32": 1}
