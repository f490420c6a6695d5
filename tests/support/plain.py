"""The batches that any number of ranks trains together, for loops of nothing but torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import LABEL, VALIDATION, WEIGHT
from sparktorch.data.sampling.plan import SamplingPlan
from tests.support.frames import Table

__all__ = ["global_batches", "tensors", "training_rows", "validation_rows"]


def training_rows(table: Table) -> Table:
    """Returns the rows that are trained on, in the order of their positions."""
    return table.take(~table.arrays.get(VALIDATION, np.zeros(len(table), bool))).by_key()


def validation_rows(table: Table) -> Table:
    """Returns the rows that are held out."""
    return table.take(table.arrays[VALIDATION])


def global_batches(table: Table, config: TrainConfig, epoch: int) -> Iterator[Table]:
    """Yields the rows of every step of an epoch."""
    rows = training_rows(table)
    plan = SamplingPlan(rows=len(rows), batch_size=config.batch_size, seed=config.seed, shuffle=config.shuffle)
    steps = plan.steps_of(0, len(rows), epoch)
    for step in range(plan.steps):
        yield rows.take(steps == step)


def tensors(table: Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns features, labels (int64 where they are classes) and weights of a table."""
    x, y = torch.from_numpy(table.arrays["x0"]), torch.from_numpy(table.arrays[LABEL])
    weight = torch.from_numpy(table.arrays[WEIGHT]) if WEIGHT in table.arrays else torch.ones(len(table))
    return x, y.long() if table.columns.classes else y.float(), weight
