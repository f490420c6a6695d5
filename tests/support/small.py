"""A small training of any rows with five features: what it is asked for, and what ranks make of it."""

from __future__ import annotations

from typing import Any

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Mlp, Score
from tests.support.ranks import train_job, train_on


def small_job(table: Table, recipe: dict[str, Any] | None = None, **config: Any) -> TrainJob:
    """Returns a training of scores or classes, for three epochs of batches of 64 rows."""
    classes = table.columns.classes
    made = {"module": Mlp if classes else Score, "loss": "CrossEntropyLoss" if classes else "MSELoss", **(recipe or {})}
    task = "classification" if classes else "regression"
    return train_job(
        table, Recipe(**made), TrainConfig(**{"task": task, "batch_size": 64, "epochs": 3, "seed": 11, **config})
    )


def trained(table: Table, job: TrainJob, ranks: int = 2) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Returns the weights that ranks train, and their history."""
    state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
    return state, metas[0]["history"]
