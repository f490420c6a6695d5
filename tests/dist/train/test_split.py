"""microBatchSize="auto": a rank whose device is full makes all ranks take the step again, in smaller micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ClusterError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support import resume
from tests.support.frames import Table
from tests.support.nets import Drifting, Lookup, Noisy, Parted, Score
from tests.support.ranks import control_server, run_ranks, train_job, train_on

BATCH, EPOCHS = 64, 3
TABLE = Table.random(403, weighted=True)


class _Checked(torch.autograd.Function):
    """Its argument; there is no memory for it in forward, or else in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, full: bool, backward: bool) -> torch.Tensor:
        ctx.full = full and backward
        if full and not backward:
            raise torch.OutOfMemoryError("planted in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.full:
            raise torch.OutOfMemoryError("planted in backward")
        return gradients[0], None, None


class Small(nn.Module):
    """Has memory for so many rows in training: on one rank or on all, in forward or in backward, from some pass on."""

    def __init__(
        self, inner: Any, rows: int, rank: int = -1, backward: bool = False, first: int = 0, **params: Any
    ) -> None:
        super().__init__()
        self.inner = inner(**params)
        self._rows, self._rank, self._backward, self._first, self._passes = rows, rank, backward, first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._passes += self.training
        here = self._rank < 0 or (dist.is_initialized() and dist.get_rank() == self._rank)
        full = self.training and here and len(x) > self._rows and self._passes > self._first
        # Some gradients are there before backward fails, and random numbers are drawn before forward does.
        if self._backward:
            x = x.requires_grad_()
            found: torch.Tensor = self.inner(_Checked.apply(x, full, True))  # type: ignore[no-untyped-call]
            return found
        return _Checked.apply(self.inner(x), full, False)  # type: ignore[no-untyped-call,no-any-return]


def job_for(module: Any, size: int | str | None, table: Table = TABLE, **config: Any) -> TrainJob:
    name, params = module if isinstance(module, tuple) else (module, {})
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": 5, **config}
    return train_job(
        table,
        Recipe(
            module=name,
            module_params=params,
            optimizer="SGD" if params.get("inner") is Lookup else "AdamW",  # its gradients are sparse
            learning_rate=0.01,
        ),
        TrainConfig(task="regression", micro_batch_size=size, **values),
    )


def trained(
    job: TrainJob, ranks: int, table: Table = TABLE
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
    state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
    return state, metas[0]["history"], metas


CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "narrow": {"strategy_params": {"comm_hook": "bf16"}},
    "zero1": {"strategy": "zero1"},
    "parameterServer": {"strategy": "parameterServer", "strategy_params": {"staleness": 0}},
    "clipped and skipping": {"clip_norm": 0.5, "non_finite": "skip"},
}


@pytest.mark.parametrize(("ranks", "backward"), [(1, True), (2, False)])
def test_the_size_that_is_found_gives_the_bits_of_that_size_when_it_is_set(ranks: int, backward: bool) -> None:
    small = {"inner": Noisy, "rows": 10, "backward": backward}
    found, history, _ = trained(job_for((Small, small), "auto"), ranks)
    sizes = {record["micro_batch_size"] for record in history}
    assert len(sizes) == 1
    size = sizes.pop()
    assert 4 < size <= 10
    expected, known, _ = trained(job_for((Small, small), size), ranks)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert [record["loss"] for record in history] == [record["loss"] for record in known]
    assert [record["gradient_norm"] for record in history] == [record["gradient_norm"] for record in known]


@pytest.mark.parametrize("case", CASES)
def test_one_rank_without_memory_makes_all_take_fewer_rows(case: str) -> None:
    small = {"inner": Noisy, "rows": 10, "rank": 1, "backward": True}
    found, history, _ = trained(job_for((Small, small), "auto", **CASES[case]), 2)
    size = history[-1]["micro_batch_size"]
    assert 4 < size <= 10
    expected, _, _ = trained(job_for((Small, small), size, **CASES[case]), 2)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("inner", "config"),
    [(Lookup, {}), (Parted, {"strategy_params": {"find_unused_parameters": True}}), (Drifting, {})],
    ids=["sparse gradients", "a layer that one rank reaches", "buffers that change in a pass"],
)
def test_gradients_that_not_all_ranks_have_are_reduced_as_ever(inner: type[nn.Module], config: dict[str, Any]) -> None:
    small = {"inner": inner, "rows": 10, "rank": 0}
    found, history, _ = trained(job_for((Small, small), "auto", **config), 2)
    expected, _, _ = trained(job_for((Small, small), history[-1]["micro_batch_size"], **config), 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_memory_that_runs_out_once_the_optimizer_has_made_its_state_is_still_found() -> None:
    small = {"inner": Score, "rows": 20, "rank": 1, "first": 2}
    found, history, _ = trained(job_for((Small, small), "auto"), 2)
    assert history[-1]["micro_batch_size"] <= 20
    torch.testing.assert_close(found, trained(job_for((Small, {**small, "rows": 99}), None), 2)[0], atol=1e-5, rtol=0)


def test_independent_ranks_find_a_size_each() -> None:
    small = {"inner": Score, "rows": 10}
    with control_server() as server:
        parts = [part.batches() for part in TABLE.parts(2)]
        ended = run_ranks(server, parts, job_for((Small, small), "auto", strategy="independent"))
    found = [[record["micro_batch_size"] for record in rank.result.meta["epochs"]] for rank in ended if rank.result]
    assert found == [[8] * EPOCHS] * 2


def test_a_device_without_memory_for_one_row_is_an_error_of_its_rank() -> None:
    small = {"inner": Score, "rows": 0, "rank": 1}
    with pytest.raises(ClusterError, match="the memory of the device is full: planted in forward") as caught:
        trained(job_for((Small, small), "auto"), 2)
    assert caught.value.where["rank"] == 1
    assert "microBatchSize='auto'" in caught.value.hint


def test_a_restart_goes_on_with_the_size_that_was_found(tmp_path: Path) -> None:
    def job(folder: Path, rows: int, **counts: int) -> TrainJob:
        made = resume.job_for(folder, resume.Counts(tmp_path, **counts), micro_batch_size="auto")
        params = {"inner": Noisy, "rows": rows, "rank": 1}
        return replace(made, recipe=replace(made.recipe, module=Small, module_params=params))

    expected, metas = train_on(resume.parts(2), job(tmp_path / "whole", 5))
    resume.killed(job(tmp_path / "cut", 5, rank=1, step=11), 2)
    found, again = train_on(resume.parts(2), job(tmp_path / "cut", 99, rank=1, step=11))  # there is memory now
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert resume.timeless(again[0]["history"]) == resume.timeless(metas[0]["history"])
