"""A state dict is refused in time if it cannot be saved, or given to the module again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import check_returned, check_state
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_module


def versioned() -> nn.Module:
    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}version"] = torch.tensor(2)

    made = nn.Linear(3, 1)
    made._register_state_dict_hook(add)
    return made


def forgetful() -> nn.Module:
    def forget(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state[f"{prefix}bias"]

    made = nn.Linear(3, 1)
    made._register_state_dict_hook(forget)
    return made


@pytest.mark.parametrize(
    ("make", "said"),
    [(versioned, "holds 'version', which is no parameter or buffer"), (forgetful, "lacks 'bias'")],
)
def test_what_hooks_change_in_a_state_dict_is_refused_with_a_folder_for_the_model(make: Any, said: str) -> None:
    recipe = Recipe(module=make, optimizer="SGD")
    inputs, label = {"x": torch.ones(2, 3)}, torch.ones(2, 1)

    def tried(config: TrainConfig) -> None:
        def check(module: nn.Module, batch: Any) -> None:
            check_module(config, recipe, 2, module, batch)

        dry_run(recipe, "regression", 0, inputs, label, check=check)

    tried(TrainConfig(task="regression", strategy="zero3"))
    with pytest.raises(ModuleError, match=rf"the state_dict\(\) of Linear {said}, as by a hook"):
        tried(TrainConfig(task="regression", strategy="zero3", model_folder="/models/model"))


def test_tied_and_renamed_entries_are_given_back() -> None:
    tied = nn.ModuleDict({"one": nn.Linear(2, 2)})
    tied["other"] = tied["one"]
    check_returned(tied)


class Versioned(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 1}


def test_what_safetensors_lacks_is_refused_before_the_job() -> None:
    with pytest.raises(ModuleError, match="holds a dict under '_extra_state'"):
        dry_run(
            Recipe(module=Versioned(3, 1), optimizer="SGD"), "regression", 0, {"x": torch.ones(2, 3)}, torch.ones(2, 1)
        )
    made = nn.Linear(3, 1)
    made.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    with pytest.raises(ModuleError, match=r"holds a tensor of torch.complex128, torch.strided under 'phases'"):
        dry_run(Recipe(module=made, optimizer="SGD"), "regression", 0, {"x": torch.ones(2, 3)}, torch.ones(2, 1))
    made.register_buffer("phases", made.phases, persistent=False)  # type: ignore[arg-type]
    check_state(made.state_dict())
