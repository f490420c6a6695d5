"""Plans that compute something else than the undivided module are found, and others are let through."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.no_op import no_op
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import divide_gradients
from sparktorch.train.strategies.base import Start
from sparktorch.train.strategies.registry import build_strategy
from sparktorch.train.tensor_parallel.comparison import compare_division
from sparktorch.train.tensor_parallel.styles import check_plan, shard_layers
from tests.support.nets import Gated
from tests.support.ranks import in_group, of_two_ranks

PAIR = {"fc1": "colwise", "fc2": "rowwise"}


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.fc1, self.fc2, self.fc3 = nn.Linear(5, 8), nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(self.fc2(self.function(self.fc1(x)))).squeeze(-1)
        return out


class Force(Between):
    """Takes a gradient in its forward pass, and draws numbers, which are the same in all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = (x + torch.randn_like(x)).detach().requires_grad_()
            energy = super().forward(x)
            return energy + torch.autograd.grad(energy.sum(), x, retain_graph=True)[0].sum(1)


class Chance(Between):
    """Scales its input by a number of Python's, as layers that are skipped by chance do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.uniform(0.5, 1.5))


class Headless(Between):
    """Has a head of zeros, behind which nothing shows."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(function)
        nn.init.zeros_(self.fc3.weight)


class TwoNames(Between):
    """Has its layers in a Sequential, too, under other names."""

    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.net = nn.Sequential(self.fc1, nn.ReLU(), self.fc2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(self.net(x)).squeeze(-1)
        return out


class Masked(Between):
    """Returns scores beside what stands for minus infinity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return torch.stack([out, torch.full_like(out, -1e9), torch.full_like(out, -torch.inf)], 1)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], bool]] = {
    "tanh": (partial(Between, torch.tanh), PAIR, False),
    "heads of a size": (partial(Between, lambda h: h.view(len(h), -1, 2).softmax(-1).flatten(1)), PAIR, False),
    "gathered": (partial(Between, nn.functional.normalize), {"fc1": "colwise_gather_output"}, False),
    "two names": (TwoNames, {}, False),
    "force": (partial(Force, torch.tanh), PAIR, False),
    "chance": (partial(Chance, torch.tanh), PAIR, False),
    "masked": (partial(Masked, torch.tanh), PAIR, False),
    "half": (lambda: Between(torch.tanh).bfloat16(), PAIR, False),
    "drawn in evaluation": (partial(Between, nn.functional.dropout), PAIR, False),
    "softmax": (partial(Between, lambda h: h.softmax(-1)), PAIR, True),
    "softmax before zeros": (partial(Headless, lambda h: h.softmax(-1)), PAIR, True),
    "a number of heads": (partial(Between, lambda h: h.view(len(h), 2, -1).softmax(-1).flatten(1)), PAIR, True),
    "scaled by the width": (partial(Between, lambda h: h / h.shape[-1] ** 0.5), PAIR, True),
    "glu": (partial(Between, nn.functional.glu, 4), PAIR, True),
    "no partner": (partial(Between, torch.tanh), {"fc1": "colwise"}, True),
}


def compared(world: World) -> dict[str, str]:
    """What is said of each plan; an empty text if nothing is."""
    group: Any = dist.group.WORLD
    mesh, said = of_two_ranks(), {}
    for name, (make, plan, _) in CASES.items():
        torch.manual_seed(0)
        module = make()
        styles = check_plan(module, plan, 2)

        def divide(copied: nn.Module, styles: dict[str, str] = styles) -> Callable[[], None]:
            shard_layers(copied, mesh, styles, no_op)
            return partial(divide_gradients, copied)

        x = torch.randn(1, 5).to(next(module.parameters()).dtype)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        generators = torch.get_rng_state()
        said[name] = ""
        try:
            compare_division(module, divide, Arguments.of((x,), {}), group, torch.device("cpu"))
        except ModuleError as error:
            said[name] = str(error)
        assert torch.equal(torch.get_rng_state(), generators)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
    return said


def test_plans_that_compute_something_else_are_refused_and_right_ones_taken() -> None:
    for said in in_group(2, compared):
        assert {name: bool(error) for name, error in said.items()} == {n: refused for n, (*_, refused) in CASES.items()}
        assert all("with its layers divided" in error for error in said.values() if error)


class Counting(Gated):
    """Notes whether its layers, or those of its copies, are divided where they are called."""

    calls: ClassVar[list[tuple[bool, int]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((hasattr(self.fc1.weight, "to_local"), len(x)))
        return super().forward(x)


def calls_before_the_first_step(world: World) -> list[tuple[bool, int]]:
    """Returns whether the module was divided when it was called, and the number of rows."""
    plan = {**PAIR, "act": "sum_gradients"}
    strategy = build_strategy(TrainConfig(strategy="mesh", strategy_params={"tensor": 2, "plan": plan}), world)
    torch.manual_seed(0)
    module, rows = Counting(), Batch((torch.randn(3, 5),), None, None, 3)
    strategy.prepare(module, Start(example=lambda: rows))
    return module.calls


def test_one_rank_alone_calls_the_undivided_module_and_one_group_compares_a_row() -> None:
    assert in_group(4, calls_before_the_first_step) == [[(False, 1), (True, 1)], [(True, 1)], [], []]
