"""The training loop: `train` reads from top to bottom, the same for one rank and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch, RankDataset
from sparktorch.base.config import TrainConfig
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.process_group import max_over_ranks, sum_over_ranks
from sparktorch.train.callbacks import Callbacks, FitContext
from sparktorch.train.checkpoint.checkpointer import Checkpointer, Position
from sparktorch.train.loop.engine import Engine
from sparktorch.train.loop.model_folder import Weights
from sparktorch.train.loop.progress import Progress
from sparktorch.train.loop.shared_numbers import shared_numbers
from sparktorch.train.loop.training_state import TrainingState
from sparktorch.train.loop.validation import Validation, check_loss
from sparktorch.train.numerics.determinism import reproducible, seed_all
from sparktorch.train.numerics.torch_errors import explained
from sparktorch.train.recipe.loss import step_scales
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["Outcome", "train"]

_PROGRESS_SECONDS = 0.2
_NORM_STEPS = 32  # between measurements of the gradient norm that need an extra pass over the gradients


@dataclass(frozen=True)
class Outcome:
    """A rank's result of training.

    Attributes:
        state: The model's state dict on the CPU, without a frozen base; may be empty on ranks other than 0. Or the
            folder in which the ranks have written it.
        history: One record per epoch: loss, validation metrics, throughput, times in seconds.
        confusion: Confusion matrix of these weights: validation rows by class (row) and predicted class (column).
            `None` without validation rows or classes, or with too many classes.
        data_wait_share: Share of the training time since the last start that this rank waited for rows.
        out_of_time: Whether the training has ended because its minutes were over.
    """

    state: dict[str, torch.Tensor] | WeightsFolder
    history: list[dict[str, Any]]
    confusion: list[list[int]] | None = None
    data_wait_share: float = 0.0
    out_of_time: bool = False


def train(
    dataset: RankDataset,
    recipe: Recipe,
    config: TrainConfig,
    world: World,
    client: Client,
    *,
    steps: int,
    validation_rows: int,
    classes: int | None = None,
    checkpointer: Checkpointer | None = None,
) -> Outcome | None:
    """Trains a model on the rows of all ranks; with more than one, the process group is open.

    The gradient of a step is that of the mean loss over the global batch, weighted by the sample weights: every rank
    sums the weighted losses of its rows and divides by the weight of the whole batch. A rank without rows in a step
    takes part with placeholder rows of weight zero, because its peers wait for it in the all-reduce.

    With checkpoints, the driver may pause the training: then there is one of the last step, and no outcome. If that
    cannot be written, the training goes on.

    `steps` is the number of steps in an epoch, `validation_rows` are the most of any rank, 0 without validation, and
    `classes` is the number of those that labels index. The checkpointer knows the checkpoint to resume from.
    """
    with reproducible(config, torch.device(world.device)), explained(config):
        run = _Run(dataset, recipe, config, world, client, steps, validation_rows, classes or 0, checkpointer)
        engine, callbacks, progress = run.engine, run.callbacks, run.progress
        callbacks.call("on_fit_start")
        epoch = run.start()
        run.validate_untrained()
        while epoch < config.epochs and not (progress.ended or run.out_of_time):
            with run.begin(epoch) as (current, batches):
                for step, batch in batches:
                    loss = engine.step(batch, float(current.scales[step]), step, measured=run.measures(step))
                    run.count(step, batch.rows, loss)
                    run.show(current, step, loss)
                    del batch, loss  # no memory of theirs is held in validation, or after the epoch
                    engine.hooks.end_step(run.context.step)
                    callbacks.call("on_step_end")
                    if run.validates_now and run.validate_within(epoch, step):
                        break
                    if run.save_within(current):
                        return None
                    if run.out_of_time:
                        break
            run.cut = run.out_of_time and progress.counters.taken < steps
            record = run.record(current)
            if epoch + 1 == config.epochs or run.validates_after(epoch):
                run.validate()
            run.note_validations(record)
            engine.end_epoch(record, validated=run.validation is not None)
            callbacks.add_to(record)
            # All ranks see the same losses and stop requests, so they stop after the same epoch.
            asked = callbacks.ask_to_stop(engine.hooks.asked, lambda: shared_numbers(engine))
            if asked:
                run.validate()
                run.note_validations(record)
            progress.end_epoch(record)
            if world.is_main:
                client.epoch_done(epoch + 1, record)
            progress.ended = asked or progress.best.out_of_patience or client.told_to_stop(epoch + 1)
            run.looks_at_clock(due=run.validation is None or run.validates_after(epoch))
            epoch += 1
            run.save(Position(run.context.step, epoch))
            if run.pauses and epoch < config.epochs and not (progress.ended or run.out_of_time):
                return None
        engine.hooks.end_fit()
        callbacks.call("on_fit_end")
        return run.finish(epoch)


@dataclass(frozen=True)
class _Epoch:
    """The current epoch of a rank, from 0.

    `weights` are those of every step over all ranks, float64 of shape `(steps,)`, and `scales` the factors of a rank's
    loss sums. `started` is by `time.perf_counter`; in a resumed epoch, earlier by the seconds before its checkpoint.
    """

    number: int
    weights: torch.Tensor
    scales: npt.NDArray[np.float64]
    started: float


class _Run:
    """The objects of a training in one rank, and the parts of its loop."""

    def __init__(
        self,
        dataset: RankDataset,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        client: Client,
        steps: int,
        validation_rows: int,
        classes: int,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._dataset, self._config, self._world, self._client = dataset, config, world, client
        self._steps, self._checkpointer = steps, checkpointer
        with client.working("building the module"):
            self.engine = engine = Engine(recipe, config, world, steps=steps, example=self._example)
        self._weights = Weights(engine, config, world)
        self.context = FitContext(engine.unwrapped, engine.optimizer, world)
        self.callbacks = Callbacks(recipe.callbacks, self.context)
        self.validation: Validation | None = None
        if validation_rows:
            self.validation = Validation(
                dataset, engine, recipe, config, world, client, rows=validation_rows, classes=classes
            )
        self.progress = Progress(steps, config, torch.device(world.device))
        self._state = TrainingState(config, world, engine, self._weights.average, self.callbacks, self.progress)
        self._waited, self._seconds, self._next_progress = 0.0, 0.0, 0.0
        self._began, self.out_of_time = time.perf_counter(), False  # A checkpoint keeps neither.
        self.cut = False  # Whether time was over within the last epoch.
        self.pauses = False  # after the last step
        # Same initial weights everywhere; from here on, dropout and the like differ by rank.
        seed_all(config.seed + world.rank + 1)

    def _example(self) -> Batch:
        """Returns a batch of this rank."""
        with closing(self._dataset.epoch(0, min_rows=1)) as batches:
            return next(batches)

    def start(self) -> int:
        """Tries the loss, warms up for checkpoints, loads the one to resume from; returns the first epoch, from 0."""
        manifest = None if self._checkpointer is None else self._checkpointer.start
        if self._checkpointer is not None:
            self._client.pause.begin(1 + (0 if manifest is None else manifest.step))
        self.engine.hooks.begin_fit(*((0, 0) if manifest is None else (manifest.epoch, manifest.step)))
        with self._client.working("trying the loss"):
            check_loss(self.engine, self._config, self._world, self._dataset)
        if self._checkpointer is None:
            return 0
        with closing(self._dataset.epoch(0, min_rows=self.engine.min_rows)) as batches:
            self.engine.warm_up(next(batches))
        self._state.check()  # fails now instead of hours later
        if manifest is None:
            return 0
        self._state.load(self._checkpointer.store, manifest)
        self.context.step = manifest.step
        if self._world.is_main:
            for record in self.progress.history:  # the driver may have been restarted
                self._client.epoch_done(record["epoch"], record)
        return manifest.epoch

    @contextmanager
    def begin(self, epoch: int) -> Iterator[tuple[_Epoch, Iterator[tuple[int, Batch]]]]:
        """Context for the remaining steps of an epoch; yields the epoch, and its steps with this rank's batches."""
        counters, engine = self.progress.counters, self.engine
        self._client.enter("training", epoch=epoch + 1, step=counters.taken)
        started = time.perf_counter() - counters.seconds
        self.context.epoch = epoch + 1
        if not counters.taken:
            engine.means.clear()
            self.callbacks.call("on_epoch_start")
        weights = sum_over_ranks(self._dataset.step_weights(epoch), self._world)
        scales = step_scales(weights, engine.sync.divisor)
        engine.split.begin(self._dataset, epoch, counters.taken)
        waited, entered = counters.waited, time.perf_counter() - counters.validating
        self._next_progress = 0.0
        with closing(self._dataset.epoch(epoch, min_rows=engine.min_rows, first=counters.taken)) as batches:
            engine.training_mode()
            engine.hooks.begin_epoch(epoch, fresh=not counters.taken)
            engine.trained.look(engine.optimizer)
            yield _Epoch(epoch, weights, scales, started), self._steps_left(batches, len(scales))
        self._waited += counters.waited - waited
        self._seconds += time.perf_counter() - counters.validating - entered

    def _steps_left(self, batches: Iterator[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
        """Yields each remaining step with this rank's part of its batch, and measures the waiting time."""
        counters = self.progress.counters
        for step in range(counters.taken, steps):
            self._client.at_step(step + 1)
            asked = time.perf_counter()
            held = [next(batches)]
            counters.waited += time.perf_counter() - asked
            yield step, held.pop()  # this generator does not keep it

    def measures(self, step: int) -> bool:
        """Returns whether to measure this step's gradient norm even if that needs an extra pass over the gradients."""
        return self.context.step % _NORM_STEPS == 0 or step + 1 == self._steps

    def count(self, step: int, rows: int, loss: torch.Tensor | None) -> None:
        """Adds a step to the epoch counters; `loss` is `None` for a skipped step."""
        counters, engine = self.progress.counters, self.engine
        counters.places += engine.padding[0]
        counters.elements += engine.padding[1]
        self.context.step += 1
        counters.taken += 1
        counters.rows += rows
        if loss is None:  # the weights have not changed
            counters.skipped.append(step)
            return
        counters.losses[step] = loss
        if counters.norms is not None and engine.gradient_norm is not None:
            counters.norms[step] = engine.gradient_norm
        self._look_back()
        if self._weights.average is not None:
            self._weights.average.update()

    def show(self, epoch: _Epoch, step: int, loss: torch.Tensor | None) -> None:
        """Publishes the progress at most a few times a second, because reading the loss waits for the device."""
        now = time.perf_counter()
        if loss is None or now < self._next_progress:
            return
        self._next_progress = now + _PROGRESS_SECONDS
        if self._world.is_main:
            mean = loss.item() * epoch.scales[step] / self.engine.sync.divisor * self._world.world_size
            place = {"epoch": epoch.number + 1, "epochs": self._config.epochs, "step": step + 1}
            self._client.progress(**place, steps=len(epoch.scales), loss=float(mean))

    @property
    def validates_now(self) -> bool:
        """Whether a validation is due after the last step."""
        config = self._config
        return (
            self.validation is not None
            and config.validation_unit == "step"
            and self.context.step % config.validation_interval == 0
        )

    def validates_after(self, epoch: int) -> bool:
        """Whether a validation is due after that epoch."""
        config = self._config
        return config.validation_unit == "epoch" and (epoch + 1) % config.validation_interval == 0

    def looks_at_clock(self, *, due: bool = True) -> bool:
        """Returns whether the minutes of the training are over, by the clock of rank 0.

        It is a collective of all ranks, unless no look at the clock is `due`.
        """
        minutes = self._config.max_minutes
        if minutes is not None and due and not self.out_of_time:
            over = self._world.is_main and time.perf_counter() - self._began > 60.0 * minutes
            self.out_of_time = bool(max_over_ranks(torch.tensor([float(over)]), self._world))
        return self.out_of_time

    def validate(self) -> None:
        """Validates and keeps the best weights; does nothing if this step has been validated already."""
        progress = self.progress
        if self.validation is None or progress.validated_step == self.context.step:
            return
        started = time.perf_counter()
        progress.validated_step = self.context.step
        self._client.enter("validating", epoch=self.context.epoch)
        with self._weights.averaged(), self.engine.strategy.evaluating(self.engine.module) as module:
            metrics, counts = self.validation.run(module)
        progress.counters.validations.append({"step": self.context.step, **metrics})
        if progress.best.offer(metrics, self._weights.copied):
            progress.confusion = counts
        self.callbacks.call("on_validation_end", dict(metrics))  # a copy, so that callbacks cannot change it
        progress.counters.validating += time.perf_counter() - started

    def validate_untrained(self) -> None:
        """Validates before the first step, where that is asked for: these weights may be the best ones."""
        if self._config.validates_untrained and self.context.step == 0:
            self.validate()
            counters = self.progress.counters
            for metrics in counters.validations:
                counters.untrained = {name: value for name, value in metrics.items() if name != "step"}
            counters.validations, counters.validating = [], 0.0

    def validate_within(self, epoch: int, step: int) -> bool:
        """Validates after a step within an epoch; returns whether patience is over, or else goes back to training."""
        self._look_back(now=True)
        self.progress.counters.losses.sum().item()  # waits for the device, so that its pending work is not counted
        self.validate()
        if self.progress.best.out_of_patience:
            return True
        self.looks_at_clock()
        self._client.enter("training", epoch=epoch + 1, step=step + 1)
        self.engine.training_mode()
        return False

    def note_validations(self, record: dict[str, Any]) -> None:
        """Adds the epoch's last validation to its record, and all of them if they run by step."""
        validations = self.progress.counters.validations
        if validations:
            record |= {name: value for name, value in validations[-1].items() if name != "step"}
        if self.validation is not None and self._config.validation_unit == "step":
            record["validations"] = validations

    def record(self, epoch: _Epoch) -> dict[str, Any]:
        """Returns the record of the epoch's training, the same on every rank except for what depends on time."""
        counters, engine, world = self.progress.counters, self.engine, self._world
        sums = sum_over_ranks(counters.sums(), world)
        norm = float(max_over_ranks(counters.largest_norm(), world))
        # Read after the all-reduces, so that it is the slowest rank's time.
        seconds = time.perf_counter() - epoch.started - counters.validating
        rate, number = engine.schedule.learning_rate, epoch.number + 1
        record = self.progress.record(
            sums, epoch.weights, seconds, world.world_size, number=number, learning_rate=rate, largest_norm=norm
        )
        if self._config.validation_unit == "step":
            record["steps"] = counters.taken
        if engine.split.searches:
            record["micro_batch_size"] = engine.split.size
        if engine.training_step is not None:
            record |= engine.means.over_ranks(world)
        if self._config.non_finite == "skip":
            record["skipped_steps"] = len(counters.skipped)
            if len(counters.skipped) == counters.taken:
                record["loss"] = math.nan
        return record | engine.strategy.metrics()

    def save_within(self, epoch: _Epoch) -> bool:
        """Saves a checkpoint if one is due, or the training pauses, which it returns.

        After the last step of an epoch, its end does so instead.
        """
        counters = self.progress.counters
        if self._checkpointer is None:
            return False
        self.pauses = self._client.pause.stops_after(self.context.step)
        if counters.taken == self._steps:
            return False
        counters.seconds = time.perf_counter() - epoch.started
        self.save(Position(self.context.step, epoch.number, counters.taken))
        return self.pauses and not self.out_of_time

    def save(self, position: Position) -> None:
        """Saves a checkpoint if one is due, or the training pauses or has no time; without one it does not pause."""
        if self._checkpointer is None or self.cut:  # a cut epoch has its checkpoint
            return
        if not (self.pauses or self.out_of_time or self._checkpointer.due(position)):
            return
        self._look_back(now=True)
        self._checkpointer.save(position, self._state.share(), self._config.judged(self.progress.last_validation()))
        self.pauses = self.pauses and self._checkpointer.is_complete()

    def finish(self, epoch: int) -> Outcome:
        """Closes the checkpointer and returns the outcome; `epoch` is the number of trained epochs."""
        out_of_time = self.out_of_time and not self.progress.ended and (self.cut or epoch < self._config.epochs)
        if self._checkpointer is not None:
            self._client.enter("saving")
            self._checkpointer.close(Position(self.context.step, epoch), finished=not out_of_time)
        self._client.enter("finishing")
        progress = self.progress
        confusion = None if progress.confusion is None else progress.confusion.tolist()
        weights = self._weights.result(progress.best.state)
        engine = self.engine
        if engine.base is not None:
            engine.base.check(engine.strategy.state_dict(engine.module))
        waited = self._waited / max(self._seconds, 1e-9)
        return Outcome(weights, progress.history, confusion, waited, out_of_time)

    def _look_back(self, *, now: bool = False) -> None:
        """Raises if a loss was not finite; `now` is set before the weights are used."""
        counters = self.progress.counters
        if self.engine.watch is not None and counters.taken:
            self.engine.watch.look_back(counters.losses, counters.taken, now=now)
