"""Checkpoints that somebody else has written: nothing in them is run, and nothing around them touched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, _digest
from tests.support.ranks import train_on
from tests.support.resume import STEPS, Counts, job_for, killed, parts


class Payload:
    """Unpickled, it runs a command that leaves a file."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self._canary}",)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that was killed."""
    folder = tmp_path_factory.mktemp("unfinished")
    killed(job_for(folder, Counts(folder, rank=1, step=STEPS + 3)), 2)
    store = CheckpointStore(str(folder / "checkpoints"))
    store.keep(set(store.steps()))  # and not what it was writing when it was killed
    return folder


@pytest.fixture
def folder(unfinished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(unfinished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that must not come into being."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


def latest(folder: Path) -> tuple[CheckpointStore, Manifest, Path]:
    store = CheckpointStore(str(folder / "checkpoints"))
    manifest, _ = store.usable()
    assert manifest is not None
    return store, manifest, folder / "checkpoints" / f"step-{manifest.step:09d}-{manifest.attempt}"


def forge(place: Path, **changes: Any) -> None:
    """Rewrites a manifest with a digest that is right, as whoever may write the directory can."""
    values = json.loads((place / "manifest.json").read_text())["manifest"] | changes
    (place / "manifest.json").write_text(json.dumps({"manifest": values, "sha256": _digest(values)}))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file of the latest checkpoint, with a manifest that vouches for it."""
    store, manifest, place = latest(folder)
    (place / name).write_bytes(content)
    forge(place, files={**manifest.files, name: store.directory.measure(f"{place.name}/{name}")})


def test_the_payload_works_where_pickles_are_loaded_without_care(tmp_path: Path) -> None:
    torch.save(Payload(tmp_path / "canary"), tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("archive", [True, False])
def test_a_malicious_pt_is_refused(archive: bool, folder: Path, canary: Path) -> None:
    path = folder / "payload"
    torch.save({"optimizer": Payload(canary)}, path, _use_new_zipfile_serialization=archive)
    replace(folder, "rank-00001.pt", path.read_bytes())
    with pytest.raises(PersistenceError, match=r"rank-00001\.pt of the checkpoint is refused"):
        train_on(parts(2), job_for(folder))


def test_a_pt_without_tensors_that_calls_for_code_is_refused_too(folder: Path, canary: Path) -> None:
    replace(folder, "rank-00000.pt", pickle.dumps(Payload(canary)))
    with pytest.raises(PersistenceError, match=r"rank-00000\.pt of the checkpoint is refused"):
        train_on(parts(2), job_for(folder))


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
    replace(folder, "rank-00000.safetensors", header)
    with pytest.raises(PersistenceError, match=r"rank-00000\.safetensors of the checkpoint is refused"):
        train_on(parts(2), job_for(folder))


@pytest.mark.parametrize(
    "name", ["../../secret", "{folder}/secret", "rank-00000.pt/../../../secret", "rank-00000.pt\n"]
)
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, folder: Path) -> None:
    (folder / "secret").write_text("canary")
    store, manifest, place = latest(folder)
    name = name.format(folder=folder)
    forge(place, files={**manifest.files, name: manifest.files["rank-00000.pt"]})
    found, (problem,) = store.usable()
    assert found is not None
    assert found.step < manifest.step
    assert "names files that no rank writes" in str(problem)
    assert (folder / "secret").read_text() == "canary"


@pytest.mark.parametrize("field", ["step", "attempt"])
def test_a_manifest_that_speaks_of_another_checkpoint_is_refused(field: str, folder: Path) -> None:
    store, manifest, place = latest(folder)
    forge(place, **{field: {"step": 10**6, "attempt": "/../../.."}[field]})
    found, (problem,) = store.usable()
    assert found is not None
    assert found.step < manifest.step
    assert "it is that of another checkpoint" in str(problem)


def test_links_out_of_the_directory_are_neither_read_nor_written_nor_removed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    store, manifest, place = latest(folder)
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    found, (problem,) = store.usable()
    assert found is not None
    assert found.step < manifest.step
    assert "was never finished" in str(problem)
    train_on(parts(2), job_for(folder))
    assert {path.name for path in elsewhere.iterdir()} == {*manifest.files, "manifest.json"}
    assert not place.exists()


def test_a_file_that_is_a_link_out_of_the_directory_is_not_read(folder: Path, tmp_path: Path) -> None:
    store, manifest, place = latest(folder)
    (place / "rank-00000.pt").rename(tmp_path / "elsewhere.pt")
    (place / "rank-00000.pt").symlink_to(tmp_path / "elsewhere.pt")  # the very content that the manifest vouches for
    found, (problem,) = store.usable()
    assert found is not None
    assert found.step < manifest.step
    assert "leads elsewhere" in str(problem)


def test_a_link_in_place_of_the_claim_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("canary")
    (folder / "checkpoints" / "claim.json").unlink(missing_ok=True)
    (folder / "checkpoints" / "claim.json").symlink_to(secret)
    with pytest.raises(PersistenceError, match=r"cannot be written: .* leads elsewhere"):
        train_on(parts(2), job_for(folder))
    assert secret.read_text() == "canary"
