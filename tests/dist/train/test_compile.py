"""A compiled module trains what the plain one does, and a worker without a compiler says what it misses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.callbacks import NoCompiler
from tests.support.frames import Table
from tests.support.parts import NormalisedScore
from tests.support.ranks import train_job, train_on

pytestmark = pytest.mark.landing

TABLE = Table.random(100, validated=True)
JOB = train_job(
    TABLE,
    Recipe(module=NormalisedScore, optimizer="SGD", learning_rate=0.05),
    TrainConfig(task="regression", batch_size=32, epochs=2, seed=7, sync_batch_norm=True),
)


def compiled(job: TrainJob) -> TrainJob:
    return replace(job, config=replace(job.config, compile=True))


def test_a_compiled_module_trains_and_validates_the_same() -> None:
    partitions = [part.batches() for part in TABLE.parts(2)]
    expected, plain = train_on(partitions, JOB)
    state, metas = train_on(partitions, compiled(JOB), seconds=240)  # a compiler on a busy machine
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-6)
    losses = [[record["val_loss"] for record in meta[0]["history"]] for meta in (plain, metas)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_a_worker_without_a_compiler_says_so(tmp_path: Path) -> None:
    job = compiled(replace(JOB, recipe=replace(JOB.recipe, callbacks=[NoCompiler(tmp_path)])))
    with pytest.raises(ClusterError, match="compile=True needs a C\\+\\+ compiler on every worker") as caught:
        train_on([TABLE.batches()], job)
    assert "install g++ where the executors run" in caught.value.hint


def test_errors_that_have_nothing_to_do_with_a_param_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match=r"^planted$"), explained(TrainConfig(compile=True, deterministic=True)):
        raise RuntimeError("planted")
