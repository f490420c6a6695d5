"""A pause: all ranks save a checkpoint after the same step, and end; any number of ranks goes on from it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.worker import TrainJob
from sparktorch.worker.run_context import RunContext
from tests.support.nets import Tower
from tests.support.ranks import FunctionJob, control_server, load_state, run_ranks, train_on
from tests.support.resume import EPOCHS, STEPS, TABLE, job_for, parts, timeless
from tests.support.saving import saved_steps

NEVER = 1000  # steps from one checkpoint to the next


class Dawdles(Callback):
    """Makes a step last as long as a few looks at the store, another while in each rank."""

    ranks = "all"

    def on_step_end(self, context: FitContext) -> None:
        time.sleep(0.1 + 0.05 * context.world.rank)


def paused(job: TrainJob, ranks: int) -> int:
    """Has a training paused as soon as its ranks hear of it; returns the step of its checkpoint."""
    with control_server() as server:
        server.pause()
        ended = run_ranks(server, parts(ranks), job)
        assert server.first_failure() == (None, False)
    assert [rank.result is not None and rank.result.meta["paused"] for rank in ended] == [True] * ranks
    assert job.checkpoint is not None
    return saved_steps(CheckpointStore(job.checkpoint.directory))[0]


def started_again(job: TrainJob, times: int) -> TrainJob:
    assert job.checkpoint is not None
    return replace(job, checkpoint=replace(job.checkpoint, restart=times))


def test_a_training_that_is_paused_with_fewer_and_with_more_ranks_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    config: dict[str, Any] = {"module": Tower, "strategy": "zero3", "interval": NEVER}
    expected, wanted = train_on(parts(2), job_for(tmp_path / "calm", **config))
    job, steps = job_for(tmp_path, Dawdles(), **config), [0]
    for times, ranks in enumerate((2, 1, 3)):
        steps.append(paused(started_again(job, times), ranks))
        assert steps[-2] < steps[-1] < EPOCHS * STEPS
    found, metas = train_on(parts(1), started_again(job_for(tmp_path, **config), 3))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(timeless(metas[0]["history"]), timeless(wanted[0]["history"]), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


class FullDisk(Callback):
    """Lets a rank write no share of a checkpoint."""

    ranks = "all"

    def on_fit_start(self, context: FitContext) -> None:
        if context.world.rank == 1:
            CheckpointStore.write_share = self._fail  # type: ignore[assignment, method-assign]

    def on_step_end(self, context: FitContext) -> None:
        time.sleep(0.1)

    def _fail(self, *_: Any) -> Any:
        raise OSError("no space left")


def test_a_training_goes_on_if_the_checkpoint_of_its_pause_cannot_be_written(tmp_path: Path) -> None:
    expected, _ = train_on(parts(2), job_for(tmp_path / "calm", interval=NEVER))
    job = job_for(tmp_path, FullDisk(), interval=NEVER)
    with control_server() as server:
        server.pause()
        ended = run_ranks(server, parts(2), job)
        texts = [warning["text"] for warning in server.new_warnings(server.beats(2))]
    assert any("cannot be written: OSError: no space left; the training goes on" in text for text in texts)
    assert [rank.result is not None and rank.result.meta.get("paused", False) for rank in ended] == [False] * 2
    assert job.checkpoint is not None
    assert saved_steps(CheckpointStore(job.checkpoint.directory)) == []
    main = ended[0].result
    assert main is not None
    torch.testing.assert_close(load_state(main), expected, atol=0, rtol=0)


def counting(context: RunContext) -> int:
    count = 0 if context.restored is None else context.restored["count"]
    while count < 20:
        time.sleep(0.1 + 0.05 * context.rank)
        count += 1
        context.save({"count": count})
    return count


def test_a_function_is_paused_where_it_saves_and_goes_on_from_there(tmp_path: Path) -> None:
    job = job_for(tmp_path)
    function = FunctionJob(
        columns=TABLE.columns, config=job.config, max_imbalance=None, checkpoint=job.checkpoint, function=counting
    )
    with control_server() as server:
        server.pause()
        ended = run_ranks(server, parts(2), function)
    assert [rank.result is not None and rank.result.meta for rank in ended] == [{"paused": True, "waits": []}] * 2
    assert job.checkpoint is not None
    saved = saved_steps(CheckpointStore(job.checkpoint.directory))[0]
    assert 0 < saved < 20
