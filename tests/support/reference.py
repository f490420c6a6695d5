"""One plain loop of torch in one process, with which any number of ranks is compared: its batches, what it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import LABEL, VALIDATION, WEIGHT
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table

Groups = Callable[[nn.Module], Any]  # what an optimizer gets of a module's parameters


class Part(NamedTuple):
    """Some rows as tensors; weights are ones where there are none."""

    x: torch.Tensor
    y: torch.Tensor
    w: torch.Tensor


class Step(NamedTuple):
    """A step that has been taken: its epoch, from 0, the sums of its rows' losses and weights, and its gradient."""

    epoch: int
    loss: float
    weight: float
    norm: float
    rate: float
    skipped: bool
    module: nn.Module
    average: nn.Module


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


def balanced(table: Table) -> list[float]:
    """Returns the weights of classes that give each the same sum over the training rows."""
    _, label, weight = tensors(split_rows(table)[0])
    sums = np.bincount(label.numpy(), weight.double().numpy())
    return [float(value) for value in sums.sum() / (len(sums) * sums)]


def weighed(table: Table, job: TrainJob, module: nn.Module, part: Part) -> tuple[torch.Tensor, ...]:
    """Returns outputs, and each row's loss times its weight, and weight."""
    of_class, output = job.config.class_weights, module(part.x)
    if not table.columns.classes and output.dim() == 2:
        output = output.squeeze(1)
    if callable(job.recipe.loss):
        losses = job.recipe.loss(output, part.y)
    elif table.columns.classes:
        losses = nn.functional.cross_entropy(output, part.y, reduction="none")
    else:
        losses = (output - part.y) ** 2
    weight = part.w
    if of_class is not None:
        weight = weight * torch.tensor(balanced(table) if of_class == "balanced" else of_class)[part.y]
    return output, losses * weight, weight


def plain_steps(table: Table, job: TrainJob, groups: Groups = nn.Module.parameters) -> Iterator[Step]:
    """Yields every step of one process over the batches of a job, with torch's own clipping, schedules and average."""
    config, recipe = job.config, job.recipe
    torch.manual_seed(config.seed)
    module: Any = recipe.module(**recipe.module_params)  # type: ignore[operator]
    scaling = config.batch_size / (config.reference_batch_size or config.batch_size)
    kind = getattr(torch.optim, str(recipe.optimizer))
    optimizer = kind(groups(module), lr=recipe.learning_rate * scaling, **recipe.optimizer_params)
    averaged: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay or 0.5))  # type: ignore[no-untyped-call]
    steps = math.ceil(len(split_rows(table)[0]) / config.batch_size)
    schedule = _schedule(recipe, optimizer, config.epochs * (steps if config.schedule_interval == "step" else 1))
    by_step = config.schedule_interval == "step" and not isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
    sums = np.zeros(2)
    for number, (epoch, part) in enumerate(global_batches(table, config), start=1):
        optimizer.zero_grad()
        _, losses, weights = weighed(table, job, module.train(), part)
        loss, weight = losses.sum(), float(weights.double().sum())
        (loss / weights.sum()).backward()
        gradients = [parameter.grad.to_dense() for parameter in module.parameters() if parameter.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        skipped = config.non_finite == "skip" and not (loss.isfinite() and math.isfinite(norm))
        rate = optimizer.param_groups[0]["lr"]
        if not skipped:
            _clip(module, config)
            warmth = min(1.0, number / config.warmup_steps) if config.warmup_steps else 1.0
            _step(optimizer, 1 / scaling + (1 - 1 / scaling) * warmth)
            averaged.update_parameters(module)
            sums += [loss.item(), weight]
        last = number % steps == 0
        if by_step:
            schedule.step()
        elif last and isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(sums[0] / sums[1])
        elif last and schedule is not None:
            schedule.step()
        sums = np.zeros(2) if last else sums
        average = averaged.module if config.ema_decay else module
        yield Step(epoch, loss.item(), weight, norm, rate, skipped, module, average)


def plain_training(
    table: Table, job: TrainJob, groups: Groups = nn.Module.parameters
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Returns the weights that one process returns, and what it records of each epoch."""
    found: dict[int, list[Step]] = {}
    history: list[dict[str, Any]] = []
    steps = plain_steps(table, job, groups)
    per_epoch = math.ceil(len(split_rows(table)[0]) / job.config.batch_size)
    for step in steps:
        taken = found.setdefault(step.epoch, [])
        taken.append(step)
        if len(taken) == per_epoch:
            record = {} if job.config.schedule_interval == "step" else {"learning_rate": step.rate}
            history.append(record | _losses(taken) | validated(table, job, step.average))
    state = {**step.module.state_dict(), **dict(step.average.named_parameters())}
    return {name: value.detach() for name, value in state.items()}, history


def validated(table: Table, job: TrainJob, module: nn.Module) -> dict[str, float]:
    """Returns the loss of the validation rows, and their accuracy if they have classes."""
    part = validation_rows(table)
    if not len(part.x):
        return {}
    with torch.no_grad():
        output, losses, weights = weighed(table, job, module.eval(), part)
    found = {"val_loss": float(losses.sum() / weights.sum())}
    if table.columns.classes:
        found["val_accuracy"] = float(((output.argmax(1) == part.y) * part.w).sum() / part.w.sum())
    return found


def _losses(steps: Sequence[Step]) -> dict[str, Any]:
    counted = [step for step in steps if not step.skipped]
    skipped = {"skipped_steps": len(steps) - len(counted)} if len(counted) < len(steps) else {}
    return {"loss": sum(step.loss for step in counted) / sum(step.weight for step in counted), **skipped}


def _schedule(recipe: Recipe, optimizer: Any, length: int) -> Any:
    if recipe.scheduler is None:
        return None
    params = {"T_max": length} if recipe.scheduler == "CosineAnnealingLR" else {}
    return getattr(lr_scheduler, str(recipe.scheduler))(optimizer, **{**params, **recipe.scheduler_params})


def _clip(module: nn.Module, config: TrainConfig) -> None:
    if config.clip_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), config.clip_value)
    if config.clip_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), config.clip_norm)


def _step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Takes a step with every learning rate multiplied."""
    scheduled = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
        group["lr"] = rate
