"""The training loop: `train` reads from top to bottom, the same for one rank and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
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

# Progress is published once in this time at most.
_PROGRESS_SECONDS = 0.2
# Once in this number of steps, the gradient norm is measured even if that needs an extra pass over the gradients.
_NORM_STEPS = 32


@dataclass(frozen=True)
class Outcome:
    """A rank's result of training.

    Attributes:
        state: The model's state dict on the CPU, without a frozen base, or the folder into which the ranks have written
            it. In ranks other than 0, the state dict may be empty.
        history: One record per epoch: loss, validation metrics, throughput, times in seconds.
        confusion: Confusion matrix of these weights: validation rows by class (row) and predicted class (column).
            `None` without validation rows or classes, or with too many classes.
        data_wait_share: Share of the training time since the last start in which this rank waited for rows.
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
    """Trains a model on the rows of all ranks; with more than one rank, the process group is open.

    The gradient of a step is the gradient of the mean loss over the global batch, weighted by the sample weights: every
    rank sums the weighted losses of its rows, and divides the sum by the weight of the whole batch. A rank without rows
    in a step takes part with placeholder rows of weight zero, because the other ranks wait for it in the all-reduce.

    With checkpoints, the driver may pause the training: then it ends with a checkpoint of its last step, and returns
    `None`. If this checkpoint cannot be written, the training goes on.

    `steps` is the number of steps in an epoch, `validation_rows` the largest number of validation rows in any rank (0
    without validation), and `classes` the number of classes that labels index. The checkpointer has found the
    checkpoint to resume from.
    """
    with reproducible(config, torch.device(world.device)), explained(config):
        run = _Run(dataset, recipe, config, world, client, steps, validation_rows, classes or 0, checkpointer)
        engine = run.engine
        callbacks = run.callbacks
        progress = run.progress
        callbacks.call("on_fit_start")
        epoch = run.start()
        run.validate_untrained()
        while epoch < config.epochs and not (progress.ended or run.out_of_time):
            with run.begin_epoch(epoch) as (current, batches):
                for step, batch in batches:
                    loss = engine.step(batch, float(current.scales[step]), step, measured=run.measures_norm(step))
                    run.count_step(step, batch.rows, loss)
                    run.show_progress(current, step, loss)
                    del batch, loss  # Their memory is free for validation, and for what follows the epoch.
                    engine.hooks.end_step(run.context.step)
                    callbacks.call("on_step_end")
                    # Patience, a pause or the clock may end the epoch early, in all ranks after the same step.
                    if run.validates_now and run.validate_within(epoch, step):
                        break
                    if run.save_within(current):
                        return None
                    if run.out_of_time:
                        break
            run.cut = run.out_of_time and progress.counters.taken < steps
            record = run.epoch_record(current)
            if epoch + 1 == config.epochs or run.validates_after(epoch):
                run.validate()
            run.add_validations_to(record)
            engine.end_epoch(record, validated=run.validation is not None)
            callbacks.add_to(record)
            # All ranks see the same losses and stop requests, so they stop after the same epoch.
            stops = callbacks.ask_to_stop(engine.hooks.stop_requested, partial(shared_numbers, engine))
            if stops:
                run.validate()
                run.add_validations_to(record)
            progress.end_epoch(record)
            if world.is_main:
                client.epoch_done(epoch + 1, record)
            progress.ended = stops or progress.best.out_of_patience or client.told_to_stop(epoch + 1)
            run.check_clock(due=run.validation is None or run.validates_after(epoch))
            epoch += 1
            run.save(Position(run.context.step, epoch))
            if run.pauses and epoch < config.epochs and not (progress.ended or run.out_of_time):
                return None
        engine.hooks.end_fit()
        callbacks.call("on_fit_end")
        return run.finish(epoch)


