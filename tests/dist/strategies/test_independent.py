"""Ranks that share nothing train what each would train alone, and the best of them is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import VALIDATION
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.nets import Score
from tests.support.ranks import control_server, load_state, run_ranks, train_job, train_on

TABLE = Table.random(301, validated=True, weighted=True)
CONFIG: dict[str, Any] = {"task": "regression", "batch_size": 32, "epochs": 3, "seed": 5}
JOB = train_job(TABLE, Recipe(module=Score, learning_rate=1e-2), TrainConfig(strategy="independent", **CONFIG))


@pytest.mark.parametrize("more", [{}, {"patience": 1, "best_mode": "max"}])
def test_each_rank_trains_its_own_rows_under_its_own_seed_and_the_best_comes_back(more: dict[str, Any]) -> None:
    parts = TABLE.parts(3)
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in parts], replace(JOB, config=replace(JOB.config, **more)))
    results = [rank.result for rank in ended if rank.result is not None]
    losses = []
    for rank, (part, result) in enumerate(zip(parts, results, strict=True)):
        alone = replace(JOB, config=TrainConfig(**{**CONFIG, **more, "seed": 5 + rank}))
        state, (meta,) = train_on([part.batches()], alone)
        own = result.meta["epochs"]
        assert [record["loss"] for record in own] == [record["loss"] for record in meta["history"]]
        losses.append(-max(record["val_loss"] for record in own) if more else own[-1]["val_loss"])
        if result.payload:
            assert all(torch.equal(value, state[name]) for name, value in load_state(result).items())
    (best,) = [rank for rank, result in enumerate(results) if result.payload]
    assert best == losses.index(min(losses))
    assert len(set(losses)) == 3


def test_a_rank_without_rows_is_refused() -> None:
    held_out = TABLE.arrays[VALIDATION]
    with pytest.raises(Exception, match="there are no rows to train on for rank 1"):
        train_on([TABLE.take(~held_out).batches(), TABLE.take(held_out).batches()], JOB)
