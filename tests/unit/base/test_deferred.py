"""A module built without values gets the same ones in any order of its parts: saved ones, and those of its methods."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparktorch.base.deferred import deferred
from sparktorch.errors import ModuleError


class Every(nn.Module):
    """Tensors of all kinds, in a module that sets what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scales = nn.Parameter(torch.randn(1, 8), False), nn.ParameterList([torch.ones(3)])
        self.table, self.tied = nn.Embedding(10, 8, padding_idx=3), nn.Linear(8, 10)
        self.tied.weight = self.table.weight
        self.table.weight.no_decay = True  # type: ignore[attr-defined]
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("mean", torch.from_numpy(np.arange(8, dtype=np.float32)))  # has its values
        self.factor, self.recurrent, self.empty = torch.tensor(2.0), nn.LSTM(8, 4, 2), nn.Sequential()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token)
        nn.init.uniform_(self.scales[0])
        self.mask = torch.ones(3, 3, dtype=torch.bool).tril()
        self.factor.fill_(2.0)
        nn.init.ones_(self.tied.bias)  # after the layer's own method


class Small(nn.Module):
    """Initialises its layers one by one, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(50, 50), nn.LayerNorm(50))

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)


def made(make: Callable[[], nn.Module], seed: int = 3) -> Any:
    built = deferred(make, seed=seed)
    built.materialise(built.module)
    return built.module


def check_values(make: Callable[[], nn.Module]) -> None:
    """Compares what parts get one by one, the last one first, with what a whole module gets, and with another seed."""

    def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
        return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}

    before, built = torch.get_rng_state(), deferred(make, seed=3)
    built.check_reset()
    for part in reversed([*built.module.children(), built.module]):
        built.materialise(part)
    assert torch.equal(torch.get_rng_state(), before)
    found, real = tensors(built.module), make()
    kinds = [{n: (type(t), t.dtype, t.requires_grad) for n, t in each.items()} for each in (found, tensors(real))]
    assert kinds[0] == kinds[1]
    assert [name for name, tensor in tensors(made(make)).items() if not torch.equal(tensor, found[name])] == []
    assert [name for name, buffer in real.named_buffers() if not torch.equal(buffer, found[name])] == []
    assert len(list(built.module.parameters())) == len(list(real.parameters()))  # tied ones are tied
    assert any(not torch.equal(tensor, found[name]) for name, tensor in tensors(made(make, seed=4)).items())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "every way": Every,
    "one by one": Small,
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "statistics": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.PReLU()).half(),
}


@pytest.mark.parametrize("case", MODULES)
def test_parts_get_the_same_values_in_any_order(case: str) -> None:
    check_values(MODULES[case])


def test_one_part_is_made_at_a_time_and_modules_compute_with_their_values() -> None:
    built: Any = deferred(Every)
    built.materialise(built.module.tied)
    assert built.module.table.weight is built.module.tied.weight
    assert built.module.table.weight.no_decay
    assert not built.module.table.weight[3].any()  # of the embedding, which is the first that has it
    assert built.module.tied.bias.tolist() == [1.0] * 10
    assert built.module.recurrent.weight_ih_l0.is_meta
    built.materialise(built.module)
    output, _ = built.module.recurrent(built.module.tied(built.module.token)[:, :8] * built.module.factor)
    assert output.isfinite().all()
    assert 0.015 < made(Small).layers[0].weight.std() < 0.025


class Computed(nn.Linear):
    """Computes a buffer, of which its method sets all numbers but some."""

    waves: torch.Tensor

    def __init__(self, kind: torch.dtype = torch.bool, but: int = 1) -> None:
        super().__init__(2, 2)
        self.but = but
        self.register_buffer("waves", torch.arange(4).to(kind), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "waves"):  # all is made
            self.waves[self.but :] = 1


class Plain(nn.Linear):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(2)


class Reads(nn.Sequential):
    """Sets a layer by another one."""

    def reset_parameters(self) -> None:
        self[0].weight.copy_(self[1].weight)  # type: ignore[operator, arg-type]


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    *((partial(Computed, kind), "'waves'") for kind in (torch.float32, torch.bool)),
    (Plain, r"'scale' has no value: .*\n.*in a method reset_parameters\(\) of Plain, or .*leave modelDir out"),
    (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), "'parametrizations.weight.original0'"),
    (lambda: nn.Sequential(nn.BCEWithLogitsLoss(pos_weight=torch.ones(2))), "'0.pos_weight'"),
    (lambda: Reads(nn.Linear(2, 2), nn.Linear(2, 2)), r"'0', a Linear, cannot be reset.*\n.*of its own module only"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_what_neither_saved_values_nor_methods_reach_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    built = deferred(make)
    for check in (built.check_reset, lambda: built.materialise(built.module)):
        with pytest.raises(ModuleError, match=said):
            check()
    made(partial(Computed, but=0))


def test_values_that_a_constructor_copies_into_a_layer_are_refused() -> None:
    def loads() -> nn.Module:
        made = nn.Linear(2, 2)
        with torch.no_grad():
            made.weight.copy_(torch.from_numpy(np.ones((2, 2), np.float32)))
        return made

    with pytest.raises(ModuleError, match="copies values into tensors"):
        deferred(loads)


def test_saved_values_take_the_place_of_all_others() -> None:
    saved = {name: torch.full_like(value, 7) for name, value in Every().state_dict().items() if name != "table.weight"}
    built: Any = deferred(Every, saved)
    built.check_saved()
    built.materialise(built.module)
    assert all(torch.equal(built.module.state_dict()[name], value) for name, value in saved.items())
    assert torch.equal(built.module.mask, Every().mask)
    assert built.module.tied.weight is built.module.table.weight


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"weight": torch.zeros(2, 3)}, "lack 'bias'"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "more": torch.zeros(1)}, "have 'more'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"'weight' of the shape \(3, 2\)"),
    ],
)
def test_values_of_another_module_are_refused(saved: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ModuleError, match=said):
        deferred(lambda: nn.Linear(3, 2), saved).check_saved()


def test_a_function_that_another_library_has_replaced_for_a_while_makes_no_values() -> None:
    # As transformers does with linspace, under the first such context of the process.
    program = """
import torch, sparktorch.base.deferred
own = torch.linspace
torch.linspace = lambda *given: own(*given)
with torch.device("meta"):
    torch.zeros(2)
torch.linspace = own
with torch.device("meta"):
    print(torch.linspace(0, 1, 3).device)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "meta\n"
