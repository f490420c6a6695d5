"""The training loop: the same code for one rank and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparktorch.config import TrainConfig
from sparktorch.train.finite import LossWatch, all_finite
from sparktorch.train.group import sum_over_ranks
from sparktorch.train.recipe import Recipe
from sparktorch.train.schedule import Schedule
from sparktorch.train.step import BatchLike, Means, Metrics, full_precision, micro_batches
from sparktorch.train.strategy import build_strategy
from sparktorch.train.task import align, autocast, correct, first_rows, predicted
from sparktorch.world import World

__all__ = ["Outcome", "Reporter", "ShardLike", "train"]

_REPORT_SECONDS = 0.2
_EVALUATION_ROWS = 4096
_MOST_CLASSES = 100  # of a confusion matrix


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
        confusion: Validation rows by class (row) and predicted class (column), of these weights;
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
    steps: int,
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
        steps: Number of steps in an epoch.
        has_validation: Whether any rank has validation rows, the same on every rank.
        classes: Number of classes the labels index, `None` when labels are not classes.
    """
    training = _Training(shard, recipe, config, world, reporter, steps)
    history: list[dict[str, Any]] = []
    confusion: torch.Tensor | None = None
    for epoch in range(config.epochs):
        reporter.enter("training", epoch=epoch + 1, step=0)
        record = training.epoch(epoch)
        last = epoch + 1 == config.epochs
        if has_validation and (last or (epoch + 1) % config.validation_interval == 0):
            reporter.enter("validating", epoch=epoch + 1)
            metrics, counts = training.validate(classes)
            record |= metrics
            if config.patience is None or training.improves(metrics["val_loss"]):
                confusion = counts
        training.schedule.epoch_done(record, validated=has_validation)
        history.append(record)
        if world.is_main:
            reporter.epoch_done(epoch + 1, record)
        # Every rank has the same losses, and stops at the same epoch.
        if config.patience is not None and training.without_progress >= config.patience:
            break
    reporter.enter("finishing")
    return Outcome(training.state_dict(), history, None if confusion is None else confusion.tolist())


