"""Checkpoints and models on a mount without hard links, sparse files and renames of folders, as of object stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.disks import digest
from tests.support.ranks import train_on
from tests.support.resume import EPOCHS, STEPS, Counts, job_for, parts

PROGRAM = [sys.executable, "-m", "tests.faults.programs.on_bucket"]


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="wants /dev/fuse")
def test_a_training_on_the_mount_of_an_object_store_goes_on_after_a_kill_and_writes_its_model_there(
    tmp_path: Path,
) -> None:
    private = ["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]
    done = subprocess.run(["unshare", *private, *PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    calm = tmp_path / "calm"
    state, _ = train_on(parts(2), job_for(calm, Counts(calm)))
    assert found["weights"] == digest(state)
    assert (found["usable"], found["problems"]) == (EPOCHS * STEPS, [])
    assert found["models"] == [digest(state)] * 2
    assert found["left"] == ["fit-1"]
