"""Weights in a folder: read by name, of one training only, and never from outside of the folder."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparktorch.base.weights_folder import INDEX, WeightsFolder
from sparktorch.errors import PersistenceError


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
