"""The training loop: the same code for one rank and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sparktorch.base.batch import Batch, RankDataset
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.process_group import max_over_ranks, sum_over_ranks
from sparktorch.errors import ColumnError
from sparktorch.train.callbacks import Callbacks, FitContext
from sparktorch.train.checkpoint.checkpointer import Checkpointer, Position
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest
from sparktorch.train.engine import Engine
from sparktorch.train.numerics.determinism import reproducible, seed_all
from sparktorch.train.numerics.ema import MovingAverage
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.progress import Progress
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.training_state import TrainingState
from sparktorch.train.validation import Validation

__all__ = ["Outcome", "train"]

_REPORT_SECONDS = 0.2
_NORM_STEPS = 32  # from one gradient whose norm takes a pass of its own to the next


@dataclass(frozen=True)
class Outcome:
    """What a rank brings back from training.

    Attributes:
        state: The whole model's state on the CPU.
        history: One record per epoch: loss, validation metrics, throughput, times in seconds.
        confusion: Validation rows by class (row) and predicted class (column), of these weights;
            `None` without validation rows or classes, or with too many classes.
        data_wait_share: What part of the training's time this rank waited for rows, since it was started last.
    """

    state: dict[str, torch.Tensor]
    history: list[dict[str, Any]]
    confusion: list[list[int]] | None = None
    data_wait_share: float = 0.0


def train(
    shard: RankDataset,
    recipe: Recipe,
    config: TrainConfig,
    world: World,
    reporter: Client,
    *,
    steps: int,
    validation_rows: int,
    classes: int | None = None,
    saver: Checkpointer | None = None,
) -> Outcome:
    """Trains a model on the shards of all ranks.

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
        saver: Saves checkpoints, and knows the one to go on from; `None` for neither.
    """
    with reproducible(config, torch.device(world.device)), explained(config):
        return _Training(shard, recipe, config, world, reporter, steps, validation_rows, classes or 0, saver).run()


class _Training:
    """The course of a training, in one rank."""

    def __init__(
        self,
        shard: RankDataset,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        reporter: Client,
        steps: int,
        validation_rows: int,
        classes: int,
        saver: Checkpointer | None,
    ) -> None:
        self._shard, self._config, self._world, self._reporter = shard, config, world, reporter
        self._steps, self._saver, self._device = steps, saver, torch.device(world.device)
        self._engine = engine = Engine(recipe, config, world, steps=steps)
        self._average: MovingAverage | None = None
        if config.ema_decay is not None:
            self._average = MovingAverage(engine.module.parameters(), config.ema_decay)
        self._context = FitContext(engine.plain, engine.optimizer, world)
        self._callbacks = Callbacks(recipe.callbacks, self._context)
        self._validation: Validation | None = None
        if validation_rows:
            self._validation = Validation(
                shard, engine, recipe, config, world, reporter, rows=validation_rows, classes=classes
            )
        self._progress = Progress(steps, config.patience, self._device)
        self._saved = TrainingState(config, world, engine, self._average, self._callbacks, self._progress)
        self._waited, self._seconds = 0.0, 0.0
        self._first_epoch = 0
        # Same initial weights everywhere; from here on, dropout and the like differ by rank.
        seed_all(config.seed + world.rank + 1)

    def run(self) -> Outcome:
        """Trains all epochs, or as many as early stopping and callbacks let it."""
        self._callbacks.call("on_fit_start")
        if self._saver is not None:
            with closing(self._shard.epoch(0, least=self._engine.least)) as batches:
                self._engine.settle(next(batches))
            self._saved.check()  # now, and not hours later
            if self._saver.start is not None:
                self._go_on(self._saver.store, self._saver.start)
        epoch, progress = self._first_epoch, self._progress
        while epoch < self._config.epochs and not progress.ended:
            self._epoch(epoch)
            epoch += 1
            self._save(Position(self._context.step, epoch))
        self._callbacks.call("on_fit_end")
        if self._saver is not None:
            self._reporter.enter("saving")
            self._saver.close(Position(self._context.step, epoch))
        self._reporter.enter("finishing")
        confusion = None if progress.confusion is None else progress.confusion.tolist()
        state = self._state(copy=False) if progress.best.state is None else progress.best.state
        return Outcome(state, progress.history, confusion, self._waited / max(self._seconds, 1e-9))

    def _go_on(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Goes on from a checkpoint, which another number of ranks may have written."""
        self._saved.load(store, manifest)
        self._context.step, self._first_epoch = manifest.step, manifest.epoch
        if self._world.is_main:
            for record in self._progress.history:  # the driver may be another one
                self._reporter.epoch_done(record["epoch"], record)

    def _epoch(self, epoch: int) -> None:
        """Trains what is left of an epoch, validates, and decides whether it was the last."""
        config, progress = self._config, self._progress
        self._reporter.enter("training", epoch=epoch + 1, step=progress.tally.taken)
        record = self._train(epoch)
        last = epoch + 1 == config.epochs
        by_epoch = config.validation_unit == "epoch" and (epoch + 1) % config.validation_interval == 0
        if last or by_epoch:
            self._validate()
        self._note_validations(record)
        self._engine.schedule.epoch_done(record, validated=self._validation is not None)
        self._callbacks.add_to(record)
        # Every rank has the same losses and hears of every request, and stops at the same epoch.
        asked = self._callbacks.ask_to_stop()
        if asked:
            self._validate()
            self._note_validations(record)
        progress.end_epoch(record)
        if self._world.is_main:
            self._reporter.epoch_done(epoch + 1, record)
        progress.ended = asked or progress.best.out_of_patience

    def _train(self, epoch: int) -> dict[str, Any]:
        """Takes the steps of an epoch that are left; returns its record, the same on every rank but for the seconds."""
        tally, context, engine = self._progress.tally, self._context, self._engine
        started = time.perf_counter() - tally.seconds
        context.epoch = epoch + 1
        if not tally.taken:
            engine.means.clear()
            self._callbacks.call("on_epoch_start")
        weights = sum_over_ranks(self._shard.step_weights(epoch), self._world)
        if not weights.any():
            raise ColumnError("all rows have the weight 0", hint="see weightCol and classWeights")
        waited, entered = tally.waited, time.perf_counter() - tally.validating
        with closing(self._shard.epoch(epoch, least=engine.least, first=tally.taken)) as batches:
            self._take_steps(epoch, batches, weights, started)
        self._waited += tally.waited - waited
        self._seconds += time.perf_counter() - tally.validating - entered
        sums = sum_over_ranks(tally.sums(), self._world)
        norm = float(max_over_ranks(tally.largest_norm(), self._world))
        # Of the slowest rank: others need not keep pace with it.
        seconds = time.perf_counter() - started - tally.validating
        rate, ranks = engine.schedule.learning_rate, self._world.world_size
        record = self._progress.record(
            sums, weights, seconds, ranks, number=epoch + 1, learning_rate=rate, largest_norm=norm
        )
        if self._config.validation_unit == "step":
            record["steps"] = tally.taken
        if engine.training_step is not None:
            record |= {f"train_{name}": mean for name, mean in engine.means.over_ranks(self._world).items()}
        if self._config.non_finite == "skip":
            record["skipped_steps"] = len(tally.skipped)
            if len(tally.skipped) == tally.taken:
                record["loss"] = math.nan
        return record | engine.strategy.metrics()

    def _take_steps(self, epoch: int, batches: Iterator[Batch], weights: torch.Tensor, started: float) -> None:
        """Takes the steps of an epoch that are left.

        Args:
            epoch: Number of the epoch, from 0.
            batches: This rank's part of each.
            weights: The weight of every step over all ranks.
            started: When the epoch began.
        """
        engine, config, context, tally = self._engine, self._config, self._context, self._progress.tally
        engine.module.train()
        interval = config.validation_interval if config.validation_unit == "step" else 0
        divisor = engine.strategy.gradient_divisor
        scales = [divisor / weight if weight > 0 else 0.0 for weight in weights.tolist()]
        parts = self._parts(epoch)
        next_report = 0.0
        for step in range(tally.taken, len(scales)):
            self._reporter.at_step(step + 1)
            asked = time.perf_counter()
            batch = next(batches)
            now = time.perf_counter()
            tally.waited += now - asked

            measured = context.step % _NORM_STEPS == 0 or step + 1 == len(scales)
            loss = engine.step(batch, scales[step], parts[step], measured=measured)
            tally.places += engine.padding[0]
            tally.elements += engine.padding[1]

            self._count(step, batch.rows, loss)
            # Reading the loss waits for the device: a few times a second only.
            if now >= next_report and loss is not None:
                next_report = now + _REPORT_SECONDS
                if self._world.is_main:
                    mean = loss.item() * scales[step] / divisor * self._world.world_size
                    place = {"epoch": epoch + 1, "epochs": config.epochs, "step": step + 1, "steps": len(scales)}
                    self._reporter.progress(**place, loss=mean)
            if self._callbacks.watch_steps:
                self._callbacks.call("on_step_end")
            if interval and context.step % interval == 0:
                self._look_back(now=True)
                tally.losses.sum().item()  # waits for the device: what it has still to do is not validation
                self._validate()
                if self._progress.best.out_of_patience:
                    break
                self._reporter.enter("training", epoch=epoch + 1, step=step + 1)
                engine.module.train()
            if self._saver is not None and tally.taken < len(scales):  # after the last one comes the epoch's end
                tally.seconds = time.perf_counter() - started
                self._save(Position(context.step, epoch, tally.taken))

    def _count(self, step: int, rows: int, loss: torch.Tensor | None) -> None:
        """Adds a step to what is known of the epoch."""
        tally = self._progress.tally
        self._context.step += 1
        tally.taken += 1
        tally.rows += rows
        if loss is None:  # the weights are what they were
            tally.skipped.append(step)
            return
        tally.losses[step] = loss
        if tally.norms is not None and self._engine.gradient_norm is not None:
            tally.norms[step] = self._engine.gradient_norm
        self._look_back()
        if self._average is not None:
            self._average.update()

    def _look_back(self, *, now: bool = False) -> None:
        """Stops the training if a loss was not finite; `now` before something is made of the weights."""
        tally = self._progress.tally
        if self._engine.watch is not None and tally.taken:
            self._engine.watch.look_back(tally.losses, tally.taken, now=now)

    def _parts(self, epoch: int) -> list[int]:
        """Returns the number of micro-batches of each step."""
        size, count, least = self._config.micro_batch_size, self._config.accumulation_steps, self._engine.least
        if size is None and count == 1:
            return [1] * self._steps
        rows = self._shard.step_rows(epoch)
        parts = torch.full_like(rows, count) if size is None else -(-rows // size)
        parts = parts.minimum(rows // least).clamp(min=1)
        if self._engine.strategy.collective_forward:
            parts = max_over_ranks(parts, self._world)
        return parts.tolist()

    def _validate(self) -> None:
        """Validates, unless that has been done after this very step, and keeps what is best."""
        progress = self._progress
        if self._validation is None or progress.validated_step == self._context.step:
            return
        started = time.perf_counter()
        progress.validated_step = self._context.step
        self._reporter.enter("validating", epoch=self._context.epoch)
        with self._averaged(), self._engine.strategy.evaluating(self._engine.module) as module:
            metrics, counts = self._validation.run(module)
        progress.tally.validations.append({"step": self._context.step, **metrics})
        if progress.best.offer(metrics["val_loss"], self._state):
            progress.confusion = counts
        self._callbacks.call("on_validation_end", dict(metrics))  # a copy, for it decides the same in every rank
        progress.tally.validating += time.perf_counter() - started

    def _note_validations(self, record: dict[str, Any]) -> None:
        """Adds the epoch's last validation to its record, and all of them where they go by step."""
        validations = self._progress.tally.validations
        if validations:
            record |= {name: value for name, value in validations[-1].items() if name != "step"}
        if self._validation is not None and self._config.validation_unit == "step":
            record["validations"] = validations

    def _state(self, *, copy: bool = True) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on the CPU, a copy of it where the module will have other weights."""
        with self._averaged():
            return self._engine.strategy.state_dict(self._engine.module, copy=copy or self._average is not None)

    def _averaged(self) -> AbstractContextManager[None]:
        """A block in which the module has the weights that training would now return."""
        return nullcontext() if self._average is None else self._average.swapped_in()

    def _save(self, position: Position) -> None:
        """Saves a checkpoint, if one is due."""
        if self._saver is None or not self._saver.due(position):
            return
        self._look_back(now=True)
        self._saver.save(position, self._saved.share(), self._progress.last_validation().get("val_loss"))
