"""The optimizer step in one rank, with the module, loss, optimizer and schedule that it needs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch, micro_batches, padding
from sparktorch.base.config import TrainConfig
from sparktorch.base.deferred import Deferred
from sparktorch.base.devices import let_go
from sparktorch.base.no_op import no_op
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.loop.micro_batches import MicroBatches
from sparktorch.train.numerics.determinism import generators_state, set_generators_state, untouched_generators
from sparktorch.train.numerics.non_finite import LossWatch, all_finite
from sparktorch.train.numerics.sync_batchnorm import Presence, has_batch_norm, synchronise
from sparktorch.train.numerics.torch_errors import is_out_of_memory
from sparktorch.train.recipe.adapter import adapted_parts, adapter_of
from sparktorch.train.recipe.frozen_base import FrozenBase
from sparktorch.train.recipe.loss import Loss, Means, Sums, TrainingStep, full_precision
from sparktorch.train.recipe.lr_schedule import Schedule
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.recipe.task import align, autocast, prediction, rows_of
from sparktorch.train.recipe.trained_parameters import TrainedParameters
from sparktorch.train.sharding.dtensor import whole
from sparktorch.train.strategies.base import Start, Strategy
from sparktorch.train.strategies.registry import build_strategy, strategy_for

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)


class Engine:
    """Module, loss, optimizer and schedule of a rank, under the strategy that connects the ranks.

    Attributes:
        kind: The strategy as it is known before there are ranks.
        strategy: The strategy, in this rank.
        sync: What reduces gradients.
        module: The module as the strategy has wrapped it.
        unwrapped: The user's module.
        base: The frozen base under the module's adapters, which is neither saved nor returned; `None` without adapters.
        scaler: Loss scaler, enabled in fp16 only.
        hooks: The hooks of the module itself, and the parts that it brings to its training.
        trained: The parameters that are trained.
        training_step: The user's training step, `None` if the recipe has a loss instead.
        watch: Raises on losses that are not finite; `None` if their steps are skipped.
        min_rows: Minimum rows of a batch in training.
        micro_batches: How many micro-batches each step has, and of which size.
        means: Means of the training step's metrics over the steps since they were cleared.
        padding: Positions in the padded inputs of this rank's last step, and how many of them hold data.
        gradient_norm: Gradient norm of the last step before clipping, a scalar tensor; `None` if it was not measured.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: TrainConfig,
        world: World,
        *,
        steps: int,
        built: Deferred | None = None,
        example: Callable[[], Batch] | None = None,
    ) -> None:
        """Builds everything; the same seed gives the same initial weights in every rank.

        With more than one rank, the process group is open. `steps` is the number of steps in an epoch, `built` the
        module without values, if it is built already, and `example` returns a batch of this rank.
        """
        self._config, self._world = config, world
        device = torch.device(world.device)
        self.kind, _ = strategy_for(config.strategy, config.strategy_params)
        self.strategy: Strategy[Any] = build_strategy(config, world)
        if built is None and config.model_folder:
            built = recipe.build_deferred(config.seed)
        unwrapped = recipe.build_module(config.seed) if built is None else built.module
        self.hooks = recipe.build_hooks(unwrapped, world, steps)
        self.base = FrozenBase.of(unwrapped, adapted_parts(unwrapped), recipe.module_seed(config.seed), recipe.packed)
        # A rank without rows joins every all-reduce with placeholder rows. Batch normalisation refuses a single row in
        # training, unless it is synchronised over the ranks, as torch's `SyncBatchNorm` in the module is.
        self._presence: Presence | None = None
        # Whether the ranks have running statistics of their own rows.
        self._buffers_differ = not any(isinstance(part, nn.SyncBatchNorm) for part in unwrapped.modules())
        if config.sync_batch_norm or not (self._buffers_differ or world.world_size == 1):
            self._presence = Presence()
            synchronise(unwrapped, self._presence, everywhere=config.sync_batch_norm, compiled=config.compile)
        self.min_rows = 2 if has_batch_norm(unwrapped) else 1
        if config.micro_batch_size == "auto" and not self._buffers_differ:
            raise ModuleError(
                "microBatchSize is 'auto', and the module has SyncBatchNorm, whose ranks wait for each other in a step",
                hint="set microBatchSize to a number",
                param="microBatchSize",
            )
        # A forward pass through divided parameters is a collective, of which all ranks need as many.
        same_count = self.kind.divides_parameters
        self.micro_batches = MicroBatches(config, world, steps=steps, min_rows=self.min_rows, same_count=same_count)
        self._adapter = adapter_of(unwrapped)
        # Padding that the module ignores is cut off each micro-batch.
        self._trims = self._adapter.ignores_padding(unwrapped) and self.strategy.ranks_of_rows == 1
        if config.channels_last:
            unwrapped.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            unwrapped.register_forward_pre_hook(_in_channels_last, with_kwargs=True)
        if config.compile:
            torch.compiler.reset()  # Graphs of an earlier training in this process would change those of this one.
            unwrapped.compile()
        start = Start(example=example) if built is None else Start(built.materialise, example)
        self.unwrapped = unwrapped
        self.module = self.strategy.prepare(unwrapped, start)
        self.trained = TrainedParameters(unwrapped)
        self.sync = self.strategy.gradients(self.module)
        self.optimizer = self.strategy.optimizer(recipe, unwrapped)
        self.schedule: Schedule = self.hooks.schedule(self.optimizer) or Schedule(recipe, config, self.optimizer, steps)
        module_step: TrainingStep | None = self.hooks.training_step(self.strategy.within_forward)
        self.training_step = module_step or recipe.build_training_step()
        self.loss: Loss | None = None if self.training_step else recipe.build_loss()
        self._autocast = autocast(device, config.precision)
        # Small float16 gradients underflow unless the loss is scaled up; bfloat16 has the exponent range of float32.
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        at_once = True if self.kind.waits_for_device else None
        self.watch = LossWatch(world, at_once=at_once) if config.non_finite == "error" else None
        self.means = self.new_means("train_")
        self._has_warned_of_one_row = False
        self.padding = (0, 0)
        self.gradient_norm: torch.Tensor | None = None

    def step(self, batch: Batch, scale: float, step: int, *, measured: bool = False) -> torch.Tensor | None:
        """Takes one optimizer step.

        Returns the sum of this rank's weighted losses, a scalar tensor; `None` if all ranks have skipped the step.
        `scale` is the factor of the batch's loss sum, as from `step_scales`; `step` counts in the epoch, from 0. If
        `measured`, the gradient norm is measured even if that needs an extra pass over the gradients.
        """
        config = self._config
        self.hooks.before_zero_grad(self.optimizer)
        self._zero_grad()
        if 0 < batch.rows < self.min_rows and not self._has_warned_of_one_row:
            self._has_warned_of_one_row = True
            _LOG.warning(
                "rank %d has one row in step %d of an epoch, of which batch normalisation has no variance: its "
                "statistics do not count. Choose a batchSize whose last batch has more rows, or set syncBatchNorm",
                self._world.rank,
                step + 1,
            )
        skips = config.non_finite == "skip"
        buffers = [buffer.clone() for buffer in self.module.buffers()] if skips else []
        passes = self._gradients(batch, scale, step)
        losses = [loss for loss, _ in passes]
        loss_sum: torch.Tensor = sum(losses[1:], losses[0])
        self.sync.complete()  # This may be a collective. From here on, the gradients of the step are complete.
        self.trained.drop_unused_gradients(self.optimizer)
        self.gradient_norm = None
        if skips and not all_finite(loss_sum, self.module, self._world):
            self._skip(buffers)
            return None
        for _, metric_sums in passes:
            self.means.add(metric_sums)
        clips = config.clip_norm is not None or config.clip_value is not None
        if clips or measured or self.hooks.sees_gradients:
            self.scaler.unscale_(self.optimizer)
        self.hooks.before_update(self.optimizer)
        # Clipping by norm returns the norm before it, unless clipping by value has changed the gradients already.
        if measured and (config.clip_norm is None or config.clip_value is not None):
            self.gradient_norm = self.strategy.gradient_norm(self.module)
        if clips:
            norm = self.strategy.clip_gradients(self.module, norm=config.clip_norm, value=config.clip_value)
            # A sharded norm costs a collective to read: it is read in all ranks or in none.
            is_whole = norm is not None and not hasattr(norm, "full_tensor")
            if norm is not None and config.clip_value is None and (measured or is_whole):
                self.gradient_norm = whole(norm)
        self.schedule.step(self._take_step)
        self.strategy.after_step(self.module)
        return loss_sum

    def warm_up(self, batch: Batch) -> None:
        """Warms up the strategy's reducer with a micro-batch, and restores generators, buffers and strategy state.

        The reducer sums gradients in its final order only after a few passes. A resumed training that is not warmed up
        would sum them in another order than an uninterrupted one, and differ in the last bits.
        """
        batch, *_ = micro_batches(batch, self.micro_batches.safe_count(batch.rows), min_rows=self.min_rows)
        with untouched_generators(torch.device(self._world.device)), self.hooks.rehearsal():
            buffers = [buffer.clone() for buffer in self.module.buffers()]
            state = self.strategy.own_state.state_dict()
            for _ in range(self.sync.warm_up_passes):
                with self.sync.reducing(rows=True, warm_up=True):
                    loss, _ = self.losses_of(self.module, batch)
                    (loss * 0).backward()  # type: ignore[no-untyped-call]
                self._zero_grad()
            self.strategy.own_state.load_state_dict(state)
            self._restore(buffers)

    def losses_of(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the sum of the weighted losses of a batch, and the sums of the training step's metrics."""
        if self.training_step is not None:
            with self._autocast:
                return self.training_step(module, batch)
        output = self.forward(module, batch)
        if 0 < batch.rows < self.min_rows:
            # The batch was filled up to the minimum of rows: what was added has no loss.
            output = rows_of(output, 0, batch.rows)
        assert self.loss is not None
        return self.loss(*align(self._config.task, output, batch.label), batch.loss_weight), {}

    def evaluated(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns what `losses_of` does, of validation rows; no loss if the training step computes none for them."""
        assert self.training_step is not None
        with self._autocast:
            return self.training_step.evaluate(self.strategy.for_training_step(module), batch)

    def new_means(self, prefix: str) -> Means:
        """Returns an empty collection for the values of the training step's metrics."""
        return Means(prefix) if self.training_step is None else self.training_step.means(prefix)

    def training_mode(self) -> None:
        """Sets the module to training mode."""
        self.module.train()
        self.hooks.keep_modes()

    def end_epoch(self, record: dict[str, Any], *, validated: bool) -> None:
        """Ends an epoch for the module's own hooks and the schedule; see `Schedule.epoch_done`."""
        self.hooks.end_epoch(record)
        self.schedule.epoch_done(record, validated=validated)

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Returns the module's output for a batch, at least in float32."""
        with self._autocast:
            output = self._adapter.call(module, batch.inputs, batch.names, self.unwrapped)
        return self.widened(output)

    def widened(self, output: Any) -> Any:
        """Returns a module's output as `forward` does: the logits among named outputs, at least in float32."""
        return full_precision(prediction(output))

    def _split(self, batch: Batch, step: int) -> list[Batch]:
        """Returns the micro-batches of a step."""
        parts = micro_batches(batch, self.micro_batches.parts[step], min_rows=self.min_rows)
        if self._trims:
            parts = [part.trimmed() for part in parts]
        self.padding = padding(parts)
        return parts

    def _gradients(self, batch: Batch, scale: float, step: int) -> list[tuple[torch.Tensor, Sums]]:
        """Computes the gradients of a step over all ranks; returns the loss and metric sums of each micro-batch."""
        if self.micro_batches.tried[step]:
            return self._try(batch, scale, step)
        # The backward pass of the last micro-batch reduces the gradients of all of them.
        *first, last = self._split(batch, step)
        passes = self._accumulate(first, scale)
        with self.sync.reducing(rows=batch.rows > 0):
            passes.append(self._backward(last, scale))
        self.hooks.after_backward()
        return passes

    def _accumulate(self, parts: list[Batch], scale: float) -> list[tuple[torch.Tensor, Sums]]:
        """Accumulates the gradients of micro-batches in this rank; returns the loss and metric sums of each."""
        passes = []
        for part in parts:
            with self.sync.no_sync():
                passes.append(self._backward(part, scale))
            self.hooks.after_backward()
        return passes

    def _try(self, batch: Batch, scale: float, step: int) -> list[tuple[torch.Tensor, Sums]]:
        """Accumulates and reduces the gradients of a step, in smaller micro-batches if the device of a rank is full.

        No collective is between the first forward pass and `fits`: a rank that fails in a pass meets the others there.
        """
        device = torch.device(self._world.device)
        self.sync.before_trial()
        buffers, generators = [buffer.clone() for buffer in self.module.buffers()], generators_state(device)
        while True:
            passes: list[tuple[torch.Tensor, Sums]] = []
            full = False
            try:
                passes = self._accumulate(self._split(batch, step), scale)
            except Exception as error:
                if self.micro_batches.smallest(step) or not is_out_of_memory(error):
                    raise
                # The frames of the failed pass hold its activations, which the next try needs room for.
                traceback.clear_frames(error.__traceback__)
                full = True
            if self.micro_batches.fits(step, full=full):
                self.sync.reduce(rows=batch.rows > 0)
                return passes
            self._zero_grad()
            self._restore(buffers)
            set_generators_state(generators, device)
            let_go(self._world.device)

    def _zero_grad(self) -> None:
        """Removes the gradients of all parameters, also of those that the optimizer leaves out."""
        self.optimizer.zero_grad()
        self.trained.drop_unused_gradients(self.optimizer)

    def _restore(self, buffers: list[torch.Tensor]) -> None:
        for buffer, before in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _backward(self, batch: Batch, scale: float) -> tuple[torch.Tensor, Sums]:
        """Accumulates the gradients of a batch; returns its loss sum and metric sums."""
        with self.strategy.shared_rows(batch) as shared:
            loss, metric_sums = self._pass(shared, scale)
        if self.strategy.ranks_of_rows > 1:
            loss = loss / self.strategy.ranks_of_rows  # All ranks that compute on the same rows have computed it.
        return loss, metric_sums

    def _pass(self, batch: Batch, scale: float) -> tuple[torch.Tensor, Sums]:
        """Accumulates the gradients of rows that may be of several ranks; returns their loss sum and metric sums."""
        if self._presence is not None:
            self._presence.rows = batch.rows > 0
        few = batch.rows < self.min_rows and self._presence is None
        buffers = [buffer.clone() for buffer in self.module.buffers()] if few and self._buffers_differ else []
        if self.kind.runs_passes:
            loss, metric_sums = self.strategy.run_pass(self.module, batch, self.losses_of, scale, self._autocast)
        else:
            loss, metric_sums = self.losses_of(self.module, batch)
        # On CPUs, a loss that is not finite is an error before its gradients are sent to other ranks. Those of a
        # pipeline, whose passes are over, are not reduced yet.
        if self.watch is not None:
            self.watch.check(loss)
        if not self.kind.runs_passes:
            self.sync.backward(self.scaler.scale(loss * scale), rows=batch.rows > 0)
        if buffers:
            # The running statistics must not count placeholder rows, or one row twice.
            self._restore(buffers)
        return loss.detach(), metric_sums

    def _take_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _skip(self, buffers: list[torch.Tensor]) -> None:
        """Skips a step: restores the buffers, while schedule and strategy still count the step."""
        self._restore(buffers)
        if self.scaler.is_enabled():
            # The scale may have been too large: the scaler lowers it where it has seen infinite gradients.
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
        self.schedule.step(no_op)
        self.strategy.after_step(self.module)


def _in_channels_last(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the arguments of a call with 4-D inputs in the channels-last format, in which convolutions are fast."""

    def converted(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    return tuple(map(converted, arguments)), {name: converted(value) for name, value in keywords.items()}
