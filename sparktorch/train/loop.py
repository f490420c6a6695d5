"""The training loop: the same code for one rank and for many."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparktorch.config import Task, TrainConfig
from sparktorch.train.group import sum_over_ranks
from sparktorch.train.recipe import Loss, Recipe
from sparktorch.train.strategy import build_strategy
from sparktorch.train.task import align, correct, first_rows, predicted
from sparktorch.world import World

__all__ = ["BatchLike", "Outcome", "Reporter", "ShardLike", "train"]

_REPORT_SECONDS = 0.2
_EVALUATION_ROWS = 4096
_MOST_CLASSES = 100  # of a confusion matrix


class BatchLike(Protocol):
    """One rank's part of a global batch; see `sparktorch.data.shard.Batch`."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Arguments of `forward`."""
        ...

    @property
    def label(self) -> torch.Tensor | None:
        """Labels."""
        ...

    @property
    def weight(self) -> torch.Tensor | None:
        """Sample weights; `None` means all ones."""
        ...

    @property
    def rows(self) -> int:
        """Number of real rows."""
        ...


class ShardLike(Protocol):
    """What the loop asks of a rank's rows; see `sparktorch.data.shard.Shard`."""

    def epoch(self, epoch: int, *, least: int) -> Iterator[BatchLike]:
        """Yields this rank's part of every global batch, its inputs filled up to `least` rows."""
        ...

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step, float64 of shape `(steps,)`."""
        ...

    def validation(self, size: int) -> Iterator[BatchLike]:
        """Yields this rank's validation rows."""
        ...


class Reporter(Protocol):
    """Where the loop says how far it is; see `sparktorch.train.link.Link`."""

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Says what the rank does now."""
        ...

    def at_step(self, step: int) -> None:
        """Notes the step the rank is at."""
        ...

    def progress(self, **record: Any) -> None:
        """Publishes how far the training is."""
        ...

    def epoch_done(self, number: int, record: dict[str, Any]) -> None:
        """Publishes the metrics of a finished epoch."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a rank brings back from training.

    Attributes:
        state: The whole model's state on the CPU.
        history: One record per epoch: loss, validation metrics, throughput, times in seconds.
        confusion: Validation rows by class (row) and predicted class (column) after the last epoch;
            `None` without validation rows or classes, or with too many classes.
    """

    state: dict[str, torch.Tensor]
    history: list[dict[str, Any]]
    confusion: list[list[int]] | None = None


def train(
    shard: ShardLike,
    recipe: Recipe,
    config: TrainConfig,
    world: World,
    reporter: Reporter,
    *,
    has_validation: bool,
    classes: int | None = None,
) -> Outcome:
    """Trains a new model on the shards of all ranks.

    The gradient of a step is that of the mean loss over the global batch, weighted by the sample
    weights: every rank sums the weighted losses of its rows and divides by the weight of the whole
    batch. A rank without rows in a step takes part with stand-in rows of weight zero, because its
    peers wait for it in the all-reduce.

    Args:
        shard: This rank's rows.
        recipe: What is trained.
        config: How it is trained.
        world: This rank's place; with more than one rank, the process group is open.
        reporter: Where progress goes.
        has_validation: Whether any rank has validation rows, the same on every rank.
        classes: Number of classes the labels index, `None` when labels are not classes.
    """
    device = torch.device(world.device)
    strategy = build_strategy(config, world)
    plain = recipe.build_module(config.seed).to(device)
    module = strategy.prepare(plain)
    optimizer = strategy.optimizer(recipe, plain)
    loss = recipe.build_loss().to(world.device)
    # Same initial weights everywhere; from here on, dropout and the like differ by rank.
    torch.manual_seed(config.seed + world.rank + 1)

    history: list[dict[str, Any]] = []
    confusion: torch.Tensor | None = None
    for epoch in range(config.epochs):
        reporter.enter("training", epoch=epoch + 1, step=0)
        started = time.perf_counter()
        weights = sum_over_ranks(shard.step_weights(epoch), world)
        totals = _train_epoch(
            module, optimizer, loss, shard, weights, epoch, config, strategy.gradient_divisor, world, reporter
        )
        seconds = time.perf_counter() - started
        loss_sum, rows, waited = sum_over_ranks(totals, world).tolist()
        record: dict[str, Any] = {
            "epoch": epoch + 1,
            "loss": loss_sum / max(float(weights.sum()), torch.finfo(torch.float64).tiny),
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "data_wait_share": waited / (seconds * world.world_size),
        }
        if has_validation:
            reporter.enter("validating", epoch=epoch + 1)
            metrics, confusion = _validate(module, loss, shard, config.task, classes, world)
            record |= metrics
        history.append(record)
        if world.is_main:
            reporter.epoch_done(epoch + 1, record)
    reporter.enter("finishing")
    return Outcome(strategy.state_dict(module), history, None if confusion is None else confusion.tolist())


def _train_epoch(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    shard: ShardLike,
    weights: torch.Tensor,
    epoch: int,
    config: TrainConfig,
    gradient_divisor: int,
    world: World,
    reporter: Reporter,
) -> torch.Tensor:
    """Runs one epoch; returns this rank's loss sum, row count and seconds waited for data."""
    module.train()
    scales = [gradient_divisor / weight if weight > 0 else 0.0 for weight in weights.tolist()]
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    rows, waited = 0, 0.0
    # A rank joins every all-reduce, with a row of weight zero where it has none; batch
    # normalisation in training refuses a single row.
    normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    least = 2 if normalised else 1
    batches = shard.epoch(epoch, least=least)
    next_report = 0.0
    for step, scale in enumerate(scales):
        reporter.at_step(step + 1)
        asked = time.perf_counter()
        batch = next(batches)
        now = time.perf_counter()
        waited += now - asked

        optimizer.zero_grad()
        output = module(*batch.inputs)
        if 0 < batch.rows < least:  # filled up for the module's sake alone
            output = first_rows(output, batch.rows)
        output, label = align(config.task, output, batch.label)
        batch_loss = loss(output, label, batch.weight)
        (batch_loss * scale).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        loss_sum += batch_loss.detach()
        rows += batch.rows
        if now >= next_report:  # reading the loss waits for the device: a few times a second only
            next_report = now + _REPORT_SECONDS
            if world.is_main:
                mean = batch_loss.item() * scale / gradient_divisor * world.world_size
                reporter.progress(epoch=epoch + 1, epochs=config.epochs, step=step + 1, steps=len(scales), loss=mean)
    return torch.tensor([float(loss_sum), rows, waited], dtype=torch.float64)


