"""One step of the optimizer: forward, loss, backward, and whether to take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparktorch.config import TrainConfig
from sparktorch.train.finite import LossWatch, all_finite
from sparktorch.train.recipe import Recipe
from sparktorch.train.schedule import Schedule
from sparktorch.train.step import BatchLike, Means, Sums, full_precision, micro_batches
from sparktorch.train.strategy import Strategy
from sparktorch.train.task import align, autocast, first_rows
from sparktorch.world import World

__all__ = ["Stepper"]


class Stepper:
    """Takes the steps of a rank.

    Attributes:
        loss: What is minimised; `None` if a training step computes it.
        training_step: In place of it, `None` where there is none.
        scaler: Scales the loss up for float16, whose small gradients vanish otherwise; bfloat16 reaches as
            far as float32.
        watch: Stops the training at a loss that is not finite; `None` where such steps are left out.
        means: Of the training step's metrics, over the steps taken since it was set.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        *,
        strategy: Strategy[Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        least: int,
    ) -> None:
        """Builds loss or training step.

        Args:
            recipe: Names them.
            config: How it is trained.
            world: This rank's place.
            strategy: How the ranks share the work.
            module: As the strategy has prepared it.
            optimizer: Over its parameters.
            schedule: Of the learning rate.
            least: The fewest rows that the module takes.
        """
        device = torch.device(world.device)
        self._config, self._world, self._strategy = config, world, strategy
        self._module, self._optimizer, self._schedule, self._least = module, optimizer, schedule, least
        self.training_step = recipe.build_training_step()
        self.loss = None if self.training_step else recipe.build_loss().to(world.device)
        self._autocast = autocast(device, config.precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.watch = LossWatch(world) if config.non_finite == "error" else None
        self.means = Means()

    def take(self, batch: BatchLike, scale: float, parts: int) -> torch.Tensor | None:
        """Takes one step.

        Args:
            batch: This rank's part of the global batch.
            scale: What the sum of its weighted losses is multiplied by.
            parts: Number of micro-batches.

        Returns:
            That sum, a scalar tensor; `None` if the step was left out on all ranks.
        """
        self._optimizer.zero_grad()
        skips = self._config.non_finite == "skip"
        buffers = [buffer.clone() for buffer in self._module.buffers()] if skips else []
        *first, last = micro_batches(batch, parts, least=self._least)
        found = []
        for part in first:  # gradients add up in the rank; the last part's backward sends the sum
            with self._strategy.no_sync(self._module):
                found.append(self._backward(part, scale))
        found.append(self._backward(last, scale))
        losses, metrics = zip(*found, strict=True)
        loss_sum: torch.Tensor = sum(losses[1:], losses[0])
        self._strategy.before_step(self._module)
        if skips and not all_finite(loss_sum, self._module, self._world):
            self._skip(buffers)
            return None
        for sums in metrics:
            self.means.add(sums)
        if self._config.clip_norm or self._config.clip_value:
            self.scaler.unscale_(self._optimizer)
            self._strategy.clip_gradients(self._module, norm=self._config.clip_norm, value=self._config.clip_value)
        self._schedule.step(self._update)
        self._strategy.after_step(self._module)
        return loss_sum

    def call_step(self, module: nn.Module, batch: BatchLike) -> tuple[torch.Tensor, Sums]:
        """Returns the sum of the weighted losses of a batch as the training step computes it, and of its metrics."""
        assert self.training_step is not None
        with self._autocast:
            return self.training_step(module, batch)

    def forward(self, module: nn.Module, batch: BatchLike) -> Any:
        """Returns the outputs of a batch, for the loss."""
        with self._autocast:
            output = module(*batch.inputs)
        return output if self._config.precision in ("fp32", "tf32") else full_precision(output)

    def _backward(self, batch: BatchLike, scale: float) -> tuple[torch.Tensor, Sums]:
        """Adds the gradients of a batch to those that are there; returns its loss sum and metrics."""
        loss, metrics = self._losses(batch)
        if self.watch is not None:
            self.watch.check(loss)
        self.scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), metrics

    def _losses(self, batch: BatchLike) -> tuple[torch.Tensor, Sums]:
        """Returns the sum of the weighted losses of a batch, and the sums of the training step's metrics."""
        if self.loss is None:
            return self.call_step(self._module, batch)
        output = self.forward(self._module, batch)
        if 0 < batch.rows < self._least:  # filled up for the module's sake alone
            output = first_rows(output, batch.rows)
        output, label = align(self._config.task, output, batch.label)
        return self.loss(output, label, batch.loss_weight), {}

    def _update(self) -> None:
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _skip(self, buffers: list[torch.Tensor]) -> None:
        """Leaves out a step, which schedule and strategy count nevertheless, and puts the buffers back."""
        for buffer, before in zip(self._module.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if self.scaler.is_enabled():  # it may have scaled too far
            self.scaler.unscale_(self._optimizer)
            self.scaler.update()
        self._schedule.step(lambda: None)
        self._strategy.after_step(self._module)
