"""The training loop: the same code for one rank and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sparktorch.config import TrainConfig
from sparktorch.train.batchnorm import Presence, has_batch_norm, synchronise
from sparktorch.train.callbacks import Callbacks, FitContext
from sparktorch.train.ema import MovingAverage
from sparktorch.train.explain import explained
from sparktorch.train.group import max_over_ranks, sum_over_ranks
from sparktorch.train.layout import channels_last
from sparktorch.train.metrics import Metrics
from sparktorch.train.recipe import Recipe
from sparktorch.train.reproducible import reproducible, seed_all
from sparktorch.train.schedule import Schedule
from sparktorch.train.step import BatchLike, Means
from sparktorch.train.stepper import Stepper
from sparktorch.train.strategy import build_strategy
from sparktorch.train.validation import Best, Validation
from sparktorch.world import World

__all__ = ["Outcome", "Reporter", "ShardLike", "train"]

_REPORT_SECONDS = 0.2


class ShardLike(Protocol):
    """What the loop asks of a rank's rows; see `sparktorch.data.shard.Shard`."""

    def epoch(self, epoch: int, *, least: int) -> Iterator[BatchLike]:
        """Yields this rank's part of every global batch, its inputs filled up to `least` rows."""
        ...

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step, float64 of shape `(steps,)`."""
        ...

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns this rank's number of rows in each step, int64 of shape `(steps,)`."""
        ...

    def validation(self, size: int, *, batches: int = 0) -> Iterator[BatchLike]:
        """Yields this rank's validation rows in batches of that size, at least so many."""
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
    validation_rows: int,
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
        validation_rows: The most validation rows of any rank; without any, nothing is validated.
        classes: Number of classes the labels index, `None` when labels are not classes.
    """
    with reproducible(config, torch.device(world.device)), explained(config):
        training = _Training(shard, recipe, config, world, reporter, steps, validation_rows, classes)
        return training.run()


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
        validation_rows: int,
        classes: int | None,
    ) -> None:
        self._shard, self._config, self._world, self._reporter = shard, config, world, reporter
        device = torch.device(world.device)
        self._strategy = build_strategy(config, world)
        plain = recipe.build_module(config.seed).to(device)
        # A rank joins every all-reduce, with a row of weight zero where it has none; batch
        # normalisation in training refuses a single row, unless it looks at those of all ranks.
        self._least = 2 if has_batch_norm(plain) else 1
        self._presence: Presence | None = None
        if config.sync_batch_norm and world.world_size > 1:
            self._presence, self._least = Presence(), 1
            synchronise(plain, self._presence, compiled=config.compile)
        if config.channels_last:
            channels_last(plain)
        if config.compile:
            plain.compile()
        self._module = self._strategy.prepare(plain)
        self._optimizer = self._strategy.optimizer(recipe, plain)
        self._schedule = Schedule(recipe, config, self._optimizer, steps)
        self._stepper = Stepper(
            recipe,
            config,
            world,
            strategy=self._strategy,
            module=self._module,
            optimizer=self._optimizer,
            schedule=self._schedule,
            least=self._least,
        )
        self._skipped = 0  # steps of this epoch that were left out
        self._average: MovingAverage | None = None
        if config.ema_decay is not None:
            self._average = MovingAverage(self._module.parameters(), config.ema_decay)
        self._context = FitContext(self._strategy.plain(self._module), self._optimizer, world)
        self._callbacks = Callbacks(recipe.callbacks, self._context)
        self._validation: Validation | None = None
        if validation_rows:
            metrics = Metrics(recipe.metrics, config.task, world.device)
            self._validation = Validation(
                shard,
                config,
                world,
                forward=self._stepper.forward,
                loss=self._stepper.loss,
                step=self._stepper.call_step,
                metrics=metrics,
                classes=classes,
                in_step_for=validation_rows if self._strategy.collective_forward else 0,
            )
        self._validations: list[dict[str, Any]] = []  # of this epoch, by step
        self._validating = 0.0  # seconds of this epoch
        self._validated_step = 0
        self._confusion: torch.Tensor | None = None
        self._best = Best(config.patience)
        # Same initial weights everywhere; from here on, dropout and the like differ by rank.
        seed_all(config.seed + world.rank + 1)

    def run(self) -> Outcome:
        """Trains all epochs, or as many as early stopping and callbacks let it."""
        config, history = self._config, []
        self._callbacks.call("on_fit_start")
        for epoch in range(config.epochs):
            self._reporter.enter("training", epoch=epoch + 1, step=0)
            record = self._epoch(epoch)
            last = epoch + 1 == config.epochs
            by_epoch = config.validation_unit == "epoch" and (epoch + 1) % config.validation_interval == 0
            if last or by_epoch:
                self._validate()
            self._note_validations(record)
            self._schedule.epoch_done(record, validated=self._validation is not None)
            self._callbacks.add_to(record)
            # Every rank has the same losses and hears of every request, and stops at the same epoch.
            asked = self._callbacks.ask_to_stop()
            if asked:
                self._validate()
                self._note_validations(record)
            history.append(record)
            if self._world.is_main:
                self._reporter.epoch_done(epoch + 1, record)
            if asked or self._best.out_of_patience:
                break
        self._callbacks.call("on_fit_end")
        self._reporter.enter("finishing")
        confusion = None if self._confusion is None else self._confusion.tolist()
        return Outcome(self._best.state or self._state(), history, confusion)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        """Trains one epoch and returns its record, the same on every rank but for the seconds."""
        started = time.perf_counter()
        self._validations, self._validating = [], 0.0
        self._stepper.means, self._skipped = Means(), 0
        self._context.epoch = epoch + 1
        self._callbacks.call("on_epoch_start")
        first = self._context.step
        weights = sum_over_ranks(self._shard.step_weights(epoch), self._world)
        totals = self._steps(epoch, weights)
        seconds = time.perf_counter() - started - self._validating
        loss_sum, rows, waited = sum_over_ranks(totals, self._world).tolist()
        taken = self._context.step - first
        record = {
            "epoch": epoch + 1,
            "loss": loss_sum / max(float(weights[:taken].sum()), torch.finfo(torch.float64).tiny),
            "learning_rate": self._schedule.learning_rate,
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "data_wait_share": waited / (seconds * self._world.world_size),
        }
        if self._stepper.training_step is not None:
            means = self._stepper.means.over_ranks(self._world)
            record |= {f"train_{name}": mean for name, mean in means.items()}
        if self._config.non_finite == "skip":
            record["skipped_steps"] = self._skipped
            if self._skipped == taken:
                record["loss"] = math.nan
        return record if self._config.validation_unit == "epoch" else {**record, "steps": taken}

    def _steps(self, epoch: int, weights: torch.Tensor) -> torch.Tensor:
        """Runs the steps of an epoch; returns this rank's loss sum, row count and seconds waited for data.

        Args:
            epoch: Number of the epoch, from 0.
            weights: The weight of every step over all ranks; that of steps that are left out becomes 0.
        """
        self._module.train()
        config, context = self._config, self._context
        interval = config.validation_interval if config.validation_unit == "step" else 0
        divisor = self._strategy.gradient_divisor
        scales = [divisor / weight if weight > 0 else 0.0 for weight in weights.tolist()]
        losses = torch.zeros(len(scales), dtype=torch.float64, device=self._world.device)
        rows, waited = 0, 0.0
        batches = self._shard.epoch(epoch, least=self._least)
        next_report = 0.0
        parts = self._parts(epoch, len(scales))
        for step, scale in enumerate(scales):
            self._reporter.at_step(step + 1)
            asked = time.perf_counter()
            batch = next(batches)
            now = time.perf_counter()
            waited += now - asked
            if self._presence is not None:
                self._presence.rows = batch.rows > 0

            batch_loss = self._stepper.take(batch, scale, parts[step])

            rows += batch.rows
            context.step += 1
            validates = interval > 0 and context.step % interval == 0
            if batch_loss is None:
                weights[step] = 0
                self._skipped += 1
            else:
                losses[step] = batch_loss
                self._taken(losses, step, validates)
            # Reading the loss waits for the device: a few times a second only.
            if batch_loss is not None and now >= next_report:
                next_report = now + _REPORT_SECONDS
                if self._world.is_main:
                    mean = batch_loss.item() * scale / divisor * self._world.world_size
                    place = {"epoch": epoch + 1, "epochs": config.epochs, "step": step + 1, "steps": len(scales)}
                    self._reporter.progress(**place, loss=mean)
            if self._callbacks.watch_steps:
                self._callbacks.call("on_step_end")
            if validates:
                losses[step].item()  # waits for the device: what it has still to do is not validation
                self._validate()
                if self._best.out_of_patience:
                    break
                self._reporter.enter("training", epoch=epoch + 1, step=step + 1)
                self._module.train()
        return torch.tensor([float(losses.sum()), rows, waited], dtype=torch.float64)

    def _taken(self, losses: torch.Tensor, step: int, validates: bool) -> None:
        """Looks at the losses of an epoch, and averages the weights, after a step that was not left out."""
        if self._stepper.watch is not None:
            self._stepper.watch.look_back(losses, step + 1, now=validates)
        if self._average is not None:
            self._average.update()

    def _parts(self, epoch: int, steps: int) -> list[int]:
        """Returns the number of micro-batches of each step."""
        size, count = self._config.micro_batch_size, self._config.accumulation_steps
        if size is None and count == 1:
            return [1] * steps
        rows = self._shard.step_rows(epoch)
        parts = torch.full_like(rows, count) if size is None else -(-rows // size)
        parts = parts.minimum(rows // self._least).clamp(min=1)
        if self._strategy.collective_forward:
            parts = max_over_ranks(parts, self._world)
        return parts.tolist()

    def _validate(self) -> None:
        """Validates, unless that has been done after this very step, and keeps what is best."""
        if self._validation is None or self._validated_step == self._context.step:
            return
        started = time.perf_counter()
        self._validated_step = self._context.step
        self._reporter.enter("validating", epoch=self._context.epoch)
        with self._averaged(), self._strategy.evaluating(self._module) as module:
            metrics, counts = self._validation.run(module)
        self._validations.append({"step": self._context.step, **metrics})
        if self._best.offer(metrics["val_loss"], self._copy_state):
            self._confusion = counts
        self._callbacks.call("on_validation_end", dict(metrics))  # a copy, for it decides the same in every rank
        self._validating += time.perf_counter() - started

    def _note_validations(self, record: dict[str, Any]) -> None:
        """Adds the epoch's last validation to its record, and all of them where they go by step."""
        if self._validations:
            record |= {name: value for name, value in self._validations[-1].items() if name != "step"}
        if self._validation is not None and self._config.validation_unit == "step":
            record["validations"] = self._validations

    def _state(self) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on the CPU."""
        with self._averaged():
            state = self._strategy.state_dict(self._module)
            return state if self._average is None else _copies(state)  # other weights will be in its place

    def _copy_state(self) -> dict[str, torch.Tensor]:
        state = self._state()
        return _copies(state) if self._world.is_main else {}  # whose state it is that becomes the model's

    def _averaged(self) -> AbstractContextManager[None]:
        """A block in which the module has the weights that training would now return."""
        return nullcontext() if self._average is None else self._average.swapped_in()


def _copies(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}
