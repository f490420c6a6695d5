"""The training loop: the same code for one rank and for many."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

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
from sparktorch.train.strategy import build_strategy
from sparktorch.train.task import align, autocast, first_rows
from sparktorch.train.validation import Best, Validation
from sparktorch.world import World

__all__ = ["BatchLike", "Outcome", "Reporter", "ShardLike", "train"]

_REPORT_SECONDS = 0.2


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
        self._loss = recipe.build_loss().to(world.device)
        self._schedule = Schedule(recipe, config, self._optimizer, steps)
        self._autocast = autocast(device, config.precision)
        # Small gradients of float16 vanish unless the loss is scaled up; bfloat16 reaches as far as float32.
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
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
                forward=self._forward,
                loss=self._loss,
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
        # Where a best one is kept, other ranks than rank 0 have none of it: all of them ask whether there is.
        state = self._state() if self._best.state is None else self._best.state
        return Outcome(state, history, confusion)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        """Trains one epoch and returns its record, the same on every rank but for the seconds."""
        started = time.perf_counter()
        self._validations, self._validating = [], 0.0
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
        return record if self._config.validation_unit == "epoch" else {**record, "steps": taken}

    def _steps(self, epoch: int, weights: torch.Tensor) -> torch.Tensor:
        """Runs the steps of an epoch; returns this rank's loss sum, row count and seconds waited for data."""
        self._module.train()
        config, context = self._config, self._context
        interval = config.validation_interval if config.validation_unit == "step" else 0
        divisor = self._strategy.gradient_divisor
        scales = [divisor / weight if weight > 0 else 0.0 for weight in weights.tolist()]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
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

            batch_loss = self._step(batch, scale, parts[step])

            loss_sum += batch_loss
            rows += batch.rows
            context.step += 1
            if self._average is not None:
                self._average.update()
            if now >= next_report:  # reading the loss waits for the device: a few times a second only
                next_report = now + _REPORT_SECONDS
                if self._world.is_main:
                    mean = batch_loss.item() * scale / divisor * self._world.world_size
                    place = {"epoch": epoch + 1, "epochs": config.epochs, "step": step + 1, "steps": len(scales)}
                    self._reporter.progress(**place, loss=mean)
            if self._callbacks.watch_steps:
                self._callbacks.call("on_step_end")
            if interval and context.step % interval == 0:
                loss_sum.item()  # waits for the device: what it has still to do is not validation
                self._validate()
                if self._best.out_of_patience:
                    break
                self._reporter.enter("training", epoch=epoch + 1, step=step + 1)
                self._module.train()
        return torch.tensor([float(loss_sum), rows, waited], dtype=torch.float64)

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

    def _step(self, batch: BatchLike, scale: float, parts: int) -> torch.Tensor:
        """Takes one optimizer step; returns the sum of this rank's weighted losses, a scalar tensor."""
        self._optimizer.zero_grad()
        *first, last = _micro_batches(batch, parts, least=self._least)
        loss_sum: torch.Tensor | None = None
        for part in first:  # gradients add up in the rank; the last part's backward sends the sum
            with self._strategy.no_sync(self._module):
                loss_sum = self._backward(part, scale, loss_sum)
        loss_sum = self._backward(last, scale, loss_sum)
        self._strategy.before_step(self._module)
        if self._config.clip_norm or self._config.clip_value:
            self._scaler.unscale_(self._optimizer)
            self._strategy.clip_gradients(self._module, norm=self._config.clip_norm, value=self._config.clip_value)
        self._schedule.step(self._take_step)
        self._strategy.after_step(self._module)
        return loss_sum

    def _backward(self, batch: BatchLike, scale: float, before: torch.Tensor | None) -> torch.Tensor:
        """Adds the gradients of a batch to those that are there; returns its loss sum plus `before`."""
        loss = self._losses(self._module, batch)
        self._scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach() if before is None else before + loss.detach()

    def _take_step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _losses(self, module: nn.Module, batch: BatchLike) -> torch.Tensor:
        """Returns the sum of the weighted losses of a batch."""
        output = self._forward(module, batch)
        if 0 < batch.rows < self._least:  # filled up for the module's sake alone
            output = first_rows(output, batch.rows)
        output, label = align(self._config.task, output, batch.label)
        return self._loss(output, label, batch.weight)

    def _forward(self, module: nn.Module, batch: BatchLike) -> Any:
        with self._autocast:
            output = module(*batch.inputs)
        return output if self._config.precision in ("fp32", "tf32") else _full_precision(output)

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


@dataclass(frozen=True)
class _MicroBatch:
    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    rows: int


def _micro_batches(batch: BatchLike, parts: int, *, least: int) -> list[BatchLike]:
    """Splits a rank's part of a step.

    Args:
        batch: The rank's part of the step.
        parts: Into how many micro-batches. Those that get too few rows come last, with weight zero.
        least: The fewest rows of a micro-batch.
    """
    if parts == 1:
        return [batch]
    filled = min(parts, batch.rows // least)
    edges = [batch.rows * i // filled for i in range(filled + 1)] if filled else [0]
    found: list[BatchLike] = [_cut(batch, start, end) for start, end in pairwise(edges)] or [batch]
    empty = _cut(batch, 0, least)
    empty = replace(empty, weight=torch.zeros(least, device=empty.inputs[0].device), rows=0)
    return [*found, *[empty] * (parts - len(found))]


def _cut(batch: BatchLike, start: int, end: int) -> _MicroBatch:
    return _MicroBatch(
        tuple(tensor[start:end] for tensor in batch.inputs),
        None if batch.label is None else batch.label[start:end],
        None if batch.weight is None else batch.weight[start:end],
        end - start,
    )


def _full_precision(output: Any) -> Any:
    """Returns what a module returned under autocast in float32, for the loss."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return {name: _full_precision(tensor) for name, tensor in output.items()}
    return tuple(_full_precision(tensor) for tensor in output)
