"""A small training under any strategy, and the plain loop in one process that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparktorch import Callback
from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import LABEL, VALIDATION
from sparktorch.train.callbacks import FitContext
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Tower
from tests.support.ranks import train_job, train_on
from tests.support.reference import plain_training

Trained = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]  # weights, and every rank's meta

ROWS, BATCH, EPOCHS, SEED = 403, 32, 2, 5
TABLE = Table.random(ROWS, weighted=True, validated=True)
STEPS = EPOCHS * math.ceil(int((~TABLE.arrays[VALIDATION]).sum()) / BATCH)
# Rows that are held out, with the other sign: the more a module learns of the others, the larger is its loss of them.
_SIGN = np.where(TABLE.arrays[VALIDATION], -1.0, 1.0)
CONTRARY = replace(TABLE, arrays={**TABLE.arrays, LABEL: TABLE.arrays[LABEL] * _SIGN})
FEW = Batch((torch.ones(2, 5),), torch.ones(2), None, 2)  # rows of a dry run
PARTED = {"min_parameters": 60}  # every layer of the tower by itself
# For what a few steps show as well: five, of whole batches.
FEW_STEPS: dict[str, Any] = {"batch_size": 64, "epochs": 1, "accumulation_steps": 1}
SGD: dict[str, Any] = {"optimizer": "SGD", "learning_rate": 0.05, "optimizer_params": {}}
# Not Adam: a bias of the keys has no gradient but rounding, of which Adam makes steps.
STEEP: dict[str, Any] = {**SGD, "optimizer_params": {"momentum": 0.9}}
_RECIPE: dict[str, Any] = {
    **{"module": Tower, "module_params": {}},
    **{"optimizer": "AdamW", "learning_rate": 3e-3, "optimizer_params": {"weight_decay": 0.05}},
}


def job_for(
    *, recipe: dict[str, Any] | None = None, sizes: dict[str, Any] | None = None, table: Table = TABLE, **config: Any
) -> TrainJob:
    """Returns a training; with `sizes`, which are options, on a mesh."""
    values: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "accumulation_steps": 2, **config}
    if sizes is not None:
        values |= {"strategy": "mesh", "strategy_params": {**PARTED, **sizes}}
    config = {"task": "classification" if table.columns.classes else "regression", **values}
    return train_job(table, Recipe(**{**_RECIPE, **(recipe or {})}), TrainConfig(**config))


def plain(
    recipe: dict[str, Any] | None = None,
    *,
    batch_size: int = BATCH,
    epochs: int = EPOCHS,
    accumulation_steps: int = 1,  # are the same to one that has all rows at once
) -> tuple[dict[str, torch.Tensor], float]:
    """Returns what a loop over the same batches trains, and the loss of the rows that are held out."""
    job = job_for(recipe=recipe, batch_size=batch_size, epochs=epochs)
    state, history = plain_training(TABLE, job)
    return state, history[-1]["val_loss"]


def trained(job: TrainJob, ranks: int = 1, *, table: Table = TABLE, **options: Any) -> Trained:
    """Trains on some ranks; see `train_on`."""
    return train_on([part.batches() for part in table.parts(ranks)], job, **options)


def close(found: Trained, wanted: tuple[dict[str, torch.Tensor], float]) -> None:
    """Asserts that ranks have trained what a plain loop has."""
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=0)
    assert found[1][0]["history"][-1]["val_loss"] == pytest.approx(wanted[1], abs=1e-5)


def alike(found: Trained, wanted: Trained, *names: str, atol: float = 1e-5, rel: float = 1e-4) -> None:
    """Asserts that two trainings have the same weights, number of epochs, and numbers of those names in the last."""
    torch.testing.assert_close(found[0], wanted[0], atol=atol, rtol=0)
    ours, theirs = (metas[0]["history"] for _, metas in (found, wanted))
    assert len(ours) == len(theirs)
    for name in names:
        assert ours[-1][name] == pytest.approx(theirs[-1][name], rel=rel, abs=1e-6), name


def lone_rows(ranks: int) -> list[Any]:
    """Returns the rows of each rank, of which one has all to train on, one all to validate on, and others none."""
    held_out = TABLE.arrays[VALIDATION]
    few: Sequence[Any] = [TABLE.take(~held_out).batches(), [], TABLE.take(held_out).batches(), []]
    return [*few[:ranks]] if ranks > 2 else [few[0], few[2]]


class Weights(Callback):
    """Leaves the bytes of the whole model, as each rank has it in the end."""

    ranks = "all"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_fit_end(self, context: FitContext) -> None:
        state: dict[str, Any] = context.module.state_dict()
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
        (self._folder / str(context.world.rank)).write_bytes(pack_state(whole))
