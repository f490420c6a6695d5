"""A state dict is refused in time if it cannot be saved; weights in a folder are read by name, of one training only."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import check_returned, check_state
from sparktorch.base.weights_folder import INDEX, WeightsFolder
from sparktorch.errors import ModuleError, PersistenceError
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"part{number}": torch.full((2,), float(number))}, tmp_path / f"model-{number}.safetensors")
    places = {f"part{number}": f"model-{number}.safetensors" for number in (1, 2)}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"sparktorch": "mine"}, "weight_map": places}))
    return tmp_path


def test_tensors_are_read_from_the_files_that_the_index_names(folder: Path) -> None:
    for weights in (WeightsFolder(str(folder), "mine"), WeightsFolder(str(folder))):
        assert {name: value.tolist() for name, value in weights.items()} == {"part1": [1.0, 1.0], "part2": [2.0, 2.0]}
        assert len(weights) == 2
        again = pickle.loads(pickle.dumps(weights))
        assert again == weights
        assert again["part2"].tolist() == [2.0, 2.0]


def test_tensors_are_mapped_and_not_read(folder: Path) -> None:
    first, second = (WeightsFolder(str(folder))["part1"] for _ in range(2))
    first.fill_(9.0)  # its own copy of the page
    assert second.tolist() == WeightsFolder(str(folder))["part1"].tolist() == [1.0, 1.0]
    assert "model-1.safetensors" in Path("/proc/self/maps").read_text()


def test_the_weights_of_another_training_are_refused(folder: Path) -> None:
    with pytest.raises(PersistenceError, match="weights of another training"):
        WeightsFolder(str(folder), "other")["part1"]


def test_a_folder_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(PersistenceError, match=r"gone cannot be read: .*\n.*must be mounted under this path"):
        list(WeightsFolder(str(tmp_path / "gone"), "mine"))


def test_an_index_does_not_lead_out_of_its_folder(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    save_file({"secret": torch.ones(1)}, outside)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"secret": "../outside.safetensors"}}))
    with pytest.raises(PersistenceError, match="cannot be read"):
        WeightsFolder(str(folder))["secret"]


def test_a_folder_is_deleted_but_what_others_have_put_there(folder: Path) -> None:
    for path, token in ((str(folder), ""), (str(folder), "other")):
        with pytest.raises(PersistenceError):
            WeightsFolder(path, token).delete()
    (folder / "notes.txt").touch()
    weights = WeightsFolder(str(folder), "mine")
    weights["part1"]
    weights.delete()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_file_that_cannot_be_deleted_is_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    (folder / "model-2.safetensors").mkdir()
    with pytest.raises(PersistenceError, match=r"cannot be deleted: .*model-2.safetensors"):
        WeightsFolder(str(folder), "mine").delete()
