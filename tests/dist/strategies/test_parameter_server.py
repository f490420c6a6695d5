"""The parameter server: exact where ranks keep in step, bounded where they need not, and ended by any failure."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparktorch.data.columns import LABEL, VALIDATION
from sparktorch.errors import RankError, RankLostError
from sparktorch.worker import TrainJob
from tests.support import ranks as ranks_module
from tests.support import strategies
from tests.support.frames import Table
from tests.support.nets import (
    DiesAt,
    DiesWithin,
    FailsAt,
    Linear,
    Mlp,
    Normalised,
    Score,
    Unsteady,
    Watched,
    mean_output_error,
    output_times_label,
)
from tests.support.ranks import cause_of_death, control_server, run_ranks, train_on
from tests.support.reference import plain_training
from tests.support.strategies import SGD

ROWS, BATCH, EPOCHS, SEED = 403, 64, 3, 11
pytestmark = pytest.mark.landing

STEPS = -(-ROWS // BATCH)
TABLE = Table.random(ROWS, weighted=True)
LINEAR = {"module": Linear, "loss": output_times_label}
MODES = [{"staleness": 1}, {"staleness": 4, "servers": None}, {}]


def job_for(
    table: Table = TABLE, *, options: dict[str, Any] | None = None, recipe: dict[str, Any] | None = None, **config: Any
) -> TrainJob:
    made: dict[str, Any] = {"module": Score, **SGD, **(recipe or {})}
    params = {"staleness": 0} if options is None else options
    values = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "accumulation_steps": 1, **config}
    return strategies.job_for(recipe=made, table=table, strategy="parameterServer", strategy_params=params, **values)


def parts(ranks: int, table: Table = TABLE) -> list[Any]:
    return [part.batches() for part in table.parts(ranks)]


def seeded(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return make()


def test_servers_on_all_ranks_train_what_one_server_trains_to_the_last_bit() -> None:
    recipe = {"optimizer": "AdamW"}
    states = [
        train_on(parts(3), job_for(recipe=recipe, options={"staleness": 0, "servers": servers}))[0]
        for servers in (1, 1, 2, None)
    ]
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], atol=0, rtol=0)


@pytest.mark.parametrize("options", MODES)
def test_pushes_in_any_order_add_up_to_the_steps_of_sgd_at_their_learning_rates(options: dict[str, Any]) -> None:
    # Gradients that do not depend on the parameters do not depend on how stale those are.
    recipe = {**LINEAR, "learning_rate": 0.5, "scheduler": "CosineAnnealingLR"}
    job = job_for(recipe=recipe, options=options, schedule_interval="step")
    torch.testing.assert_close(train_on(parts(3), job)[0], plain_training(TABLE, job)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", MODES)
def test_a_step_of_adam_is_as_long_on_three_ranks_as_on_one(options: dict[str, Any]) -> None:
    def distance(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return (state["bias"] - seeded(Linear).state_dict()["bias"]).abs()

    # The same gradient in each of 20 steps: Adam goes a learning rate a step.
    recipe = {**LINEAR, "optimizer": "Adam", "learning_rate": 0.01}
    job = job_for(recipe=recipe, options=options, batch_size=ROWS, epochs=20)
    expected = distance(plain_training(TABLE, job)[0])
    torch.testing.assert_close(expected, torch.tensor([0.2]), atol=1e-3, rtol=0)
    positive = TABLE.with_values(LABEL, np.abs(TABLE.arrays[LABEL]))
    state, _ = train_on(parts(3, positive), job)
    torch.testing.assert_close(distance(state), expected, atol=0.02, rtol=0)


def watched(
    folder: Path, options: dict[str, Any], *, ranks: int = 3, slow: int = 1, seconds: float = 0.02
) -> list[dict[str, Any]]:
    params = {"folder": str(folder), "slow": slow, "seconds": seconds}
    table = Table.random(ROWS, validated=True)
    job = job_for(table, recipe={"module": Watched, "module_params": params}, options=options, epochs=2, batch_size=16)
    history: list[dict[str, Any]] = train_on(parts(ranks, table), job)[1][0]["history"]
    return history


def times(folder: Path, rank: int) -> list[float]:
    return [float(line) for line in (folder / f"steps-{rank}").read_text().split()]


def ahead(folder: Path, fast: int, slow: int) -> int:
    mine, theirs = times(folder, fast), times(folder, slow)
    assert len(mine) == len(theirs)
    # Beginning step i (from 0) takes i own steps behind it; of the other's, all but the last begun are.
    return max(i - max(0, sum(t < began for t in theirs) - 1) for i, began in enumerate(mine))


@pytest.mark.clock
@pytest.mark.parametrize(("servers", "bound"), [(1, 0), (None, 1), (1, 3)])
def test_no_rank_gets_further_ahead_than_the_bound(bound: int, servers: int | None, tmp_path: Path) -> None:
    history = watched(tmp_path, {"staleness": bound, "servers": servers})
    # The slow rank's step in flight may be over already, though the next has not begun: one less is seen.
    assert bound <= ahead(tmp_path, 0, 1) <= bound + 1
    assert ahead(tmp_path, 1, 0) <= 1
    most = 2 * (2 * bound + 1) if bound else 0
    assert all(record["staleness_max"] <= most for record in history)
    assert all((record["staleness_mean"] > 0) == (bound > 0) for record in history)


@pytest.mark.parametrize("options", [{"staleness": 0}, {}])
def test_every_rank_validates_the_same_weights(options: dict[str, Any], tmp_path: Path) -> None:
    watched(tmp_path, options)
    # By rank, in order; ranks have more or fewer batches of validation rows.
    seen = [list(dict.fromkeys((tmp_path / f"weights-{rank}").read_text().split())) for rank in range(3)]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2, "one set of weights an epoch"


def test_each_rank_clips_its_own_gradient() -> None:
    # SGD at rate 1 goes as far as the gradient is long, in one step.
    job = job_for(
        recipe={"module": Linear, "loss": output_times_label, "learning_rate": 1.0},
        batch_size=ROWS,
        epochs=1,
        clip_norm=1e-3,
    )
    initial = seeded(Linear).state_dict()
    for ranks in (1, 2):
        state, _ = train_on(parts(ranks), job)
        moved = torch.cat([(state[name] - initial[name]).flatten() for name in initial]).norm()
        assert 0.9e-3 < moved < 1.01e-3


def test_the_best_weights_come_back_with_the_running_statistics_they_were_validated_with() -> None:
    table = Table.random(ROWS, validated=True)
    recipe = {"module": Normalised, "loss": mean_output_error, "learning_rate": 0.4}
    job = job_for(table, recipe=recipe, options={}, epochs=40, patience=3)
    state, metas = train_on(parts(2, table), job)
    losses = [record["val_loss"] for record in metas[0]["history"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 3 < 40
    module = Normalised()
    module.load_state_dict(state)
    module.eval()
    held_out = table.take(table.arrays[VALIDATION])
    with torch.no_grad():
        output = module(torch.from_numpy(held_out.arrays["x0"]))
    loss = mean_output_error(output, torch.from_numpy(held_out.arrays[LABEL]).float()).mean()
    assert float(loss) == pytest.approx(min(losses), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "dead", "dies"),
    [
        ({"staleness": 0}, 0, {"step": 1}),
        ({}, 2, {"step": 12}),
        ({"staleness": 0}, 0, {"seconds": 0.2}),  # in the middle of a message
        ({"servers": None}, 1, {"seconds": 0.2}),
    ],
)
def test_a_rank_that_is_killed_ends_the_others_at_once(
    options: dict[str, Any], dead: int, dies: dict[str, Any]
) -> None:
    table, ranks = Table.random(ROWS, classes=3), 3 if "step" in dies else 2
    module = DiesAt if "step" in dies else DiesWithin
    recipe = {"module": module, "module_params": {"rank": dead, **dies}, "loss": "CrossEntropyLoss"}
    with control_server() as server:
        job = job_for(table, recipe=recipe, options=options, epochs=EPOCHS if "step" in dies else 200)
        ended = run_ranks(server, parts(ranks, table), job)
        _, primary = server.first_failure()
        silent = cause_of_death(server, ranks)
    assert Counter(rank.exitcode for rank in ended) == {-signal.SIGKILL: 1, 0: ranks - 1}
    assert all(rank.error for number, rank in enumerate(ended) if number != dead)
    assert not primary, "what the surviving ranks report is no cause"
    assert type(silent) is RankLostError
    assert silent.where["rank"] == dead


def rank_then_threads(pipe: Connection, *arguments: Any) -> None:
    ranks_module._rank(pipe, *arguments)
    pipe.send((None, " ".join(thread.name for thread in threading.enumerate() if "sparktorch" in thread.name), 0))


@pytest.mark.parametrize(
    ("module", "options"), [(Mlp, {"staleness": 0}), (FailsAt, {"servers": None}), (DiesAt, {"staleness": 0})]
)
def test_the_threads_of_servers_end_with_the_training(
    module: type[nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_rank", rank_then_threads)
    table = Table.random(ROWS, classes=3)
    params = {} if module is Mlp else {"rank": 1, "step": 9}
    recipe = {"module": module, "module_params": params, "loss": "CrossEntropyLoss"}
    with control_server() as server:
        ended = run_ranks(server, parts(3, table), job_for(table, recipe=recipe, options=options))
    assert [rank.error for rank in ended] == ["", "", ""]


FAILING: dict[str, Any] = {"module": FailsAt, "module_params": {"rank": 2, "step": 9}}
UNSTEADY: dict[str, Any] = {"module": Mlp, "optimizer": Unsteady}


@pytest.mark.parametrize(
    ("recipe", "options", "what"),
    [
        (FAILING, {"staleness": 0}, "planted in forward"),
        (FAILING, {"staleness": 2, "servers": None}, "planted in forward"),
        (UNSTEADY, {"staleness": 0}, "planted in the optimizer"),
        ({**UNSTEADY, "module_params": {"hidden": 300_000}}, {}, "planted in the optimizer"),
    ],
)
def test_an_exception_in_one_rank_or_server_is_the_cause_that_is_told(
    recipe: dict[str, Any], options: dict[str, Any], what: str
) -> None:
    table = Table.random(ROWS, classes=3)
    with control_server() as server:
        job = job_for(table, recipe={**recipe, "loss": "CrossEntropyLoss"}, options=options)
        ended = run_ranks(server, parts(3, table), job)
        failure, primary = server.first_failure()
    assert type(failure) is RankError
    assert primary
    assert f"ArithmeticError while training: {what}" in failure.what
    if recipe is FAILING:
        assert failure.where["rank"] == 2
    assert all(rank.error for rank in ended), "the other ranks have left too"
