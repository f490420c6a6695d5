"""The trial without values, which `modelDir` asks for on the driver."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.recipe import Recipe
from tests.support.nets import Score


@functools.lru_cache
def factors(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.ones(size),)


@functools.cache
def moments(size: int) -> torch.Tensor:
    return torch.zeros(size)


class Remembering(Score):
    """Takes tensors from caches of functions: one when it is made, another when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", factors(5)[0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factors + moments(5))


def test_it_finds_what_the_trial_with_values_finds() -> None:
    x, label = {"x": torch.ones(2, 5)}, torch.ones(2)
    found, wanted = (dry_run(Recipe(module=Score), "regression", 0, x, label, values=v) for v in (False, True))
    assert (found.outputs, found.arguments, found.state_bytes) == (wanted.outputs, wanted.arguments, wanted.state_bytes)
    assert [type(tensor) for tensor in found.aligned] == [torch.Tensor, torch.Tensor]  # for metrics
    assert all((tensor > 0).all() for tensor in found.aligned if tensor is not None)


def test_jagged_rows_are_tried_with_values_only() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(ModuleError, match=r"column 'x' is jagged.*\n.*dryRun='worker' tries values"):
        dry_run(Recipe(module=nn.Identity), "generic", 0, {"column 'x'": jagged}, None, values=False)


def test_it_leaves_no_tensors_without_values_in_the_caches_of_functions() -> None:
    recipe = Recipe(module=Remembering, optimizer="SGD")
    x, label = torch.ones(2, 5), torch.ones(2)
    for _ in range(2):
        dry_run(recipe, "regression", 0, {"x": x}, label, values=False)
        assert (factors.cache_info().currsize, moments.cache_info().currsize) == (0, 0)
    expected = recipe.build_module(0)(x).detach().numpy()
    dry_run(recipe, "regression", 0, {"x": x}, label, values=False)
    assert (recipe.build_module(0)(x).detach().numpy() == expected).all()
