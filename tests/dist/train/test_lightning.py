"""LightningModules train in ranks as Lightning's own Trainer trains them: the same weights, the same logged values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import LABEL, VALIDATION
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.train.lightning import LightningRecipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.ranks import train_on

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    from lightning.pytorch import Trainer

    from tests.support.lightning_modules import Lit

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
    return TrainJob(columns=table.columns, recipe=recipe, config=made, max_imbalance=None)


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
    """Trains with Lightning's Trainer on the global batches; returns the weights and the metrics of each epoch."""
    parts = options.pop("accumulate_grad_batches", 1)
    held_out = table.arrays[VALIDATION]
    rows = table.take(~held_out).by_key()
    plan = SamplingPlan(rows=len(rows), batch_size=BATCH, seed=SEED, shuffle=True)
    torch.manual_seed(SEED)
    built = module(**params)
    history: list[dict[str, float]] = []

    from lightning.pytorch import Callback

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pass

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
    trainer.fit(built, Batches(rows, plan, parts), Batches(table.take(held_out), None))
    return built.state_dict(), history


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "constant rate": ({}, {}, {}),
    "scheduled by step": ({"schedule": "step"}, {}, {}),
    "scheduled by epoch": ({"schedule": "epoch"}, {}, {}),
    "scheduled by a logged value": ({"schedule": "plateau"}, {}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.05}, {"clip_norm": 0.05}),
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: trainers(TABLE, Lit, params, **options) for name, (params, options, _) in CASES.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_and_log_what_the_trainer_does(case: str, ranks: int, trained: dict[str, Any]) -> None:
    params, _, config = CASES[case]
    expected, history = trained[case]
    state, metas = train_on([part.batches() for part in TABLE.parts(ranks)], job_for(TABLE, params=params, **config))
    torch.testing.assert_close(state, dict(expected), atol=1e-5, rtol=0)
    for record, values in zip(metas[0]["history"], history, strict=True):
        assert {name: record.get(name) for name in values} == pytest.approx(values, abs=1e-5)
        assert record["loss"] == pytest.approx(values["train_loss"], abs=1e-5)
