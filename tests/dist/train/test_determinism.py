"""Two runs give the same bits, ranks draw differently, and a compiled module trains what the plain one does."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError, ModuleError
from sparktorch.train.numerics.determinism import reproducible, seed_all, switched
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.callbacks import Draws, NoCompiler, draws
from tests.support.frames import Table
from tests.support.parts import Drawn, Dropped, Marked, NormalisedScore
from tests.support.ranks import train_job, train_on
from tests.support.small import small_job, trained

TABLE = Table.random(203)
CPU = torch.device("cpu")


def job_for(module: Any, **config: Any) -> TrainJob:
    return small_job(TABLE, {"module": module, "learning_rate": 0.02}, **{"epochs": 2, "seed": 7, **config})


def train(job: TrainJob, ranks: int) -> dict[str, torch.Tensor]:
    return trained(TABLE, job, ranks)[0]


def test_two_deterministic_runs_with_dropout_give_the_same_bits() -> None:
    job, ranks = job_for(Dropped, deterministic=True), 3
    first, second = train(job, ranks), train(job, ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = train(replace(job, config=replace(job.config, seed=8)), ranks)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_an_operation_that_cannot_be_deterministic_is_an_error_with_a_hint() -> None:
    with pytest.raises(ModuleError, match="deterministic=True, but put_ does not have a determ") as caught:
        train(job_for(Marked, deterministic=True), 1)
    assert "use another operation in the module, or leave deterministic out" in caught.value.hint
    assert "marks = x.new_zeros(1).put_" in caught.value.trace
    train(job_for(Marked, epochs=1), 1)


def test_module_factories_draw_by_the_seed_and_ranks_by_their_own(tmp_path: Path) -> None:
    job = job_for(Drawn, epochs=1, batch_size=1000)
    state = train(replace(job, recipe=replace(job.recipe, learning_rate=1e-9, callbacks=[Draws(tmp_path)])), 3)
    seed_all(7)
    assert state["start"].tolist() == pytest.approx(draws()[:2], abs=1e-6)
    for rank in range(3):
        seed_all(7 + rank + 1)
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == draws()


def test_the_process_goes_on_drawing_where_it_was() -> None:
    seed_all(1)
    draws()
    expected = draws()
    seed_all(1)
    draws()
    with reproducible(TrainConfig(seed=-5), CPU):  # NumPy takes no negative seeds
        first = draws()
    assert draws() == expected
    with suppress(KeyboardInterrupt), reproducible(TrainConfig(seed=-5), CPU):
        assert draws() == first
        raise KeyboardInterrupt
    assert draws() != first


def test_switches_are_set_for_the_fit_alone() -> None:
    def switches() -> list[Any]:
        cuda: Any = torch.backends
        matmul, convolution = cuda.cuda.matmul.fp32_precision, cuda.cudnn.conv.fp32_precision
        return [torch.are_deterministic_algorithms_enabled(), cuda.cudnn.benchmark, matmul, convolution]

    before = switches()
    assert before[0] is False
    try:
        torch.backends.cudnn.benchmark = True
        with switched(TrainConfig(deterministic=True, precision="tf32"), CPU):
            assert switches() == [True, False, *before[2:]]  # there is no TF32 on a CPU
        assert switches() == [False, True, *before[2:]]
    finally:
        torch.backends.cudnn.benchmark = False
    with switched(TrainConfig(precision="tf32"), torch.device("cuda:0")):
        assert switches() == [False, False, "tf32", "tf32"]
    assert switches() == before


VALIDATED = Table.random(100, validated=True)
JOB = train_job(
    VALIDATED,
    Recipe(module=NormalisedScore, optimizer="SGD", learning_rate=0.05),
    TrainConfig(task="regression", batch_size=32, epochs=2, seed=7, sync_batch_norm=True),
)


def compiled(job: TrainJob) -> TrainJob:
    return replace(job, config=replace(job.config, compile=True))


@pytest.mark.landing
def test_a_compiled_module_trains_and_validates_the_same() -> None:
    partitions = [part.batches() for part in VALIDATED.parts(2)]
    expected, plain = train_on(partitions, JOB)
    state, metas = train_on(partitions, compiled(JOB), seconds=240)  # a compiler on a busy machine
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-6)
    losses = [[record["val_loss"] for record in meta[0]["history"]] for meta in (plain, metas)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.landing
def test_a_worker_without_a_compiler_says_so(tmp_path: Path) -> None:
    job = compiled(replace(JOB, recipe=replace(JOB.recipe, callbacks=[NoCompiler(tmp_path)])))
    with pytest.raises(ClusterError, match="compile=True needs a C\\+\\+ compiler on every worker") as caught:
        train_on([VALIDATED.batches()], job)
    assert "install g++ where the executors run" in caught.value.hint


def test_errors_that_have_nothing_to_do_with_a_param_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match=r"^planted$"), explained(TrainConfig(compile=True, deterministic=True)):
        raise RuntimeError("planted")
