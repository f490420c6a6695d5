"""Validation by step is that of the weights after that step, and may end the training within an epoch."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import VALIDATION
from sparktorch.errors import ConfigError
from sparktorch.train.callbacks import FitContext
from sparktorch.train.loop import loop
from sparktorch.train.loop.validation import rows_at_a_time
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Mlp, Score, Sized
from tests.support.ranks import train_job, train_on
from tests.support.reference import global_batches, plain_steps, validated, validation_rows

TABLE = Table.random(403, weighted=True, validated=True)
RATE = 0.4  # at which the loss soon jumps about
JOB = train_job(
    TABLE,
    Recipe(module=Score, optimizer="SGD", learning_rate=RATE),
    TrainConfig(task="regression", batch_size=64, epochs=3, seed=11, validation_unit="step", validation_interval=2),
)
STEPS = len({number for number, _ in enumerate(global_batches(TABLE, replace(JOB.config, epochs=1)))})


def plain(job: TrainJob) -> tuple[list[float], list[tuple[float, float]], list[dict[str, torch.Tensor]]]:
    """Returns, of every step, the validation's loss after it, its own loss with its weight, and the weights."""
    losses, trained, states = [], [], []
    for step in plain_steps(TABLE, job):
        losses.append(validated(TABLE, job, step.module)["val_loss"])
        trained.append((step.loss, step.weight))
        states.append({name: value.clone() for name, value in step.module.state_dict().items()})
    return losses, trained, states


def squares(module: torch.nn.Module, batch: Batch) -> Any:
    losses = (module(batch.inputs[0]) - batch.label) ** 2
    return losses, {"square": losses.detach()}


def with_config(**changes: Any) -> TrainJob:
    return replace(JOB, config=replace(JOB.config, **changes))


def train(job: TrainJob, ranks: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job)
    return state, metas[0]["history"]


@pytest.mark.parametrize(("interval", "ranks"), [(2, 3), (100, 1)])
def test_validation_every_few_steps_of_the_run_and_at_its_end(interval: int, ranks: int) -> None:
    losses, trained, states = plain(JOB)
    state, history = train(with_config(validation_interval=interval), ranks)
    last = 3 * STEPS
    due = sorted({*range(interval, last + 1, interval), last})
    found = [validation for record in history for validation in record["validations"]]
    assert [validation["step"] for validation in found] == due
    assert [validation["val_loss"] for validation in found] == pytest.approx([losses[s - 1] for s in due], abs=1e-5)
    for epoch, record in enumerate(history):
        first, end = epoch * STEPS, (epoch + 1) * STEPS
        assert all(first < validation["step"] <= end for validation in record["validations"])
        assert record.get("val_loss") == (record["validations"][-1]["val_loss"] if record["validations"] else None)
        sums, weights = zip(*trained[first:end], strict=True)
        assert record["loss"] == pytest.approx(sum(sums) / sum(weights), abs=1e-5)
        assert record["steps"] == STEPS
    torch.testing.assert_close(state, states[-1], atol=1e-5, rtol=0)


def test_training_ends_within_an_epoch_and_its_loss_is_that_of_the_rows_it_trained() -> None:
    config = replace(JOB.config, epochs=40, validation_interval=3, patience=2)
    losses, trained, states = plain(replace(JOB, config=config))
    best, end, worse = 0, 0, 0
    for step in range(3, len(losses) + 1, 3):
        if not best or losses[step - 1] < losses[best - 1]:
            best, worse = step, 0
        else:
            worse += 1
        if worse == 2:
            end = step
            break
    assert end, "it never jumped"
    assert end % STEPS, "the end of an epoch shows nothing"
    state, history = train(replace(JOB, config=config), 3)
    assert sum(record["steps"] for record in history) == end
    assert history[-1]["steps"] == end % STEPS
    sums, weights = zip(*trained[end - end % STEPS : end], strict=True)
    assert history[-1]["loss"] == pytest.approx(sum(sums) / sum(weights), abs=1e-5)
    assert history[-1]["validations"][-1]["step"] == end
    torch.testing.assert_close(state, states[best - 1], atol=1e-5, rtol=0)


