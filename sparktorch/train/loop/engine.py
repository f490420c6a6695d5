"""The optimizer step in one rank, with the module, loss, optimizer and schedule that it needs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch, micro_batches, padding
from sparktorch.base.config import TrainConfig
from sparktorch.base.deferred import Deferred
from sparktorch.base.devices import is_host, let_go
from sparktorch.base.no_op import no_op
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.loop.micro_batches import MicroBatches
from sparktorch.train.numerics.determinism import generators_state, set_generators_state, untouched_generators
from sparktorch.train.numerics.non_finite import LossWatch, all_finite
from sparktorch.train.numerics.sync_batchnorm import RealRows, buffers_of_rank, has_batch_norm, synchronise
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
        strategy_kind: The facts about the strategy that are known before there are ranks.
        strategy: The strategy, in this rank.
        unwrapped: The user's module.
        hooks: The module's own hooks, and the parts that the module brings to its training.
        base: The frozen base under the module's adapters, which is neither saved nor returned; `None` without adapters.
        min_rows: The fewest rows that a batch may have in training; smaller batches are filled up.
        micro_batches: The number of micro-batches in each step, and their size.
        module: The module as the strategy has wrapped it.
        trained_parameters: The parameters that are trained.
        gradient_sync: Reduces the gradients over the ranks.
        optimizer: The optimizer, as the strategy has built it.
        schedule: The learning rate schedule.
        training_step: The user's training step; `None` if the recipe has a loss instead.
        loss: The loss; `None` if there is a training step.
        scaler: The loss scaler, which is enabled in fp16 only.
        loss_watch: Raises an error on losses that are not finite; `None` if such steps are skipped.
        means: Means of the training step's metrics over all steps since `means` was cleared.
        padding: The number of positions in the padded inputs of this rank's last step, and how many of them hold data.
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
        self._config = config
        self._world = world
        device = torch.device(world.device)
        self.strategy_kind, _ = strategy_for(config.strategy, config.strategy_params)
        self.strategy: Strategy[Any] = build_strategy(config, world)
        if built is None and config.model_folder:
            built = recipe.build_deferred(config.seed)
        unwrapped = recipe.build_module(config.seed) if built is None else built.module
        self.unwrapped = unwrapped
        self.hooks = recipe.build_hooks(unwrapped, world, steps)
        self.base = FrozenBase.of(unwrapped, adapted_parts(unwrapped), recipe.module_seed(config.seed), recipe.packed)
        # Synchronised layers leave placeholder rows out of their statistics: they read here which rows are real.
        self._real_rows: RealRows | None = None
        has_torch_sync = any(isinstance(part, nn.SyncBatchNorm) for part in unwrapped.modules())
        if config.sync_batch_norm or (has_torch_sync and world.world_size > 1):
            self._real_rows = RealRows()
            synchronise(unwrapped, self._real_rows, everywhere=config.sync_batch_norm, compiled=config.compile)
        # A layer that normalises with the rows of this rank alone refuses a single row in training.
        self.min_rows = 2 if has_batch_norm(unwrapped) else 1
        if config.micro_batch_size == "auto" and has_torch_sync:
            raise ModuleError(
                "microBatchSize is 'auto', and the module has SyncBatchNorm, whose ranks wait for each other in a step",
                hint="set microBatchSize to a number",
                param="microBatchSize",
            )
        # If parameters are divided, each forward pass is a collective: all ranks need the same number of passes.
        same_count = self.strategy_kind.divides_parameters
        self.micro_batches = MicroBatches(config, world, steps=steps, min_rows=self.min_rows, same_count=same_count)
        self._adapter = adapter_of(unwrapped)
        # Padding that the module ignores is cut off each micro-batch. Ranks that compute on the same rows exchange
        # these rows, and need inputs of the same length for that: they cut nothing off.
        self._trims = self._adapter.ignores_padding(unwrapped) and self.strategy.ranks_of_rows == 1
        if config.channels_last:
            unwrapped.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            unwrapped.register_forward_pre_hook(_in_channels_last, with_kwargs=True)
        if config.compile:
            torch.compiler.reset()  # Graphs of an earlier training in this process would change those of this one.
            unwrapped.compile()
        start = Start(example=example) if built is None else Start(built.materialise, example)
        self.module = self.strategy.prepare(unwrapped, start)
        self.trained_parameters = TrainedParameters(unwrapped)
        self.gradient_sync = self.strategy.gradients(self.module)
        self.optimizer = self.strategy.optimizer(recipe, unwrapped)
        self.schedule: Schedule = self.hooks.schedule(self.optimizer) or Schedule(recipe, config, self.optimizer, steps)
        module_step: TrainingStep | None = self.hooks.training_step(self.strategy.within_forward)
        self.training_step = module_step or recipe.build_training_step()
        self.loss: Loss | None = None if self.training_step else recipe.build_loss()
        self._autocast = autocast(device, config.precision)
        # Small float16 gradients underflow unless the loss is scaled up; bfloat16 has the exponent range of float32.
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.loss_watch: LossWatch | None = None
        if config.non_finite == "error":
            # Reading a loss waits for the device, unless the device is the CPU or the strategy waits for it anyway.
            at_once = is_host(device) or self.strategy_kind.waits_for_device
            self.loss_watch = LossWatch(world, at_once=at_once)
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
        skips = self._config.non_finite == "skip"
        self.hooks.before_zero_grad(self.optimizer)
        self._zero_grad()
        self._warn_of_one_row(batch, step)
        buffers_before = _copies(self.module.buffers()) if skips else []
        passes = self._compute_gradients(batch, scale, step)
        losses = [loss for loss, _ in passes]
        loss_sum: torch.Tensor = sum(losses[1:], losses[0])
        self.gradient_sync.complete()  # This may be a collective. From here on, the gradients are complete.
        # Gradients that the optimizer does not use must not count when gradients are checked, measured and clipped.
        self.trained_parameters.drop_unused_gradients(self.optimizer)
        self.gradient_norm = None
        if skips and not all_finite(loss_sum, self.module, self._world):
            self._skip(buffers_before)
            return None
        for _, metric_sums in passes:
            self.means.add(metric_sums)
        if self._clips or measured or self.hooks.sees_gradients:
            self.scaler.unscale_(self.optimizer)
        self.hooks.before_update(self.optimizer)
        self.gradient_norm = self._clip_gradients(measured=measured)
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
            buffers_before = _copies(self.module.buffers())
            state_before = self.strategy.own_state.state_dict()
            for _ in range(self.gradient_sync.warm_up_passes):
                with self.gradient_sync.reducing(rows=True, warm_up=True):
                    loss, _ = self.losses_of(self.module, batch)
                    (loss * 0).backward()  # type: ignore[no-untyped-call]
                self._zero_grad()
            self.strategy.own_state.load_state_dict(state_before)
            _restore(self.module.buffers(), buffers_before)

    def losses_of(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the sum of the weighted losses of a batch, and the sums of the training step's metrics."""
        if self.training_step is not None:
            with self._autocast:
                return self.training_step(module, batch)
        output = self.forward(module, batch)
        if 0 < batch.rows < self.min_rows:
            # The rows at the end were added to fill the batch up, and have no loss.
            output = rows_of(output, 0, batch.rows)
        assert self.loss is not None
        return self.loss(*align(self._config.task, output, batch.label), batch.loss_weight), {}

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns loss and metric sums of the training step for validation rows; the loss is `None` if it has none."""
        assert self.training_step is not None
        with self._autocast:
            return self.training_step.evaluate(self.strategy.shown(module), batch)

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
        return self.widen(output)

    def widen(self, output: Any) -> Any:
        """Returns a module's output as `forward` does: only the logits, if outputs have names, in float32 at least."""
        return full_precision(prediction(output))

    def _split(self, batch: Batch, step: int) -> list[Batch]:
        """Returns the micro-batches of a step."""
        parts = micro_batches(batch, self.micro_batches.parts[step], min_rows=self.min_rows)
        if self._trims:
            parts = [part.trimmed() for part in parts]
        self.padding = padding(parts)
        return parts

    def _compute_gradients(self, batch: Batch, scale: float, step: int) -> list[tuple[torch.Tensor, Sums]]:
        """Computes the gradients of a step over all ranks; returns the loss and metric sums of each micro-batch."""
        if self.micro_batches.tried[step]:
            return self._accumulate_until_it_fits(batch, scale, step)
        # The backward pass of the last micro-batch reduces the gradients of all of them.
        *first, last = self._split(batch, step)
        passes = self._accumulate(first, scale)
        with self.gradient_sync.reducing(rows=batch.rows > 0):
            passes.append(self._backward(last, scale))
        self.hooks.after_backward()
        return passes

    def _accumulate(self, parts: list[Batch], scale: float) -> list[tuple[torch.Tensor, Sums]]:
        """Accumulates the gradients of micro-batches in this rank; returns the loss and metric sums of each."""
        passes = []
        for part in parts:
            with self.gradient_sync.no_sync():
                passes.append(self._backward(part, scale))
            self.hooks.after_backward()
        return passes

    def _accumulate_until_it_fits(self, batch: Batch, scale: float, step: int) -> list[tuple[torch.Tensor, Sums]]:
        """Accumulates and reduces the gradients of a step, in smaller micro-batches if the device of a rank is full.

        A rank that runs out of memory must still reach `fits`, where the other ranks wait. So no collective may come
        between the first forward pass and `fits`.
        """
        device = torch.device(self._world.device)
        self.gradient_sync.before_trial()
        buffers_before = _copies(self.module.buffers())
        generators_before = generators_state(device)
        while True:
            passes: list[tuple[torch.Tensor, Sums]] = []
            ran_out = False
            try:
                passes = self._accumulate(self._split(batch, step), scale)
            except Exception as error:
                if self.micro_batches.cannot_split_further(step) or not is_out_of_memory(error):
                    raise
                # The frames of the failed pass hold its activations: the next try needs their memory.
                traceback.clear_frames(error.__traceback__)
                ran_out = True
            if self.micro_batches.fits(step, ran_out=ran_out):
                self.gradient_sync.reduce(rows=batch.rows > 0)
                return passes
            self._zero_grad()
            _restore(self.module.buffers(), buffers_before)
            set_generators_state(generators_before, device)
            let_go(self._world.device)

    def _backward(self, batch: Batch, scale: float) -> tuple[torch.Tensor, Sums]:
        """Accumulates the gradients of a micro-batch; returns its loss sum and metric sums."""
        with self.strategy.shared_rows(batch) as shared:
            loss, metric_sums = self._run_pass(shared, scale)
        if self.strategy.ranks_of_rows > 1:
            # Several ranks have computed this loss, and the sum over all ranks must count it once.
            loss = loss / self.strategy.ranks_of_rows
        return loss, metric_sums

    def _run_pass(self, batch: Batch, scale: float) -> tuple[torch.Tensor, Sums]:
        """Runs forward and backward of a batch with the rows of all ranks that share it; returns its sums."""
        if self._real_rows is not None:
            self._real_rows.set_from(batch)
        # The running statistics of a rank must count neither placeholder rows nor a row that fills its batch up: they
        # are set back after the pass. Synchronised layers leave these rows out themselves.
        counts = batch.rows >= self.min_rows
        statistics_before = [] if counts else _copies(buffers_of_rank(self.module))
        if self.strategy_kind.runs_passes:
            loss, metric_sums = self.strategy.run_pass(self.module, batch, self.losses_of, scale, self._autocast)
        else:
            loss, metric_sums = self.losses_of(self.module, batch)
        # A loss that is not finite is an error before its gradients are sent to other ranks, if losses are checked at
        # once. A pipeline's passes are over here, but its gradients are not reduced yet.
        if self.loss_watch is not None:
            self.loss_watch.check(loss)
        if not self.strategy_kind.runs_passes:
            self.gradient_sync.backward(self.scaler.scale(loss * scale), rows=batch.rows > 0)
        if not counts:
            _restore(buffers_of_rank(self.module), statistics_before)
        return loss.detach(), metric_sums

    def _zero_grad(self) -> None:
        """Removes the gradients of all parameters, also of those that the optimizer leaves out."""
        self.optimizer.zero_grad()
        self.trained_parameters.drop_unused_gradients(self.optimizer)

    def _warn_of_one_row(self, batch: Batch, step: int) -> None:
        """Warns, once in a training, that batch normalisation cannot count a step in which the rank has one row."""
        if self._has_warned_of_one_row or not 0 < batch.rows < self.min_rows:
            return
        self._has_warned_of_one_row = True
        _LOG.warning(
            "rank %d has one row in step %d of an epoch, of which batch normalisation has no variance: its "
            "statistics do not count. Choose a batchSize whose last batch has more rows, or set syncBatchNorm",
            self._world.rank,
            step + 1,
        )

    @property
    def _clips(self) -> bool:
        return self._config.clip_norm is not None or self._config.clip_value is not None

    def _clip_gradients(self, *, measured: bool) -> torch.Tensor | None:
        """Clips the gradients as configured; returns their norm before that, or `None` if nothing has measured it."""
        config = self._config
        if not self._clips:
            return self.strategy.gradient_norm(self.module) if measured else None
        if config.clip_value is not None:
            # Clipping by value comes first, so that the norm that clipping by norm returns is not the one before.
            norm_before = self.strategy.gradient_norm(self.module) if measured else None
            self.strategy.clip_gradients(self.module, norm=config.clip_norm, value=config.clip_value)
            return norm_before
        norm = self.strategy.clip_gradients(self.module, norm=config.clip_norm, value=None)
        if norm is None:
            return None
        # Reading a sharded norm is a collective: all ranks read it, in the steps that are measured.
        is_sharded = hasattr(norm, "full_tensor")
        return whole(norm) if measured or not is_sharded else None

    def _take_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _skip(self, buffers_before: list[torch.Tensor]) -> None:
        """Skips a step: restores the buffers, while schedule and strategy still count the step."""
        _restore(self.module.buffers(), buffers_before)
        if self.scaler.is_enabled():
            # The scaler lowers its scale if it has seen infinite gradients, because the scale may have been too large.
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
        self.schedule.step(no_op)
        self.strategy.after_step(self.module)


def _copies(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in buffers]


def _restore(buffers: Iterable[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Sets buffers to what `_copies` returned for them; a pass may have replaced the buffers by other tensors."""
    for buffer, before in zip(buffers, copies, strict=True):
        buffer.copy_(before)


def _in_channels_last(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the arguments of a call with 4-D inputs in the channels-last format, in which convolutions are fast."""

    def converted(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    return tuple(map(converted, arguments)), {name: converted(value) for name, value in keywords.items()}
