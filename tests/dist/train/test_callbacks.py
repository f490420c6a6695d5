"""Callbacks run in the ranks they ask for, end the training in all of them together, and fail by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch import Callback
from sparktorch.errors import ConfigError, RankError
from sparktorch.train.callbacks import FitContext
from sparktorch.worker import TrainJob
from tests.support.callbacks import Adds, Clamps, Diary, FailsIn, Freezes, Halves, Stops
from tests.support.frames import Table
from tests.support.nets import Paired, Tower
from tests.support.ranks import train_on
from tests.support.small import small_job
from tests.support.small import trained as trained_by
from tests.support.strategies import SGD, trained
from tests.support.strategies import job_for as strategy_job

TABLE = Table.random(200, validated=True)


def job_for(*callbacks: Callback, **config: Any) -> TrainJob:
    return small_job(TABLE, {"callbacks": callbacks}, **{"epochs": 2, "seed": 3, **config})


train = partial(trained_by, TABLE)


@pytest.mark.parametrize("ranks", ["main", "all"])
def test_every_hook_is_called_in_its_place_and_changes_nothing(tmp_path: Path, ranks: str) -> None:
    diary = Diary(tmp_path, ranks)
    state, history = train(job_for(diary))
    expected = [
        *("fit 0 0", "epoch 1 0", "step 1 1", "step 1 2", "step 1 3", "validated 1 3", "epoch over 1 3"),
        *("epoch 2 3", "step 2 4", "step 2 5", "step 2 6", "validated 2 6", "epoch over 2 6", "fit over 2 6"),
    ]
    written = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert written == dict.fromkeys(["rank0"] if ranks == "main" else ["rank0", "rank1"], expected)
    assert diary.told == []  # the copies in the ranks have their own
    without, same = train(job_for())
    assert [record["val_loss"] for record in history] == [record["val_loss"] for record in same]
    torch.testing.assert_close(state, without, atol=0, rtol=0)


def test_numbers_that_rank_0_puts_into_the_record_are_kept() -> None:
    _, history = train(job_for(Adds(np.float32(3), "gradient_norm")))
    assert [record["gradient_norm"] for record in history] == [3.0, 3.0]


@pytest.mark.parametrize(("rank", "ranks", "hook"), [(0, 1, "on_epoch_end"), (2, 3, "on_step_end")])
def test_where_one_rank_asks_to_stop_all_of_them_end_with_the_epoch(rank: int, ranks: int, hook: str) -> None:
    state, history = train(job_for(Stops(rank, hook), epochs=7, validation_interval=5), ranks)
    assert ["val_loss" in record for record in history] == [False, True]  # the end is always validated
    torch.testing.assert_close(state, train(job_for(), ranks)[0], atol=0, rtol=0)


def test_a_callback_that_raises_ends_the_fit_by_the_name_of_its_hook() -> None:
    with pytest.raises(RankError) as caught:
        train(job_for(FailsIn("main")))
    assert caught.value.what == "FailsIn.on_step_end raised ArithmeticError: planted in a callback"
    assert {name: caught.value.where[name] for name in ("epoch", "step")} == {"epoch": 1, "step": 3}
    assert 'raise ArithmeticError("planted in a callback")' in caught.value.trace


def test_a_callback_may_freeze_layers_where_some_ranks_have_no_rows() -> None:
    strategy = {"strategy": "ddp", "strategy_params": {"find_unused_parameters": True}}
    job = replace(job_for(Freezes(), **strategy), placeholder=TABLE.batches()[0].slice(0, 1))
    state, _ = train_on([TABLE.batches(), [], []], job, seconds=60)
    torch.testing.assert_close(state, train(job_for(Freezes()), ranks=1)[0], atol=1e-5, rtol=0)
    assert not torch.equal(state["layers.0.weight"], train(job_for(), ranks=1)[0]["layers.0.weight"])


@pytest.mark.parametrize("config", [{}, {"accumulation_steps": 2}, {"micro_batch_size": "auto"}, {"strategy": "zero1"}])
def test_layers_that_a_callback_freezes_in_all_ranks_stay_as_they_are(config: dict[str, Any]) -> None:
    state, _ = train(job_for(Freezes(), **config))
    torch.testing.assert_close(state, train(job_for(Freezes()), ranks=1)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [Halves, Clamps, Freezes])
def test_what_a_callback_changes_in_rank_0_alone_ends_the_fit_and_in_all_ranks_trains_as_in_one(kind: Any) -> None:
    says = f"differ between the ranks: hooks of {kind.__name__} run in rank 0 alone"
    with pytest.raises(ConfigError, match=says) as caught:
        train(job_for(kind("main")))
    assert 'set ranks = "all"' in caught.value.hint
    state, _ = train(job_for(kind("all")))
    torch.testing.assert_close(state, train(job_for(kind("all")), ranks=1)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("strategy", ["zero3", "localSGD", "parameterServer"])
def test_other_learning_rates_in_some_ranks_end_the_fit_under_any_strategy(strategy: str) -> None:
    with pytest.raises(ConfigError, match="hyperparameters of the optimizer differ"):
        train(job_for(Halves("main"), strategy=strategy))
    _, history = train(job_for(Halves("all"), Stops(0, "on_fit_end"), strategy=strategy))
    assert len(history) == 2


def test_layers_that_a_callback_freezes_in_a_static_graph_end_the_fit() -> None:
    says = r"a hook has frozen 'layers\.0\..*', and strategyParams\.static_graph says"
    with pytest.raises(ConfigError, match=says):
        train(job_for(Freezes(), strategy="ddp", strategy_params={"static_graph": True}))


def test_layers_that_a_callback_freezes_are_averaged_over_ranks_that_have_trained_their_own() -> None:
    alone: dict[str, Any] = {"strategy": "localSGD", "strategy_params": {"period": 1000}}
    frozen, before = train(job_for(Freezes(), **alone))[0], train(job_for(**{**alone, "epochs": 1}))[0]
    assert torch.equal(frozen["layers.0.weight"], before["layers.0.weight"])


class HalvesInRank1(Callback):
    """Halves the learning rate in one rank."""

    ranks = "all"

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        context.optimizer.param_groups[0]["lr"] *= 0.5 if context.world.rank == 1 else 1.0


class Epsilon(Callback):
    """Changes a number of the optimizer in rank 0."""

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        context.optimizer.param_groups[0]["eps"] = 1e-3


def test_ranks_that_differ_name_the_callbacks_of_rank_0_and_those_of_all_ranks() -> None:
    says = "hooks of Adds run in rank 0 alone, those of HalvesInRank1 in all ranks"
    with pytest.raises(ConfigError, match=says):
        train(job_for(Adds(1.0), HalvesInRank1()))


def test_any_number_of_the_optimizer_that_ranks_change_differently_ends_the_fit() -> None:
    with pytest.raises(ConfigError, match="hyperparameters of the optimizer differ"):
        train(job_for(Epsilon()))


@pytest.mark.parametrize(
    ("sizes", "module"), [({"tensor": 2}, Paired), ({"pipeline": 2}, Tower), ({"shard": 2}, Tower)], ids=str
)
def test_ranks_that_have_other_parts_of_a_module_are_not_taken_for_ranks_that_differ(sizes: Any, module: Any) -> None:
    groups = [{"params": ["*bias*"], "weight_decay": 0.0, "lr": 0.01}]
    recipe = {**SGD, "module": module, "callbacks": [Halves("all"), Adds(1.0)], "parameter_groups": groups}
    _, metas = trained(strategy_job(recipe=recipe, sizes=sizes), 2)
    assert [record["added"] for record in metas[0]["history"]] == [1.0, 1.0]
