"""A module with all that trains it, one optimizer step at a time, in one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch, micro_batches, padding
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.dtensor import whole
from sparktorch.train.numerics.channels_last import channels_last
from sparktorch.train.numerics.determinism import untouched_generators
from sparktorch.train.numerics.non_finite import LossWatch, all_finite
from sparktorch.train.numerics.sync_batchnorm import Presence, has_batch_norm, synchronise
from sparktorch.train.recipe.loss import Means, Sums, full_precision
from sparktorch.train.recipe.lr_schedule import Schedule
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.recipe.task import align, autocast, first_rows
from sparktorch.train.strategies.base import Strategy
from sparktorch.train.strategies.registry import build_strategy

__all__ = ["Engine"]


class Engine:
    """Module, loss, optimizer and schedule of a rank, under the strategy that joins it to the others.

    Attributes:
        strategy: How the ranks share the work.
        module: What the strategy made of the user's module.
        plain: The user's module.
        optimizer: Over this rank's parameters.
        schedule: Of the learning rate.
        scaler: Of the loss, in fp16.
        training_step: The user's own, `None` where the loss counts.
        watch: Over losses that are not finite, `None` where their steps are skipped.
        min_rows: The fewest rows of a batch that the module takes in training.
        means: Of the training step's metrics, over the steps since they were last cleared.
        padding: Places of the padded inputs of this rank's last step, and elements in them.
        gradient_norm: Of this rank's last step before clipping, a scalar tensor; `None` where it was not looked at.
    """

    def __init__(self, recipe: Recipe, config: TrainConfig, world: World, *, steps: int) -> None:
        """Builds everything; the same seed gives the same initial weights in every rank.

        Args:
            recipe: What is trained.
            config: How it is trained.
            world: This rank's place; with more than one rank, the process group is open.
            steps: Number of steps in an epoch.
        """
        self._config, self._world = config, world
        device = torch.device(world.device)
        self.strategy: Strategy[Any] = build_strategy(config, world)
        plain = recipe.build_module(config.seed)
        # A rank joins every all-reduce, with a row of weight zero where it has none; batch
        # normalisation in training refuses a single row, unless it looks at those of all ranks.
        self.min_rows = 2 if has_batch_norm(plain) else 1
        self._presence: Presence | None = None
        if config.sync_batch_norm and world.world_size > 1:
            self._presence, self.min_rows = Presence(), 1
            synchronise(plain, self._presence, compiled=config.compile)
        if config.channels_last:
            channels_last(plain)
        if config.compile:
            plain.compile()
        self.module = self.strategy.prepare(plain)
        self.unwrapped = self.strategy.unwrap(self.module)
        self.optimizer = self.strategy.optimizer(recipe, plain)
        self.schedule = Schedule(recipe, config, self.optimizer, steps)
        self.training_step = recipe.build_training_step()
        self._loss = None if self.training_step else recipe.build_loss().to(world.device)
        self._autocast = autocast(device, config.precision)
        # Small gradients of float16 vanish unless the loss is scaled up; bfloat16 reaches as far as float32.
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        at_once = True if self.strategy.waits_for_device else None
        self.watch = LossWatch(world, at_once=at_once) if config.non_finite == "error" else None
        self.means = Means()
        self.padding = (0, 0)
        self.gradient_norm: torch.Tensor | None = None

    def step(self, batch: Batch, scale: float, parts: int, *, measured: bool = False) -> torch.Tensor | None:
        """Takes one optimizer step.

        Args:
            batch: This rank's part of the global batch.
            scale: What the sum of its losses is multiplied by.
            parts: Number of micro-batches.
            measured: Whether to find the norm of the gradient also where that is a pass of its own.

        Returns:
            The sum of this rank's weighted losses, a scalar tensor; `None` if the step was left out on all ranks.
        """
        config = self._config
        self.optimizer.zero_grad()
        if self._presence is not None:
            self._presence.rows = batch.rows > 0
        skips = config.non_finite == "skip"
        buffers = [buffer.clone() for buffer in self.module.buffers()] if skips else []
        *first, last = split = micro_batches(batch, parts, min_rows=self.min_rows)
        self.padding = padding(split)
        found = []
        for part in first:  # gradients add up in the rank; the last part's backward sends the sum
            with self.strategy.no_sync(self.module):
                found.append(self._backward(part, scale))
        found.append(self._backward(last, scale))
        losses, metrics = zip(*found, strict=True)
        loss_sum: torch.Tensor = sum(losses[1:], losses[0])
        self.strategy.before_step(self.module)
        self.gradient_norm = None
        if skips and not all_finite(loss_sum, self.module, self._world):
            self._skip(buffers)
            return None
        for sums in metrics:
            self.means.add(sums)
        clips = config.clip_norm is not None or config.clip_value is not None
        if clips or measured:
            self.scaler.unscale_(self.optimizer)
        if measured and (config.clip_norm is None or config.clip_value is not None):
            self.gradient_norm = self.strategy.gradient_norm(self.module)
        if clips:
            norm = self.strategy.clip_gradients(self.module, norm=config.clip_norm, value=config.clip_value)
            free = norm is not None and not hasattr(norm, "full_tensor")
            if norm is not None and config.clip_value is None and (measured or free):
                self.gradient_norm = whole(norm)
        self.schedule.step(self._take_step)
        self.strategy.after_step(self.module)
        return loss_sum

    def warm_up(self, batch: Batch) -> None:
        """Goes through the steps after which a strategy sums gradients in its final order, without a trace.

        A training that goes on from a checkpoint would otherwise sum its first steps in another order
        than the one that was not interrupted, and end with other last bits.
        """
        with untouched_generators(torch.device(self._world.device)):
            buffers = [buffer.clone() for buffer in self.module.buffers()]
            state = self.strategy.own_state()
            for _ in range(self.strategy.warm_up_passes):
                loss, _ = self.losses_of(self.module, batch)
                (loss * 0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.zero_grad()
            self.strategy.load_own_state(state)
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def losses_of(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the sum of the weighted losses of a batch, and the sums of the training step's metrics."""
        if self.training_step is not None:
            with self._autocast:
                return self.training_step(module, batch)
        output = self.forward(module, batch)
        if 0 < batch.rows < self.min_rows:  # filled up for the module's sake alone
            output = first_rows(output, batch.rows)
        assert self._loss is not None
        return self._loss(*align(self._config.task, output, batch.label), batch.loss_weight), {}

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Returns the module's output for a batch, in float32."""
        with self._autocast:
            output = module(*batch.inputs)
        return self.widened(output)

    def widened(self, output: Any) -> Any:
        """Returns what the module returned under autocast as `forward` does."""
        return full_precision(output) if self._config.precision in ("bf16", "fp16") else output

    def loss_of(self, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the sum of the weighted losses of an output; only without a training step."""
        assert self._loss is not None
        return self._loss(output, label, weight)

    def _backward(self, batch: Batch, scale: float) -> tuple[torch.Tensor, Sums]:
        """Adds the gradients of a batch to those that are there; returns its loss sum and metrics."""
        loss, metrics = self.losses_of(self.module, batch)
        if self.watch is not None:
            self.watch.check(loss)
        self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), metrics

    def _take_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _skip(self, buffers: list[torch.Tensor]) -> None:
        """Leaves out a step, which schedule and strategy count nevertheless, and puts the buffers back."""
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if self.scaler.is_enabled():  # it may have scaled too far
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
        self.schedule.step(lambda: None)
        self.strategy.after_step(self.module)
