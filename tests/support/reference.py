"""What a plain loop in one process would train on: the global batches, and the validation rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import LABEL, VALIDATION, WEIGHT
from sparktorch.data.sampling.plan import SamplingPlan
from tests.support.frames import Table


class Part(NamedTuple):
    """Some rows as tensors; weights are ones where there are none."""

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor


def tensors(table: Table) -> Part:
    """Returns a table's only input, its label and its weights; labels of classes become int64."""
    label = torch.from_numpy(table.arrays[LABEL])
    weight = table.arrays.get(WEIGHT, np.ones(len(table), np.float32))
    whole = label.long() if table.columns.classes else label.float()
    return Part(torch.from_numpy(table.arrays["x0"]), whole, torch.from_numpy(weight))


def split_rows(table: Table) -> tuple[Table, Table]:
    """Returns the training rows in the order of their positions, and the validation rows."""
    held_out = table.arrays.get(VALIDATION, np.zeros(len(table), bool))
    return table.take(~held_out).by_key(), table.take(held_out)


def validation_rows(table: Table) -> Part:
    """Returns the validation rows."""
    return tensors(split_rows(table)[1])


def epoch_batches(table: Table, config: TrainConfig, epoch: int) -> Iterator[Table]:
    """Yields the rows of every step of an epoch."""
    rows, _ = split_rows(table)
    plan = SamplingPlan(rows=len(rows), batch_size=config.batch_size, seed=config.seed, shuffle=config.shuffle)
    steps = plan.steps_of(0, len(rows), epoch)
    for step in range(plan.steps):
        yield rows.take(steps == step)


def global_batches(table: Table, config: TrainConfig) -> Iterator[tuple[int, Part]]:
    """Yields the number of the epoch, from 0, and the rows of every batch of a training."""
    for epoch in range(config.epochs):
        for rows in epoch_batches(table, config, epoch):
            yield epoch, tensors(rows)
