"""LightningModules train in ranks as Lightning's own Trainer trains them: the same weights, the same logged values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.adapters.lightning.recipe import LightningRecipe
from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.data.columns import LABEL, VALIDATION
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.ranks import preload, train_job, train_on
from tests.support.resume import check_same_bits, killed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    from lightning.pytorch import Callback, Trainer

    from tests.support.lightning_modules import Lit, LitCounting, LitDoubled, LitHooks, LitMinimal, LitShared

preload("tests.support.lightning_modules")
ROWS, BATCH, EPOCHS, SEED = 331, 64, 3, 11
TABLE = Table.random(ROWS, validated=True)


def job_for(table: Table, module: type = Lit, params: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, **config}
    made = TrainConfig(task="generic", **values)
    recipe = LightningRecipe(
        module=module,
        module_params=params or {},
        loss=None,
        epochs=made.epochs,
        accumulation=made.accumulation_steps,
        stage="fit",
    )
    return train_job(table, recipe, made)


class Batches:
    """The global batches of each epoch, in the order of the ranks'; with accumulation, each in equal parts."""

    def __init__(self, table: Table, plan: SamplingPlan | None, parts: int = 1) -> None:
        self._table, self._plan, self._parts, self._epoch = table, plan, parts, 0

    def __len__(self) -> int:
        return 1 if self._plan is None else self._plan.steps * self._parts

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        x, y = torch.from_numpy(self._table.arrays["x0"]), torch.from_numpy(self._table.arrays[LABEL]).float()
        if self._plan is None:
            yield [x, y]
            return
        steps = self._plan.steps_of(0, len(self._table), self._epoch)
        self._epoch += 1
        for step in range(self._plan.steps):
            rows = torch.from_numpy(np.flatnonzero(steps == step))
            for part in rows.tensor_split(self._parts):
                yield [x[part], y[part]]


@pytest.fixture
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trainers(table: Table, module: type, params: dict[str, Any], **options: Any) -> tuple[Any, list[dict[str, float]]]:
    parts = options.pop("accumulate_grad_batches", 1)
    held_out = table.arrays[VALIDATION]
    rows, validation = table.take(~held_out).by_key(), table.take(held_out)
    plan = SamplingPlan(rows=len(rows), batch_size=BATCH, seed=SEED, shuffle=True)
    torch.manual_seed(SEED)
    built = module(**params)
    history: list[dict[str, float]] = []

    class Notes(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            history.append({name: float(value) for name, value in trainer.callback_metrics.items()})

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch:
                history.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=parts,
        callbacks=[Notes()],
        **options,
    )
    trainer.fit(built, Batches(rows, plan, parts), Batches(validation, None) if len(validation) else None)
    for values in history:
        if "loss" in values:  # of the last step; the history's is that of the epoch
            values["loss"] = values["train_loss"]
    return built.state_dict(), history


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "constant rate": ({}, {}, {}),
    "scheduled by step": ({"schedule": "step"}, {}, {}),
    "scheduled by epoch": ({"schedule": "epoch"}, {}, {}),
    "scheduled by a logged value": ({"schedule": "plateau"}, {}, {}),
    "clipped, a part": ({"schedule": "part"}, {"gradient_clip_val": 0.05}, {"clip_norm": 0.05}),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: trainers(TABLE, Lit, params, **options) for name, (params, options, _) in CASES.items()}


STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero3": {"strategy": "zero3"},
}


@pytest.mark.parametrize(
    ("case", "strategy"),
    [*((case, "") for case in CASES), *(("scheduled by step", strategy) for strategy in STRATEGIES)],
)
def test_ranks_train_and_log_what_the_trainer_does(case: str, strategy: str, trained: dict[str, Any]) -> None:
    params, _, config = CASES[case]
    ranks = 1 if case == "constant rate" else 2
    job = job_for(TABLE, params=params, **config, **STRATEGIES.get(strategy, {}))
    check(train_on([part.batches() for part in TABLE.parts(ranks)], job), trained[case])


def check(found: tuple[dict[str, torch.Tensor], list[dict[str, Any]]], trained: Any) -> None:
    (state, metas), (expected, history) = found, trained
    torch.testing.assert_close(state, dict(expected), atol=1e-5, rtol=0)
    for record, values in zip(metas[0]["history"], history, strict=True):
        assert {name: record.get(name) for name in values} == pytest.approx(values, abs=1e-5)


