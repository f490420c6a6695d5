"""What the ranks write of one moment becomes one checkpoint, however slow one of them is; and what that costs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.dirfs import DirFileSystem

from sparktorch.train.callbacks import FitContext
from tests.support.ranks import train_on
from tests.support.resume import STEPS, Counts, job_for, killed, parts, timeless


class Held(DirFileSystem):
    """The local files; rank 0's first share waits for `Ahead`, and rank 0 is killed once its checkpoint is there."""

    protocol = "held"

    def __init__(self, **options: Any) -> None:
        super().__init__(path="/", target_protocol="file", target_options={"auto_mkdir": True}, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        name, marks = path.rpartition("/")[2], Path("/", path).parents[2]
        if name == "rank-00000.pt" and not (marks / "killed").exists():
            deadline = time.monotonic() + 30
            while not (marks / "ahead").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        super().pipe_file(path, value, **options)
        if name == "manifest.json" and not (marks / "killed").exists():
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("held", Held, clobber=True)


class Ahead(Counts):
    """Says when rank 1 is in its second epoch, and has written what it had to write of the first."""

    def on_epoch_start(self, context: FitContext) -> None:
        if (context.world.rank, context.epoch) == (1, 2):
            for thread in threading.enumerate():
                if thread.name == "sparktorch-save":
                    thread.join(30)
            (self._folder / "ahead").touch()


def test_a_checkpoint_at_the_end_of_an_epoch_holds_the_same_moment_of_all_ranks(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    expected, wanted = train_on(parts(2), job_for(calm, Counts(calm)))
    job = job_for(f"held://{rough}", Ahead(rough), interval=STEPS)
    killed(job, 2)
    found, metas = train_on(parts(2), job)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert timeless(metas[0]["history"]) == timeless(wanted[0]["history"])
    for meta in metas:
        assert meta["seconds"]["checkpoint_copy"] > 0
        assert meta["seconds"]["checkpoint_write"] > 0
