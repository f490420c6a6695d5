"""The disk of the checkpoints fills up, or turns read-only: the training goes on, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.disks import Fate, digest, fates_of
from tests.support.ranks import train_on
from tests.support.resume import EPOCHS, STEPS, job_for, parts

END = EPOCHS * STEPS


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    state, _ = train_on(parts(2), job_for(tmp_path_factory.mktemp("calm")))
    return digest(state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the disks."""
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def fates(folder: Path) -> dict[str, dict[str, Any]]:
    """What became of the trainings, one on each disk."""
    return fates_of(
        folder, full=Fate("Fills", 6, 14), locked=Fate("Locks", 6, END + 1), locked_from_the_start=Fate("Locks", 0, 0)
    )


def assert_told(found: dict[str, Any], folder: Path, reason: str, hint: str) -> None:
    told = [text for text in found["warnings"] if "cannot be written" in text]
    assert told
    for text in told:
        assert "no checkpoint at step" in text
        assert f"{folder}/checkpoints cannot be written: {reason}" in text
        assert hint in text


def test_on_a_full_disk_the_training_goes_on_and_so_do_the_checkpoints_once_there_is_room(
    weights: str, folder: Path, fates: dict[str, dict[str, Any]]
) -> None:
    found = fates["full"]
    assert found["weights"] == weights
    assert found["error"] is None
    assert_told(found, folder / "full", "No space left on device", "make room there")
    assert found["steps"] == [END, END - 1]
    assert found["usable"] == END
    assert found["files"] == [], "no half of a file is left"


def test_on_a_disk_that_stays_read_only_the_last_checkpoint_from_before_is_there(
    weights: str, folder: Path, fates: dict[str, dict[str, Any]]
) -> None:
    found = fates["locked"]
    assert found["weights"] == weights
    assert found["error"] is None
    hint = "make it writable for the user that the executors"
    assert_told(found, folder / "locked", "Read-only file system", hint)
    assert found["usable"] == 5
    assert len([text for text in found["warnings"] if "no checkpoint at step" in text]) <= 2, (
        "each rank tells of it once"
    )
    assert any("the end of the training could not be noted" in text for text in found["warnings"])


def test_a_directory_that_cannot_be_written_from_the_start_is_an_error(
    folder: Path, fates: dict[str, dict[str, Any]]
) -> None:
    error = fates["locked_from_the_start"]["error"]
    assert error["kind"] == "PersistenceError"
    disk = folder / "locked_from_the_start"
    assert error["what"] == f"checkpointDir {disk}/checkpoints cannot be written: Read-only file system"
    assert error["hint"] == "make it writable for the user that the executors run as"
    assert (error["where"]["rank"], error["where"]["host"]) == (0, "host-0")
