"""What the ranks write of one moment becomes one checkpoint, however slow one of them is; and what that costs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import fsspec

from sparktorch.train.callbacks import FitContext
from tests.support.ranks import train_on
from tests.support.resume import STEPS, Counts, check_same_bits, job_for, killed, parts
from tests.support.saving import LocalFiles, wait_for_saves
from tests.support.waiting import until


class Held(LocalFiles):
    """The local files; rank 0's first share waits for `Ahead`, and rank 0 is killed once its checkpoint is there."""

    protocol = "held"

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        name, marks = path.rpartition("/")[2], Path("/", path).parents[2]
        if name == "rank-00000.pt" and not (marks / "killed").exists():
            until((marks / "ahead").exists, seconds=60, what="the other rank is ahead")
        super().pipe_file(path, value, **options)
        if name == "manifest.json" and not (marks / "killed").exists():
            (marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("held", Held, clobber=True)


class Ahead(Counts):
    """Says when rank 1 is in its second epoch, and has written what it had to write of the first."""

    def on_epoch_start(self, context: FitContext) -> None:
        if (context.world.rank, context.epoch) == (1, 2):
            wait_for_saves()
            (self._folder / "ahead").touch()


def test_a_checkpoint_at_the_end_of_an_epoch_holds_the_same_moment_of_all_ranks(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    expected = train_on(parts(2), job_for(calm, Counts(calm)))
    job = job_for(f"held://{rough}", Ahead(rough), interval=STEPS)
    killed(job, 2)
    found = train_on(parts(2), job)
    check_same_bits(found, expected)
    for meta in found[1]:
        assert meta["seconds"]["checkpoint_copy"] > 0
        assert meta["seconds"]["checkpoint_write"] > 0