@dataclass(frozen=True)
class _Epoch:
    """The current epoch of a rank.

    Attributes:
        number: The epoch's number, from 0.
        weights: The weight of each step's rows over all ranks, float64 of shape `(steps,)`.
        scales: The factor of this rank's loss sum in each step.
        started: When the epoch began, by `time.perf_counter`. For a resumed epoch, the time that it took before its
            checkpoint is subtracted.
    """

    number: int
    weights: torch.Tensor
    scales: npt.NDArray[np.float64]
    started: float


class _Run:
    """The objects of a training in one rank, and the parts of its loop.

    Attributes:
        engine: Takes the steps.
        context: The state of the training that callbacks see.
        callbacks: The callbacks that run in this rank.
        validation: Evaluates the module; `None` without validation rows.
        progress: Counters and results.
        out_of_time: Whether the minutes of the training are over.
        cut: Whether the minutes were over before the end of the last epoch.
        pauses: Whether the driver pauses the training after the last step.
    """

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
        self._dataset = dataset
        self._config = config
        self._world = world
        self._client = client
        self._steps = steps
        self._checkpointer = checkpointer
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
        self._waited = 0.0
        self._seconds = 0.0
        self._next_progress = 0.0
        # The minutes count from here, even if the training resumes: a checkpoint does not keep them.
        self._began = time.perf_counter()
        self.out_of_time = False
        self.cut = False
        self.pauses = False
        # All ranks have built the same initial weights. From here on, they draw different numbers, as for dropout.
        seed_all(config.seed + world.rank + 1)

    def _example(self) -> Batch:
        """Returns a batch of this rank."""
        with closing(self._dataset.epoch(0, min_rows=1)) as batches:
            return next(batches)

    def start(self) -> int:
        """Begins or resumes the training; returns the number of the first epoch, from 0.

        It tries the loss on a few rows. With checkpoints, it also warms up the engine, and loads the checkpoint to
        resume from, if there is one.
        """
        manifest = None if self._checkpointer is None else self._checkpointer.start
        epoch = 0
        steps_taken = 0
        if manifest is not None:
            epoch = manifest.epoch
            steps_taken = manifest.step
        if self._checkpointer is not None:
            self._client.pause.begin(steps_taken + 1)
        self.engine.hooks.begin_fit(epoch, steps_taken)
        with self._client.working("trying the loss"):
            check_loss(self.engine, self._config, self._world, self._dataset)
        if self._checkpointer is None:
            return epoch
        with closing(self._dataset.epoch(0, min_rows=self.engine.min_rows)) as batches:
            self.engine.warm_up(next(batches))
        self._state.check()  # A state that no checkpoint can hold is an error now instead of hours later.
        if manifest is None:
            return epoch
        self._state.load(self._checkpointer.store, manifest)
        self.context.step = steps_taken
        if self._world.is_main:
            for record in self.progress.history:  # If the driver was restarted, it does not know these epochs.
                self._client.epoch_done(record["epoch"], record)
        return epoch

    @contextmanager
    def begin_epoch(self, epoch: int) -> Iterator[tuple[_Epoch, Iterator[tuple[int, Batch]]]]:
        """Context for the remaining steps of an epoch; yields the epoch, and its steps with this rank's batches."""
        # In a resumed epoch, the counters have the steps that were taken before.
        counters = self.progress.counters
        engine = self.engine
        self._client.enter("training", epoch=epoch + 1, step=counters.taken)
        started = time.perf_counter() - counters.seconds
        self.context.epoch = epoch + 1
        if not counters.taken:
            engine.means.clear()
            self.callbacks.call("on_epoch_start")
        weights = sum_over_ranks(self._dataset.step_weights(epoch), self._world)
        scales = step_scales(weights, engine.gradient_sync.divisor)
        engine.micro_batches.begin(self._dataset, epoch, counters.taken)
        # Since this start of the training, the time in steps is summed up, without the time in validations.
        waited_before = counters.waited
        entered = time.perf_counter() - counters.validating
        self._next_progress = 0.0
        with closing(self._dataset.epoch(epoch, min_rows=engine.min_rows, first=counters.taken)) as batches:
            engine.training_mode()
            engine.hooks.begin_epoch(epoch, fresh=not counters.taken)
            engine.trained_parameters.refresh(engine.optimizer)
            yield _Epoch(epoch, weights, scales, started), self._steps_left(batches, len(scales))
        self._waited += counters.waited - waited_before
        self._seconds += time.perf_counter() - counters.validating - entered

    def _steps_left(self, batches: Iterator[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
        """Yields each remaining step with this rank's part of its batch, and measures the waiting time."""
        counters = self.progress.counters
        for step in range(counters.taken, steps):
            self._client.at_step(step + 1)
            began = time.perf_counter()
            batch = [next(batches)]
            counters.waited += time.perf_counter() - began
            # A suspended generator keeps its variables. Once popped, the batch is in none, so the caller can free it.
            yield step, batch.pop()

    def measures_norm(self, step: int) -> bool:
        """Returns whether to measure this step's gradient norm even if that needs an extra pass over the gradients."""
        return self.context.step % _NORM_STEPS == 0 or step + 1 == self._steps

    def count_step(self, step: int, rows: int, loss: torch.Tensor | None) -> None:
        """Adds a step to the epoch counters; `loss` is `None` for a skipped step."""
        counters = self.progress.counters
        engine = self.engine
        positions, elements = engine.padding
        counters.positions += positions
        counters.elements += elements
        self.context.step += 1
        counters.taken += 1
        counters.rows += rows
        if loss is None:  # The weights have not changed, so their average must not change either.
            counters.skipped.append(step)
            return
        counters.losses[step] = loss
        if counters.norms is not None and engine.gradient_norm is not None:
            counters.norms[step] = engine.gradient_norm
        self._look_back()  # Every few dozen steps, this is a collective.
        if self._weights.average is not None:
            self._weights.average.update()

    def show_progress(self, epoch: _Epoch, step: int, loss: torch.Tensor | None) -> None:
        """Publishes the progress at most a few times a second, because reading the loss waits for the device."""
        now = time.perf_counter()
        if loss is None or now < self._next_progress:
            return
        self._next_progress = now + _PROGRESS_SECONDS
        if self._world.is_main:
            # Rank 0 knows only the loss of its own rows: scaled to a batch, it stands for the losses of all ranks.
            mean = loss.item() * epoch.scales[step] / self.engine.gradient_sync.divisor * self._world.world_size
            self._client.progress(
                epoch=epoch.number + 1,
                epochs=self._config.epochs,
                step=step + 1,
                steps=len(epoch.scales),
                loss=float(mean),
            )

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
        """Returns whether a validation is due after an epoch, whose number counts from 0."""
        config = self._config
        return config.validation_unit == "epoch" and (epoch + 1) % config.validation_interval == 0

    def check_clock(self, *, due: bool = True) -> None:
        """Sets `out_of_time` if the minutes of the training are over, by the clock of rank 0.

        It is a collective of all ranks if it is `due`, and does nothing otherwise.
        """
        minutes = self._config.max_minutes
        if minutes is not None and due and not self.out_of_time:
            # The clocks of hosts differ: the clock of rank 0 counts, so that all ranks stop after the same step.
            over = self._world.is_main and time.perf_counter() - self._began > 60.0 * minutes
            self.out_of_time = bool(max_over_ranks(torch.tensor([float(over)]), self._world))

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
        # Copying the best weights may be a collective. All ranks have the same metrics, so all copy or none does.
        if progress.best.offer(metrics, self._weights.copy):
            progress.confusion = counts
        self.callbacks.call("on_validation_end", dict(metrics))  # It is a copy, so that callbacks change no record.
        progress.counters.validating += time.perf_counter() - started

    def validate_untrained(self) -> None:
        """Validates before the first step, if the configuration says so: these weights may be the best ones."""
        if self._config.validates_untrained and self.context.step == 0:
            self.validate()
            counters = self.progress.counters
            for metrics in counters.validations:
                counters.untrained = {name: value for name, value in metrics.items() if name != "step"}
            counters.validations = []
            counters.validating = 0.0

    def validate_within(self, epoch: int, step: int) -> bool:
        """Validates after a step within an epoch, and goes back to training; returns whether patience is over."""
        self._look_back(now=True)
        # Reading a value waits for the device, so that steps which it has still to take do not count as validation.
        self.progress.counters.losses.sum().item()
        self.validate()
        if self.progress.best.out_of_patience:
            return True
        self.check_clock()
        self._client.enter("training", epoch=epoch + 1, step=step + 1)
        self.engine.training_mode()
        return False

    def add_validations_to(self, record: dict[str, Any]) -> None:
        """Adds the epoch's last validation to its record, and all of them if they run by step."""
        validations = self.progress.counters.validations
        if validations:
            record |= {name: value for name, value in validations[-1].items() if name != "step"}
        if self.validation is not None and self._config.validation_unit == "step":
            record["validations"] = validations

    def epoch_record(self, epoch: _Epoch) -> dict[str, Any]:
        """Returns the record of the epoch's training, the same on every rank except for what depends on time."""
        counters = self.progress.counters
        engine = self.engine
        world = self._world
        sums = sum_over_ranks(counters.sums(), world)
        norm = float(max_over_ranks(counters.largest_norm(), world))
        # The clock is read after the all-reduces, so that it shows the slowest rank's time.
        seconds = time.perf_counter() - epoch.started - counters.validating
        rate = engine.schedule.learning_rate
        number = epoch.number + 1
        record = self.progress.record(
            sums, epoch.weights, seconds, world.world_size, number=number, learning_rate=rate, largest_norm=norm
        )
        if self._config.validation_unit == "step":
            record["steps"] = counters.taken
        if engine.micro_batches.searches:
            record["micro_batch_size"] = engine.micro_batches.size
        if engine.training_step is not None:
            record |= engine.means.over_ranks(world)
        if self._config.non_finite == "skip":
            record["skipped_steps"] = len(counters.skipped)
            if len(counters.skipped) == counters.taken:
                record["loss"] = math.nan
        return record | engine.strategy.metrics()

    def save_within(self, epoch: _Epoch) -> bool:
        """Saves a checkpoint after a step, if one is due or the training pauses; returns whether the training pauses.

        After the last step of an epoch, it saves none: the end of the epoch does.
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
        """Saves a checkpoint if one is due, the training pauses, or its time is over.

        If the checkpoint for a pause cannot be written, the training does not pause.
        """
        if self._checkpointer is None or self.cut:  # An epoch that was cut has saved its own checkpoint.
            return
        if not (self.pauses or self.out_of_time or self._checkpointer.is_due(position)):
            return
        self._look_back(now=True)
        self._checkpointer.save(position, self._state.share(), self._config.judged(self.progress.last_validation()))
        self.pauses = self.pauses and self._checkpointer.is_complete()

    def finish(self, epoch: int) -> Outcome:
        """Closes the checkpointer and returns the outcome; `epoch` is the number of trained epochs."""
        has_steps_left = self.cut or epoch < self._config.epochs
        out_of_time = self.out_of_time and not self.progress.ended and has_steps_left
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
        data_wait_share = self._waited / max(self._seconds, 1e-9)
        return Outcome(weights, progress.history, confusion, data_wait_share, out_of_time)

    def _look_back(self, *, now: bool = False) -> None:
        """Raises if a loss was not finite; looks every few dozen steps, or `now`, before the weights are used."""
        counters = self.progress.counters
        if self.engine.loss_watch is not None and counters.taken:
            self.engine.loss_watch.look_back(counters.losses, counters.taken, now=now)
