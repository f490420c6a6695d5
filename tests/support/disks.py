"""Trainings whose checkpoints lie on a small disk each, that fills up or turns read-only while they go on.

Run as a program in a mount namespace of its own, which anybody may have who is root in a user namespace.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext
from sparktorch.train.checkpoint.store import CheckpointStore
from tests.support.ranks import control_server, load_state, run_ranks
from tests.support.resume import job_for, parts
from tests.support.saving import saved_steps
from tests.support.waiting import until

DISK = "4m"


class Fills(Callback):
    """Leaves the disk no room from one step on, not even that of checkpoints which are removed, until another."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._filler, self._first, self._last = folder / "filler", first, last

    def on_step_end(self, context: FitContext) -> None:
        if self._first <= context.step < self._last:
            with self._filler.open("ab", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC  # noqa: PT017 - it is no test
        if context.step == self._last:
            self._filler.unlink()


class Locks(Callback):
    """Makes the disk read-only after one step, once the checkpoint before is whole, and writable after another."""

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last

    def on_step_end(self, context: FitContext) -> None:
        if context.step == self._first:
            store = CheckpointStore(f"{self._folder}/checkpoints")
            before = context.step - 1
            until(
                lambda: before in {manifest.step for manifest in store.manifests()},
                seconds=60,
                what=f"the checkpoint at step {before} is whole",
            )
        if context.step in (self._first, self._last):
            mode = "ro" if context.step == self._first else "rw"
            remount = ["mount", "-o", f"remount,{mode}", str(self._folder)]
            until(  # no disk turns read-only while a file is open to be written
                lambda: subprocess.run(remount, capture_output=True).returncode == 0,
                seconds=60,
                what=f"the disk is {mode}",
            )


class Fate(NamedTuple):
    """What happens to a disk: "Fills" or "Locks", after which step, and until which one; 0 is from the start."""

    kind: str
    first: int
    last: int


def fates_of(folder: Path, **fates: Fate) -> dict[str, dict[str, Any]]:
    """Trains on two ranks for each fate, one after the other, in one mount namespace.

    Returns warnings, error, digest of the weights, and what is left, by the names of the fates; each has its disk under
    its name in the folder.
    """
    private = ["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]
    command = ["unshare", *private, sys.executable, "-m", "tests.support.disks", str(folder), json.dumps(fates)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Returns what tells one set of weights from every other."""
    return sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def fate_of(kind: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "disk", str(folder)], check=True)
    job = job_for(folder, {"Fills": Fills, "Locks": Locks}[kind](folder, first, last) if last else None)
    if not last:  # from the start
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with control_server() as server:
        ended = run_ranks(server, parts(2), job)
        failure, _ = server.first_failure()
        warnings = [warning["text"] for warning in server.new_warnings(server.beats(2))]
    weights = digest(load_state(ended[0].result)) if ended[0].result else ""
    store = CheckpointStore(f"{folder}/checkpoints")
    usable, _ = store.usable()
    return {
        "warnings": warnings,
        "error": failure.to_dict() if failure else None,
        "weights": weights,
        "steps": saved_steps(store),
        "usable": usable.step if usable else None,
        "files": sorted(path.name for path in folder.rglob("*") if path.name.startswith(".")),
    }


def main(folder: Path, fates: dict[str, tuple[str, int, int]]) -> dict[str, dict[str, Any]]:
    return {name: fate_of(kind, folder / name, first, last) for name, (kind, first, last) in fates.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