@pytest.mark.usefixtures("_quietly")
def test_accumulated_batches_are_the_trainers() -> None:
    table = replace(Table.random(3 * BATCH), columns=TABLE.columns)
    table.arrays[VALIDATION] = np.zeros(len(table), bool)
    params = {"schedule": "often"}
    expected, history = trainers(table, Lit, params, accumulate_grad_batches=2)
    job = job_for(table, params=params, accumulation_steps=2)
    state, metas = train_on([part.batches() for part in table.parts(2)], job)
    torch.testing.assert_close(state, dict(expected), atol=1e-5, rtol=0)
    for record, values in zip(metas[0]["history"], history, strict=True):
        of_batches = ("last_loss", "both_step", "step_number_epoch", "step_number")
        known = {name: value for name, value in values.items() if name not in of_batches}
        assert {name: record.get(name) for name in known} == pytest.approx(known, abs=1e-5)


def test_ranks_without_rows_take_part_and_log_nothing(trained: dict[str, Any]) -> None:
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(~held_out).batches(), [], TABLE.take(held_out).batches()]
    for strategy in ("ddp", "zero3"):
        job = replace(job_for(TABLE, strategy=strategy), placeholder=TABLE.batches()[0].slice(7, 1))
        check(train_on(parts, job), trained["constant rate"])


def test_what_a_module_logs_as_its_validation_loss_is_that() -> None:
    records = []
    for kind in (LitMinimal, LitDoubled):
        _, metas = train_on([part.batches() for part in TABLE.parts(2)], job_for(TABLE, kind))
        records.append(metas[0]["history"][-1])
    assert records[1]["val_loss"] == pytest.approx(2 * records[0]["val_loss"])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_metric_of_training_and_validation_keeps_them_apart(strategy: str) -> None:
    held_out = TABLE.arrays[VALIDATION]
    parts = [TABLE.take(held_out).batches(), TABLE.take(~held_out).batches()]
    job = replace(job_for(TABLE, LitShared, strategy=strategy), placeholder=TABLE.batches()[0].slice(7, 1))
    _, metas = train_on(parts, job)
    for record in metas[0]["history"]:
        assert record["train_error"] == record["computed"] == pytest.approx(record["loss"], abs=1e-5)
        assert record["val_error"] == pytest.approx(record["val_loss"], abs=1e-5)


@pytest.mark.usefixtures("_quietly")
def test_hooks_are_called_as_the_trainer_calls_them(tmp_path: Path) -> None:
    found = []
    for name in ("trainer", "rank"):
        path = str(tmp_path / name)
        if name == "trainer":
            trainers(TABLE, LitHooks, {"path": path})
        else:
            train_on([TABLE.batches()], job_for(TABLE, LitHooks, {"path": path}, validation_batch_size=ROWS))
        # The Trainer sets gradients to zero after the forward pass.
        calls = (tmp_path / name).read_text().split()
        found.append([call for call in calls if not call.startswith("on_before_zero_grad")])
        assert len(calls) > len(found[-1])
    trainer, rank = found
    assert rank == trainer


@pytest.mark.parametrize(("strategy", "schedule"), [("ddp", "epoch"), ("zero1", "step")])
def test_a_training_goes_on_with_the_same_bits(strategy: str, schedule: str, tmp_path: Path) -> None:
    parts = [part.batches() for part in TABLE.parts(2)]

    def job(folder: str, **lit: Any) -> TrainJob:
        made = job_for(TABLE, LitCounting, {"schedule": schedule, **lit}, strategy=strategy)
        checkpoint = CheckpointConfig(directory=str(tmp_path / folder), unit="step", interval=1, owner="me")
        return replace(made, checkpoint=checkpoint)

    expected, dies = train_on(parts, job("whole")), {"dies": 6, "flag": str(tmp_path / "flag")}
    killed(job("parts", **dies), parts)
    found = train_on(parts, job("parts", **dies))
    check_same_bits(found, expected)
    assert found[0].keys() == expected[0].keys()
    assert found[1][0]["history"][-1]["batches"] == 3 * 4
