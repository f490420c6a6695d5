"""Optimizers that users have built, built again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.errors import ModuleError
from sparktorch.train.recipe.built_optimizer import recipe_of


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    return [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[1].parameters(), *net[2].parameters()]}]


@pytest.mark.parametrize(
    "build",
    [
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.2),
        lambda net: torch.optim.SGD(_groups(net), lr=0.1, momentum=0.9, nesterov=True),
        lambda net: torch.optim.Adagrad(net.parameters(), lr=torch.tensor(0.1)),
    ],
)
def test_an_optimizer_that_is_built_again_takes_the_same_steps(build: Callable[[nn.Module], Any]) -> None:
    first, second = _net(), _net()
    optimizer = build(first)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds values to its groups
    again = recipe_of(second, build(second)).build_optimizer(second)
    assert type(again) is type(optimizer)
    for net, own in ((first, optimizer), (second, again)):
        for _ in range(3):
            own.zero_grad()
            net(torch.ones(5, 3)).sum().backward()
            own.step()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (_stepped, "Adam has taken steps already"),
        (lambda net: torch.optim.Adam(nn.Linear(2, 2).parameters()), "has parameters that are not the module's"),
        (
            lambda net: torch.optim.Adam(net[0].parameters()),
            "lacks the trainable parameters 1.weight, 1.bias",
        ),
    ],
)
def test_an_optimizer_of_something_else_is_refused(build: Callable[[nn.Module], Any], says: str) -> None:
    net = _net()
    with pytest.raises(ModuleError, match=says):
        recipe_of(net, build(net))