@torch.no_grad()
def _validate(
    module: nn.Module, loss: Loss, shard: ShardLike, task: Task, classes: int | None, world: World
) -> tuple[dict[str, float], torch.Tensor | None]:
    """Evaluates the validation rows of all ranks; sums, not means, travel between them.

    Returns:
        The metrics, and the confusion matrix, int64 of shape `(classes, classes)`.
    """
    # The wrapped module may synchronise buffers on forward, and ranks have unequal numbers of
    # validation batches: the plain one underneath stays silent.
    plain = getattr(module, "module", module)
    plain.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    shown = classes if classes is not None and classes <= _MOST_CLASSES else 0
    counts = torch.zeros(shown**2, dtype=torch.float64)
    for batch in shard.validation(_EVALUATION_ROWS):
        output, label = align(task, plain(*batch.inputs), batch.label)
        weight = torch.ones(batch.rows, device=world.device) if batch.weight is None else batch.weight
        totals[0] += float(loss(output, label, batch.weight))
        totals[1] += float(weight.sum())
        if task == "classification" and label is not None:
            totals[2] += float((correct(output, label) * weight).sum())
            if shown:
                cells = label.long() * shown + predicted(output, label)
                counts += torch.bincount(cells, minlength=len(counts)).cpu()
    summed = sum_over_ranks(torch.cat([totals, counts]), world)
    loss_sum, weight_sum, right = summed[:3].tolist()
    metrics = {"val_loss": loss_sum / weight_sum if weight_sum else float("nan")}
    if task == "classification":
        metrics["val_accuracy"] = right / weight_sum if weight_sum else float("nan")
    return metrics, summed[3:].long().view(shown, shown) if shown else None
