"""Checkpoints that somebody else has written: nothing in them is run, and nothing around them touched."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.directory import Directory
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, _digest, snapshot


class Payload:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self._canary}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two checkpoints of two ranks."""
    store = CheckpointStore(str(tmp_path / "run"), "a1")
    for step in (1, 2):
        files = {}
        for rank in range(2):
            share = snapshot({"module.x": torch.ones(3)}, {"step": step}, lambda _: True)
            files |= store.write_share(step, rank, share)
        store.write_manifest(Manifest(step=step, epoch=0, step_in_epoch=step, world_size=2, job={}, files=files))
    return tmp_path / "run"


def latest(folder: Path) -> tuple[CheckpointStore, Manifest, Path]:
    store = CheckpointStore(str(folder))
    manifest, _ = store.usable()
    assert manifest is not None
    assert manifest.step == 2
    return store, manifest, folder / "step-000000002-a1"


def forge(place: Path, **changes: Any) -> None:
    """Rewrites a manifest with a digest that is right, as whoever may write the directory can."""
    values = json.loads((place / "manifest.json").read_text())["manifest"] | changes
    (place / "manifest.json").write_text(json.dumps({"manifest": values, "sha256": _digest(values)}))


def replaced(folder: Path, name: str, content: bytes) -> tuple[CheckpointStore, Manifest]:
    """Replaces a file of the latest checkpoint, with a manifest that vouches for it."""
    store, manifest, place = latest(folder)
    (place / name).write_bytes(content)
    forge(place, files={**manifest.files, name: store.directory.measure(f"{place.name}/{name}")})
    return latest(folder)[:2]


def check_left_out(folder: Path, says: str) -> None:
    """Checks that the latest checkpoint is not used, and why."""
    found, (problem,) = CheckpointStore(str(folder)).usable()
    assert found is not None
    assert found.step == 1
    assert says in str(problem)


def pickled(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=2))  # of another, torch warns first


def test_the_payload_works_where_pickles_are_loaded_without_care(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "canary"), tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("write", [torch.save, partial(torch.save, _use_new_zipfile_serialization=False), pickled])
def test_a_planted_command_is_refused_and_does_not_run(
    write: Callable[..., None], folder: Path, tmp_path: Path
) -> None:
    write(Payload(tmp_path / "canary"), tmp_path / "planted.pt")
    store, manifest = replaced(folder, "rank-00001.pt", (tmp_path / "planted.pt").read_bytes())
    with pytest.raises(PersistenceError, match=r"rank-00001\.pt of the checkpoint is refused"):
        store.read_rest(manifest, 1)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 200 << 20) + b" " * (200 << 10),
        struct.pack("<Q", 64) + b'{"module.x":{"dtype":"F32","shape":[1152921504606846976],"data_',
        struct.pack("<Q", 68) + b'{"x":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,',
        b"",
    ],
    ids=["beyond the file", "beyond what is allowed", "cut off", "an endless tensor", "empty"],
)
def test_a_safetensors_header_that_cannot_be_is_refused(header: bytes, folder: Path) -> None:
    store, manifest = replaced(folder, "rank-00000.safetensors", header)
    refused = pytest.raises(PersistenceError, match=r"rank-00000\.safetensors of the checkpoint is refused")
    with refused, store.local(manifest, lambda *_: True):
        pass


@pytest.mark.parametrize(
    "name", ["../../secret", "{folder}/secret", "rank-00000.pt/../../../secret", "rank-00000.pt\n"]
)
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, folder: Path) -> None:
    (folder / "secret").write_text("canary")
    _, manifest, place = latest(folder)
    forge(place, files={**manifest.files, name.format(folder=folder): manifest.files["rank-00000.pt"]})
    check_left_out(folder, "names files that no rank writes")
    assert (folder / "secret").read_text() == "canary"


@pytest.mark.parametrize("change", [{"step": 10**6}, {"attempt": "/../../.."}])
def test_a_manifest_that_speaks_of_another_checkpoint_is_refused(change: dict[str, Any], folder: Path) -> None:
    forge(latest(folder)[2], **change)
    check_left_out(folder, "it is that of another checkpoint")


def test_links_out_of_the_directory_are_neither_read_nor_written_nor_removed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    store, manifest, place = latest(folder)
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    check_left_out(folder, "was never finished")
    store.keep({1})
    assert {path.name for path in elsewhere.iterdir()} == {*manifest.files, "manifest.json"}
    assert not place.exists()


def test_a_file_that_is_a_link_out_of_the_directory_is_not_read(folder: Path, tmp_path: Path) -> None:
    place = latest(folder)[2]
    (place / "rank-00000.pt").rename(tmp_path / "elsewhere.pt")
    (place / "rank-00000.pt").symlink_to(tmp_path / "elsewhere.pt")  # the very content that the manifest vouches for
    check_left_out(folder, "leads elsewhere")


def test_names_and_links_lead_nowhere_else(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary")
    (folder / "claim.json").symlink_to(secret)
    directory = Directory(str(folder))
    for name in ("../secret", "claim.json", str(secret)):
        with pytest.raises(FileNotFoundError, match="leads elsewhere"):
            directory.put(name, b"overwritten")
        with pytest.raises(FileNotFoundError):
            directory.read(name)
    with pytest.raises(FileNotFoundError, match="leads elsewhere"):
        CheckpointStore(str(folder)).claim("mine")
    assert secret.read_text() == "canary"
