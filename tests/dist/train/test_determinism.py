"""Two runs give the same bits, ranks draw differently, and the process has its generators back afterwards."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ModuleError
from sparktorch.train.numerics.determinism import reproducible, seed_all, switched
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.callbacks import Draws, draws
from tests.support.frames import Table
from tests.support.parts import Drawn, Dropped, Marked
from tests.support.ranks import train_job, train_on

TABLE = Table.random(203)
CPU = torch.device("cpu")


def job_for(module: Any, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": 64, "epochs": 2, "seed": 7, **config}
    return train_job(TABLE, Recipe(module=module, learning_rate=0.02), TrainConfig(task="regression", **values))


def train(job: TrainJob, ranks: int) -> dict[str, torch.Tensor]:
    return train_on([part.batches() for part in TABLE.parts(ranks)], job)[0]


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