class SetsClock(Callback):
    """Moves the clock of a rank an hour ahead after a step."""

    ranks = "all"

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_step_end(self, context: FitContext) -> None:
        if context.world.rank == self._rank and context.step == self._step:
            ahead = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600)
            loop.time = ahead  # type: ignore[attr-defined]  # of this process alone


@pytest.mark.parametrize(
    ("changes", "rank", "end"),
    [
        ({"validation_interval": 3}, 0, 6),
        ({"validation_interval": 3}, 1, 4 * STEPS),
        ({"validation_unit": "epoch", "validation_interval": 2}, 0, 2 * STEPS),
    ],
    ids=["by step", "of another rank", "by epoch"],
)
def test_a_training_whose_minutes_are_over_by_the_clock_of_rank_0_ends_with_a_validation(
    changes: dict[str, Any], rank: int, end: int
) -> None:
    job = with_config(epochs=4, max_minutes=30.0, **changes)
    job = replace(job, recipe=replace(job.recipe, callbacks=[SetsClock(rank, 4)]))
    state, metas = train_on([part.batches() for part in TABLE.parts(2)], job)
    history = metas[0]["history"]
    assert sum(record.get("steps", STEPS) for record in history) == end
    assert "val_loss" in history[-1]
    assert metas[0]["out_of_time"] == (end < 4 * STEPS)
    torch.testing.assert_close(state, plain(job)[2][end - 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", [{}, {"best_mode": "max", "best_delta": 0.02}])
def test_training_ends_by_accuracy_with_the_weights_of_a_plain_loop(rule: dict[str, Any]) -> None:
    table = Table.random(301, classes=3, validated=True)
    config = TrainConfig(
        task="classification", batch_size=32, epochs=30, patience=3, best_metric="val_accuracy", **rule
    )
    recipe = Recipe(module=Mlp, loss="CrossEntropyLoss", optimizer="SGD", learning_rate=0.1)
    job = train_job(table, recipe, config)
    losses, accuracies, states = [], [], []
    per_epoch = math.ceil(int((~table.arrays[VALIDATION]).sum()) / 32)
    for step in islice(plain_steps(table, job), per_epoch - 1, None, per_epoch):
        found = validated(table, job, step.module)
        losses.append(found["val_loss"])
        accuracies.append(found["val_accuracy"])
        states.append({name: value.clone() for name, value in step.module.state_dict().items()})
        best = 0
        for number, accuracy in enumerate(accuracies):
            best = number if accuracy > accuracies[best] + rule.get("best_delta", 0.0) else best
        if step.epoch - best == 3:
            break
    assert len(states) < 30
    assert best != losses.index(min(losses)), "by val_loss it would be another"
    state, metas = train_on([part.batches() for part in table.parts(3)], job)
    assert [record["val_accuracy"] for record in metas[0]["history"]] == pytest.approx(accuracies)
    torch.testing.assert_close(state, states[best], atol=1e-5, rtol=0)


def test_a_metric_that_a_training_step_does_not_give_is_an_error_at_the_first_validation() -> None:
    job = with_config(best_metric="val_squre", validation_interval=2)
    with pytest.raises(ConfigError, match="earlyStoppingMetric is 'val_squre'") as caught:
        train(replace(job, recipe=replace(JOB.recipe, loss=None, training_step=squares)), 2)
    assert (caught.value.where["epoch"], caught.value.hint) == (1, "set one that it has: val_loss, val_square")


def test_a_plateau_is_looked_for_in_the_last_validation_of_an_epoch() -> None:
    options = {"patience": 0, "threshold": 1e9, "threshold_mode": "abs"}
    recipe = replace(JOB.recipe, scheduler="ReduceLROnPlateau", scheduler_params=options)
    job = replace(with_config(epochs=5, validation_interval=2 * STEPS), recipe=recipe)
    _, history = train(job, 2)
    # Validated in the second, fourth and fifth epoch: nothing improves by so much after the first look.
    assert [record["learning_rate"] for record in history] == pytest.approx([RATE] * 4 + [RATE * 0.1])


@pytest.mark.parametrize(
    ("config", "ranks", "rows"),
    [
        ({"batch_size": 256}, 3, 86),
        ({"batch_size": 256, "micro_batch_size": 20}, 2, 20),
        ({"batch_size": 100_000}, 1, 4096),
        ({"batch_size": 100}, 2, 64),
    ],
)
def test_validation_takes_as_many_rows_as_training_and_not_just_a_few(
    config: dict[str, Any], ranks: int, rows: int
) -> None:
    assert rows_at_a_time(TrainConfig(**config), ranks, config.get("micro_batch_size")) == rows


def step_of(module: Any, batch: Any) -> Any:
    losses = torch.nn.functional.cross_entropy(module(batch.inputs[0]), batch.label.long(), reduction="none")
    return losses, {"loss": losses.detach()}


def step_of_negatives(module: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(-module(-batch.inputs[0]), batch.label.long(), reduction="none")


def step_that_changes_scores(module: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(module(batch.inputs[0]).neg_(), batch.label.long(), reduction="none")


def step_that_changes_some_scores(module: Any, batch: Any) -> Any:
    scores = module(batch.inputs[0])
    if torch.distributed.get_rank() == 0:
        scores.mul_(1.0)
    return torch.nn.functional.cross_entropy(scores, batch.label.long(), reduction="none")


def scripted() -> torch.nn.Module:
    return torch.jit.script(torch.nn.Linear(5, 3))


CLASSES = Table.random(203, classes=3, validated=True)


def test_the_size_of_validation_batches_does_not_change_what_they_say(tmp_path: Path) -> None:
    found = []
    for size in (None, 7):
        folder = tmp_path / str(size)
        folder.mkdir()
        config = TrainConfig(
            task="classification", batch_size=64, validation_batch_size=size, strategy="zero3", epochs=2
        )
        job = train_job(
            CLASSES, Recipe(module=Sized, module_params={"folder": str(folder)}, loss="CrossEntropyLoss"), config
        )
        _, metas = train_on([part.batches() for part in CLASSES.parts(2)], job)
        found.append([record["val_loss"] for record in metas[0]["history"]] + metas[0]["confusion"])
        rows = [int(line) for file in folder.iterdir() for line in file.read_text().split()]
        assert max(rows) == (7 if size else min(32, max(rows)))
        assert len(rows) > (12 if size else 0)
    assert found[0][:2] == pytest.approx(found[1][:2], abs=1e-6)
    assert found[0][2:] == found[1][2:]


def _passes(folder: Path) -> list[int]:
    return [sum(int(rows) > 8 for rows in file.read_text().split()) for file in folder.iterdir()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "step", "passes", "more"),
    [
        (Sized, step_of, 1, {}),
        (Sized, step_of_negatives, 2, {}),
        (Sized, step_that_changes_scores, 2, {}),
        # torch cannot tell what the output has become
        (Mlp, step_that_changes_some_scores, None, {"strategy": "zero3", "strategy_params": {"min_parameters": 20}}),
        (scripted, step_of, None, {}),
    ],
)
def test_validation_with_a_training_step_calls_the_module_again_only_if_it_must(
    module: Any, step: Any, passes: int | None, more: dict[str, Any], tmp_path: Path
) -> None:
    params = {"folder": str(tmp_path)} if module is Sized else {}
    job = train_job(
        CLASSES,
        Recipe(module=module, module_params=params, training_step=step, loss=None),
        TrainConfig(task="classification", batch_size=64, validation_batch_size=1000 if passes else 5, **more),
    )
    state, metas = train_on([part.batches() for part in CLASSES.parts(2)], job)
    if passes:
        assert _passes(tmp_path) == [passes, passes]
    trained = module(**params)
    trained.load_state_dict(state)
    held_out = validation_rows(CLASSES)
    accuracy = (trained.eval()(held_out.x).argmax(1) == held_out.y).float().mean()
    assert metas[0]["history"][-1]["val_accuracy"] == pytest.approx(float(accuracy), abs=1e-6)


class LooksAround(Callback):
    """Refuses batches that are held outside of a step."""

    def on_validation_end(self, context: FitContext, metrics: dict[str, Any]) -> None:
        held = [one for one in gc.get_objects() if isinstance(one, Batch)]
        assert not held, f"{len(held)} batches are held"


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_validation_holds_no_batch_of_the_training(unit: str) -> None:
    job = with_config(validation_unit=unit, validation_interval=1, epochs=1)
    train(replace(job, recipe=replace(JOB.recipe, callbacks=[LooksAround()])), 2)