class _Training:
    """A module with all that trains it, in one rank."""

    def __init__(
        self,
        shard: ShardLike,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        reporter: Reporter,
        steps: int,
    ) -> None:
        self._shard, self._config, self._world, self._reporter = shard, config, world, reporter
        device = torch.device(world.device)
        self._strategy = build_strategy(config, world)
        plain = recipe.build_module(config.seed).to(device)
        self._module = self._strategy.prepare(plain)
        self._optimizer = self._strategy.optimizer(recipe, plain)
        self._training_step = recipe.build_training_step()
        self._loss = None if self._training_step else recipe.build_loss().to(world.device)
        self._watch = LossWatch(world) if config.non_finite == "error" else None
        self._means = Means()  # of the training step's metrics in an epoch
        self._skipped = 0  # steps of the epoch that were left out
        self.schedule = Schedule(recipe, config, self._optimizer, steps)
        self._autocast = autocast(device, config.precision)
        # Small gradients of float16 vanish unless the loss is scaled up; bfloat16 reaches as far as float32.
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        # A rank joins every all-reduce, with a row of weight zero where it has none; batch
        # normalisation in training refuses a single row.
        normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in plain.modules())
        self._least = 2 if normalised else 1
        self._best_loss = math.inf
        self._best: dict[str, torch.Tensor] = {}
        self.without_progress = 0  # validations since the best one
        # Same initial weights everywhere; from here on, dropout and the like differ by rank.
        torch.manual_seed(config.seed + world.rank + 1)

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Trains one epoch and returns its record, the same on every rank but for the seconds."""
        started = time.perf_counter()
        self._means, self._skipped = Means(), 0
        weights = sum_over_ranks(self._shard.step_weights(epoch), self._world)
        totals = self._steps(epoch, weights)
        seconds = time.perf_counter() - started
        loss_sum, rows, waited = sum_over_ranks(totals, self._world).tolist()
        record = {
            "epoch": epoch + 1,
            "loss": loss_sum / max(float(weights.sum()), torch.finfo(torch.float64).tiny),
            "learning_rate": self.schedule.learning_rate,
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "data_wait_share": waited / (seconds * self._world.world_size),
        }
        if self._training_step is not None:
            means = self._means.over_ranks(self._world)
            record |= {f"train_{name}": mean for name, mean in means.items()}
        if self._config.non_finite == "skip":
            record["skipped_steps"] = self._skipped
            if self._skipped == len(weights):
                record["loss"] = math.nan
        return record

    def _steps(self, epoch: int, weights: torch.Tensor) -> torch.Tensor:
        """Runs the steps of an epoch; returns this rank's loss sum, row count and seconds waited for data.

        Args:
            epoch: Number of the epoch, from 0.
            weights: The weight of every step over all ranks; that of steps that are left out becomes 0.
        """
        self._module.train()
        divisor = self._strategy.gradient_divisor
        scales = [divisor / weight if weight > 0 else 0.0 for weight in weights.tolist()]
        losses = torch.zeros(len(scales), dtype=torch.float64, device=self._world.device)
        rows, waited = 0, 0.0
        batches = self._shard.epoch(epoch, least=self._least)
        next_report = 0.0
        for step, scale in enumerate(scales):
            self._reporter.at_step(step + 1)
            asked = time.perf_counter()
            batch = next(batches)
            now = time.perf_counter()
            waited += now - asked

            batch_loss = self._step(batch, scale)

            rows += batch.rows
            if batch_loss is None:
                weights[step] = 0
                self._skipped += 1
            else:
                losses[step] = batch_loss
            if self._watch is not None:
                self._watch.look_back(losses, step + 1)
            if (
                batch_loss is not None and now >= next_report
            ):  # reading the loss waits for the device: a few times a second only
                next_report = now + _REPORT_SECONDS
                if self._world.is_main:
                    mean = batch_loss.item() * scale / divisor * self._world.world_size
                    place = {"epoch": epoch + 1, "epochs": self._config.epochs, "step": step + 1, "steps": len(scales)}
                    self._reporter.progress(**place, loss=mean)
        return torch.tensor([float(losses.sum()), rows, waited], dtype=torch.float64)

    def _step(self, batch: BatchLike, scale: float) -> torch.Tensor | None:
        """Takes one optimizer step.

        Returns:
            The sum of this rank's weighted losses, a scalar tensor; `None` if the step was left out on all ranks.
        """
        self._optimizer.zero_grad()
        skips = self._config.non_finite == "skip"
        buffers = [buffer.clone() for buffer in self._module.buffers()] if skips else []
        *first, last = micro_batches(batch, self._config, least=self._least)
        parts = []
        for part in first:  # gradients add up in the rank; the last part's backward sends the sum
            with self._strategy.no_sync(self._module):
                parts.append(self._backward(part, scale))
        parts.append(self._backward(last, scale))
        losses, metrics = zip(*parts, strict=True)
        loss_sum: torch.Tensor = sum(losses[1:], losses[0])
        self._strategy.before_step(self._module)
        if skips and not all_finite(loss_sum, self._module, self._world):
            self._skip(buffers)
            return None
        for sums in metrics:
            self._means.add(sums)
        if self._config.clip_norm or self._config.clip_value:
            self._scaler.unscale_(self._optimizer)
            self._strategy.clip_gradients(self._module, norm=self._config.clip_norm, value=self._config.clip_value)
        self.schedule.step(self._take_step)
        self._strategy.after_step(self._module)
        return loss_sum

    def _backward(self, batch: BatchLike, scale: float) -> tuple[torch.Tensor, Metrics]:
        """Adds the gradients of a batch to those that are there; returns its loss sum and metrics."""
        loss, metrics = self._losses(self._module, batch)
        if self._watch is not None:
            self._watch.check(loss)
        self._scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), metrics

    def _take_step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _skip(self, buffers: list[torch.Tensor]) -> None:
        """Leaves out a step, which counts in the schedule nevertheless, and puts the buffers back."""
        for buffer, before in zip(self._module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if self._scaler.is_enabled():  # it may have scaled too far
            self._scaler.unscale_(self._optimizer)
            self._scaler.update()
        self.schedule.step(lambda: None)

    def _losses(self, module: nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Metrics]:
        """Returns the sum of the weighted losses of a batch, and the sums of the training step's metrics."""
        if self._training_step is not None:
            with self._autocast:
                return self._training_step(module, batch)
        assert self._loss is not None
        output = self._forward(module, batch)
        if 0 < batch.rows < self._least:  # filled up for the module's sake alone
            output = first_rows(output, batch.rows)
        output, label = align(self._config.task, output, batch.label)
        return self._loss(output, label, batch.loss_weight), {}

    def _forward(self, module: nn.Module, batch: BatchLike) -> Any:
        with self._autocast:
            output = module(*batch.inputs)
        return output if self._config.precision == "fp32" else full_precision(output)

    @torch.no_grad()
    def validate(self, classes: int | None) -> tuple[dict[str, float], torch.Tensor | None]:
        """Evaluates the validation rows of all ranks; sums, not means, travel between them.

        Args:
            classes: Number of classes the labels index, `None` when labels are not classes.

        Returns:
            The metrics, and the confusion matrix, int64 of shape `(classes, classes)`.
        """
        task = self._config.task
        totals = torch.zeros(4, dtype=torch.float64)
        means = Means()
        shown = classes if classes is not None and classes <= _MOST_CLASSES else 0
        counts = torch.zeros(shown**2, dtype=torch.float64)
        with self._strategy.evaluating(self._module) as module:
            module.eval()
            for batch in self._shard.validation(_EVALUATION_ROWS):
                output, label = align(task, self._forward(module, batch), batch.label)
                weight = torch.ones(batch.rows, device=self._world.device) if batch.weight is None else batch.weight
                if self._loss is not None:
                    totals[0] += float(self._loss(output, label, batch.loss_weight))
                else:
                    loss, sums = self._losses(module, batch)
                    totals[0] += float(loss)
                    means.add(sums)
                totals[1] += float(weight.sum() if batch.loss_weight is None else batch.loss_weight.sum())
                totals[2] += float(weight.sum())
                if task == "classification" and label is not None:
                    totals[3] += float((correct(output, label) * weight).sum())
                    if shown:
                        cells = label.long() * shown + predicted(output, label)
                        counts += torch.bincount(cells, minlength=len(counts)).cpu()
        summed = sum_over_ranks(torch.cat([totals, counts]), self._world)
        loss_sum, loss_weight_sum, weight_sum, right = summed[:4].tolist()
        metrics = {}
        if self._training_step is not None:
            metrics = {f"val_{name}": mean for name, mean in means.over_ranks(self._world).items()}
        metrics["val_loss"] = loss_sum / loss_weight_sum if loss_weight_sum else float("nan")
        if task == "classification":
            metrics["val_accuracy"] = right / weight_sum if weight_sum else float("nan")
        return metrics, summed[4:].long().view(shown, shown) if shown else None

    def improves(self, loss: float) -> bool:
        """Returns whether a validation loss is the smallest so far, and keeps the weights if it is."""
        if not loss < self._best_loss:
            self.without_progress += 1
            return False
        self.without_progress = 0
        self._best_loss = loss
        state = self._strategy.state_dict(self._module)
        if self._world.is_main:  # whose state it is that becomes the model's
            self._best = {name: value.clone() for name, value in state.items()}
        return True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on the CPU: of the best validation if that was looked for, or the last."""
        return self._best or self._strategy.state_dict(self._module)
