"""Patterns of parameter names: what is trained, and with which options of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.parameter_groups import group
from sparktorch.train.recipe.recipe import Recipe
from tests.support.nets import Mlp

WEIGHTS, BIASES = ["layers.0.weight", "layers.2.weight"], ["layers.0.bias", "layers.2.bias"]


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.outer.weight = self.inner.weight
        self.last = nn.Linear(5, 1)


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["layers.0.*"], ["layers.2.weight", "layers.2.bias"]),
        (["*", "!*.bias"], BIASES),
        (["*", "!layers.2.*", "*.weight"], ["layers.2.bias"]),  # the last word counts
        (["!layers.0.*"], [*WEIGHTS, *BIASES]),
    ],
)
def test_later_patterns_win_over_earlier_ones(patterns: list[str], trained: list[str]) -> None:
    module = Recipe(module=Mlp, freeze=patterns).build_module(0)
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == set(trained)


def test_freezing_changes_no_weight_and_not_the_users_own_instance() -> None:
    given = Mlp()
    built = Recipe(module=given, freeze=["layers.0.*"]).build_module(0)
    assert all(parameter.requires_grad for parameter in given.parameters())
    assert not built.get_parameter("layers.0.weight").requires_grad
    assert torch.equal(built.get_parameter("layers.0.weight"), given.get_parameter("layers.0.weight"))


def test_what_peft_keeps_of_a_part_that_it_copied_stays_frozen() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.ModuleDict({"original_module": nn.Linear(2, 1), "copy": nn.Linear(2, 1)})
            self.head["original_module"].requires_grad_(False)

    built = Recipe(module=Copied, freeze=["!*head*"]).build_module(0)
    assert {name for name, p in built.named_parameters() if p.requires_grad} == {"head.copy.weight", "head.copy.bias"}


def test_a_tensor_with_two_names_is_frozen_by_either() -> None:
    for name in ("inner.weight", "outer.*"):
        module = Recipe(module=Tied, freeze=[name]).build_module(0)
        assert [n for n, p in module.named_parameters() if p.requires_grad] == ["last.weight", "last.bias"]


def test_patterns_that_cannot_be_meant_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"freeze: 'layer.0.\*' matches no parameter") as caught:
        Recipe(module=Mlp, freeze=["layer.0.*"]).build_module(0)
    assert "layers.0.*" in caught.value.hint
    assert caught.value.where == {"param": "freeze"}
    with pytest.raises(ModuleError, match=r"(?s)no parameters that require a gradient.*freeze leaves none"):
        dry_run(Recipe(module=Mlp, freeze=["*"]), "generic", 0, {"x": torch.ones(2, 5)}, torch.ones(2, 3))


def names_in(module: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in made["params"]] for made in group(module, groups)]


def test_the_first_group_that_matches_holds_and_the_rest_comes_first() -> None:
    groups = [{"params": "layers.0.*"}, {"params": ["*.bias"], "weight_decay": 0}]
    assert names_in(Mlp(), groups) == [
        ["layers.2.weight"],
        ["layers.0.weight", "layers.0.bias"],
        ["layers.2.bias"],
    ]
    assert names_in(Mlp(), [{"params": "*"}]) == [
        ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    ]
    assert names_in(Tied(), [{"params": "outer.*"}]) == [["last.weight", "last.bias"], ["inner.weight"]]


def test_each_group_has_its_own_options_and_the_defaults_for_the_rest() -> None:
    recipe = Recipe(
        module=Mlp,
        optimizer_params={"weight_decay": 0.25},
        learning_rate=0.5,
        parameter_groups=[{"params": "*.bias", "weight_decay": 0.0}, {"params": "layers.0.*", "lr": 0.125}],
    )
    groups = recipe.build_optimizer(recipe.build_module(0)).param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.5, 0.25), (0.5, 0.0), (0.125, 0.25)]
    assert [len(g["params"]) for g in groups] == [1, 2, 1]


@pytest.mark.parametrize(
    ("groups", "message", "hint"),
    [
        ([{"params": "*"}, {"params": "*.bias"}], "parameterGroups[1] is left without a parameter", "earlier"),
        ([{"params": None}], "parameterGroups: 'None' matches no parameter", "names are layers.0.weight"),
        (
            [{"params": "*.bias", "weight_deacy": 0}],
            "parameterGroups[0] does not suit optimizer AdamW: AdamW.__init__() got an unexpected keyword argument",
            "weight_decay",
        ),
    ],
)
def test_groups_that_cannot_work_are_refused_on_the_driver(
    groups: list[dict[str, Any]], message: str, hint: str
) -> None:
    recipe = Recipe(module=Mlp, parameter_groups=groups)
    with pytest.raises(ConfigError) as caught:
        dry_run(recipe, "generic", 0, {"x": torch.ones(2, 5)}, torch.ones(2, 3))
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint
    assert caught.value.where == {"param": "parameterGroups"}


def test_an_optimizer_that_computes_the_loss_itself_is_refused_on_the_driver() -> None:
    with pytest.raises(ConfigError, match="LBFGS computes the loss several times"):
        dry_run(Recipe(module=Mlp, optimizer="LBFGS"), "generic", 0, {"x": torch.ones(2, 5)}, torch.ones(2, 3))


def test_what_the_module_has_frozen_is_trained_where_a_pattern_says_so() -> None:
    given = Mlp().requires_grad_(False)
    built = Recipe(module=given, freeze=["!*.bias"]).build_module(0)
    assert {name for name, parameter in built.named_parameters() if parameter.requires_grad} == set(BIASES)
