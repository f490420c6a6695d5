"""What each strategy takes of a worker: memory by what it keeps, and what it sends in a step.

Parameters, gradients and optimizer state are those of the ZeRO paper (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 5), counted for the layout that a strategy gives each tensor;
`benchmarks.memory` measures the same. Activations are what autograd keeps of a few rows, times the rows of a worker.
Collectives are counted as rings: of `b` bytes, each of `n` ranks sends `(n - 1) / n * b` to gather or to scatter, twice
that to reduce for all. Operations are counted by torch, for a forward pass; a backward pass has twice as many.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from sparktorch.base.batch import Batch
from sparktorch.base.config import Precision, TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.train.checkpoint.tensors import create_optimizer_state, own_optimizer
from sparktorch.train.engine import Engine
from sparktorch.train.measured import kept, kept_around, of_stages, operations
from sparktorch.train.needs import Need, Plan
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.fsdp import ShardingOptions, units
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.strategies.registry import (
    check_module,
    check_strategy,
    check_workers,
    strategy_for,
)
from sparktorch.train.tensor_parallel.sequence import is_below, outermost
from sparktorch.train.tensor_parallel.styles import HEADS, OWN_ROWS, SUMMED, check_plan

__all__ = ["plan", "reduced"]

_log = logging.getLogger(__name__)

_ROWS = 2  # of the pass that is measured, and of a second one twice as many
_SIZES = (2, 4, 8)
_SHARED = ("ddp", "zero1", "zero2", "zero3")


def plan(
    recipe: Recipe,
    config: TrainConfig,
    workers: int,
    first: Batch,
    *,
    memory: int | None = None,
    speed: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Returns what each strategy takes of a worker.

    It runs forward passes on a few rows, of a module that has shapes and no values where that is possible. Instances,
    LightningModules, adapters and modules that look at values take as much memory here as a training.

    Args:
        recipe: What is trained.
        config: How it is trained; its strategy and options are tried besides those of the table.
        workers: Number of workers.
        first: A batch of two rows.
        memory: Bytes that a worker has.
        speed: Floating-point operations a second that a worker reaches; with `bandwidth`, steps are timed.
        bandwidth: Bytes a second that a worker sends.

    Raises:
        ConfigError: Inputs are sparse or jagged.
        ModuleError: The module cannot be built or called.
    """
    for name, tensor in first.named.items():
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"input {name!r} is of layout {tensor.layout}, and a plan is made of rows with as many numbers each",
                hint="set inputLayouts to 'dense' or 'padded' for the column",
                param="inputLayouts",
            )
    measured = _Measured(recipe, config, workers, first)
    tried: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _SHARED] + _meshes(workers)
    own = (config.strategy, dict(config.strategy_params))
    if own not in tried and own[0] in (*_SHARED, "mesh"):
        tried.append(own)
    needs = tuple(measured.need(name, options) for name, options in tried)
    return Plan(
        needs=needs,
        workers=workers,
        rows=measured.rows,
        parameters=measured.count,
        memory=memory,
        speed=speed,
        bandwidth=bandwidth,
    )


def _meshes(workers: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the sizes of meshes that the table shows."""
    shards = [size for size in _SIZES if workers % size == 0 and size < workers]
    found: list[tuple[str, dict[str, Any]]] = [("mesh", {"shard": size}) for size in shards]
    found += [("mesh", {"pipeline": size}) for size in _SIZES if workers % size == 0]
    for size in _SIZES:
        if workers % size == 0:
            found.append(("mesh", {"tensor": size}))
            if workers > size:
                found.append(("mesh", {"tensor": size, "shard": workers // size}))
    return found


class _Measured:
    """The module as one process trains it."""

    def __init__(self, recipe: Recipe, config: TrainConfig, workers: int, first: Batch) -> None:
        self._recipe, self._config, self._workers = recipe, config, workers
        self._share = share = -(-config.batch_size // workers)  # of the rows of a step
        size = config.micro_batch_size
        self.rows = min(share, size) if isinstance(size, int) else -(-share // config.accumulation_steps)
        self._passes = -(-share // self.rows)  # of a step
        # fp16 is as large as bf16, and not every CPU has it.
        precision: Precision = "bf16" if config.precision in ("bf16", "fp16") else "fp32"
        alone = replace(
            config,
            strategy="ddp",
            strategy_params={},
            compile=False,
            micro_batch_size=None,
            precision=precision,
            model_folder=None,
        )
        self._first = first
        self._inputs = sum(tensor.nbytes for tensor in first.tensors) // first.rows
        shapes = replace(recipe, initial=recipe.packed)  # what is in a folder is not read
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # not on "meta", where nothing is cast as by autocast
                engine = Engine(shapes, alone, World(), steps=1)
            self._measure(engine, first)
        except Exception as error:  # many: torch has no shapes of what an operator returns, or asks for a value
            _log.debug("%s is measured with values: %s", recipe.module, error)
            self._measure(Engine(recipe, alone, World(), steps=1), first)
        self.count = sum(parameter.numel() for parameter in self._parameters.values())

    def _measure(self, engine: Engine, first: Batch) -> None:
        self._module = engine.unwrapped
        self._parameters = dict(self._module.named_parameters())
        engine.training_mode()
        less, more = (kept(engine, _rows_of(first, rows)) for rows in (_ROWS, 2 * _ROWS))
        self._kept = {name: (more[name] - less[name]) // _ROWS for name in more}  # of a row
        self._kept_once = max(0, 2 * less[""] - more[""])  # of any rows, such as the weights as autocast has them
        self._around = {}
        with suppress(SparkTorchError):  # `need` says why the options do not fit
            _, options = strategy_for(self._config.strategy, self._config.strategy_params)
            if isinstance(options, ShardingOptions) and options.activation_checkpointing:
                parts = units(self._module, options)
                less, more = (kept_around(engine, _rows_of(first, rows), parts) for rows in (_ROWS, 2 * _ROWS))
                self._around = {name: (more[name] - less[name]) // _ROWS for name in more}
        self._operations = operations(engine, _rows_of(first, _ROWS))
        create_optimizer_state(engine.optimizer)
        self._state = {
            parameter: sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor))
            for parameter, values in own_optimizer(engine.optimizer).state.items()
        }

    def need(self, strategy: str, options: dict[str, Any]) -> Need:
        """Returns what a worker needs under a strategy."""
        config = replace(self._config, strategy=strategy, strategy_params=options)
        try:
            check_strategy(config, self._recipe)
            check_workers(config, self._workers)
            check_module(config, self._recipe, self._workers, self._module, self._first)
        except SparkTorchError as error:
            return Need(strategy=strategy, options=options, refused=error.what)
        if strategy in ("ddp", "zero1"):
            return self._copies(strategy, options)
        return self._shards(strategy, options)

    def _copies(self, strategy: str, options: dict[str, Any]) -> Need:
        """Every worker has the whole model; under "zero1", each has the state of its own share of the parameters."""
        trained = [p for p in self._parameters.values() if p.requires_grad]
        gradients, state = sum(p.nbytes for p in trained), self._state_of(trained)
        sent = reduced(gradients, self._workers)
        if strategy == "zero1":
            shares: list[list[nn.Parameter]] = [[] for _ in range(self._workers)]
            for parameter in sorted(trained, key=torch.Tensor.numel, reverse=True):  # as torch divides them
                min(shares, key=lambda share: sum(map(torch.Tensor.numel, share))).append(parameter)
            state = max(map(self._state_of, shares))
            sent += _gathered(gradients, self._workers)
        return Need(
            strategy=strategy,
            options=options,
            parameters=self._bytes_of(self._parameters.values()) + self._buffers,
            gradients=gradients,
            state=state + self._averages(gradients),
            activations=self._activations()[0] + self._kept_once,
            sent=sent,
            operations=self._of_step(),
        )

    def _shards(self, strategy: str, options: dict[str, Any]) -> Need:
        """Every worker has a part of each tensor, and gathers those of a unit at a time."""
        sharding: Any
        sharding, known = strategy_for(strategy, options)
        sizes = known.sizes(self._workers) if strategy == "mesh" else (1, 1, self._workers, 1)
        data, pipeline, shard, tensor = sizes
        plan = check_plan(self._module, known.plan, tensor, staged=pipeline > 1) if tensor > 1 else {}
        by_positions = outermost(self._module) if strategy == "mesh" and known.sequence else []
        of_worker = {parameter: parameter.nbytes for parameter in self._parameters.values()}  # before it is sharded
        for name, style in plan.items():
            if style == SUMMED:
                continue
            for kind, parameter in self._module.get_submodule(name).named_parameters(recurse=False):
                if kind == "weight" or style != "rowwise":
                    of_worker[parameter] //= tensor
        passed, at_once, in_flight, bubble, slowest = 0, 1.0, 1, 0.0, 1.0
        if pipeline > 1:
            of_worker, passed, slowest = self._of_stages(known, of_worker, plan)
            at_once = 1.0 if known.schedule == "gpipe" else min(1.0, pipeline / known.count)
            in_flight = round(at_once * known.count)  # each has weights of its own as autocast has them
            bubble = known.bubble
        part = {p: math.ceil(len(p) / shard) / max(len(p), 1) if p.dim() else 1.0 for p in of_worker}
        kept = {p: int(size * part[p]) for p, size in of_worker.items()}
        trained = [p for p in kept if p.requires_grad]
        whole = [sum(of_worker.get(p, 0) for p in group) for group in self._units(known)]
        everything, gradients = sum(of_worker.values()), sum(of_worker[p] for p in trained)
        kept_gathered = strategy == "zero2" or pipeline > 1  # from forward to backward
        gathered = everything if kept_gathered else whole[0] + 2 * max(whole[1:], default=0)
        sharded = sharding.shards(known, self._workers)
        gathered = int(min(gathered, everything) * _width(known.param_dtype)) if sharded else 0
        passes = 1 if kept_gathered else 2  # forward, and again backward
        sent = self._passes * passes * int(_gathered(everything, shard) * _width(known.param_dtype))
        sent += int(_gathered(gradients, shard) * _width(known.reduce_dtype or known.param_dtype))
        # Until the last pass of a step has reduced them, a worker has whole gradients.
        whole_gradients = sharded and (self._passes > 1 or pipeline > 1)
        sent += reduced(sum(kept[p] for p in trained), data)
        together = tensor * pipeline  # workers with the same rows
        inputs = self._gathered_within(plan, by_positions)
        whole_inputs = inputs if inputs and not known.recompute_allgather else 0
        exchanged = self._exchanged(plan, tensor, by_positions) + (inputs - whole_inputs) // 2
        sent += self._share * tensor * reduced(exchanged, tensor)
        sent += self._share * together * (_gathered(self._inputs, together) + 2 * passed)
        again = 0.0
        if known.activation_checkpointing:
            again = pipeline / known.count if pipeline > 1 else 1.0
        activations, of_unit = self._activations(plan, tensor, pipeline, at_once, by_positions, again, whole_inputs)
        weights = 0 if known.param_dtype else self._kept_once // (tensor * pipeline)  # as autocast has them
        if known.activation_checkpointing:  # after the forward pass, a unit at a time has its own
            activations += max(weights, of_unit + weights * max(whole[1:], default=0) // max(everything, 1))
        else:
            activations += in_flight * weights
        own_gradients = sum(kept[p] for p in trained)
        state = sum(int(self._state.get(p, 0) * kept[p] / max(p.nbytes, 1)) for p in trained)
        state += self._averages(own_gradients)
        return Need(
            strategy=strategy,
            options=options,
            parameters=sum(kept.values()) + self._buffers,
            gradients=gradients if whole_gradients else own_gradients,
            state=state,
            on_host=sum(kept.values()) + state + (0 if whole_gradients else own_gradients) if known.cpu_offload else 0,
            gathered=gathered,
            activations=activations,
            sent=sent,
            operations=int(slowest * self._of_step(plan, tensor, 4 if known.activation_checkpointing else 3)),
            bubble=bubble,
        )

    def _of_stages(
        self, options: MeshOptions, sizes: Mapping[nn.Parameter, int], styles: Mapping[str, str]
    ) -> tuple[dict[nn.Parameter, int], int, float]:
        """Returns what the workers with most have in their stages.

        Returns:
            The parameters of one; the bytes of a row that are passed on; and the operations of one, relative to those
            of equal stages.
        """
        cut = Cut(self._module, options.stages, options.split, styles)
        of_ranks: list[dict[nn.Parameter, int]] = [{} for _ in range(options.stages // options.stages_per_rank)]
        for name, parameter in self._parameters.items():
            of_ranks[cut.stage_of[name] % len(of_ranks)][parameter] = sizes[parameter]
        most = max(of_ranks, key=lambda kept: sum(kept.values()))
        work_of, passed = of_stages(cut, self._module, self._first)
        work = [sum(work_of[rank :: len(of_ranks)]) for rank in range(len(of_ranks))]
        slowest = max(work) * len(work) / sum(work) if any(work) else 1.0
        return most, passed // self._first.rows, slowest

    def _units(self, options: ShardingOptions) -> list[list[nn.Parameter]]:
        """Returns the parameters that are gathered together: those in no unit first, then those of each unit."""
        taken: set[nn.Parameter] = set()
        groups = []
        for unit in units(self._module, options):
            own = [p for p in unit.parameters() if p not in taken]
            taken.update(own)
            groups.append(own)
        return [[p for p in self._parameters.values() if p not in taken], *groups]

    def _activations(
        self,
        plan: Mapping[str, str] | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        at_once: float = 1.0,
        by_positions: Sequence[str] = (),
        again: float = 0.0,
        whole_inputs: int = 0,
    ) -> tuple[int, int]:
        """Returns the bytes of the activations and inputs of a worker, which has the rows of all that share them.

        The second number is what a unit computes again, of them not kept from forward to backward.

        What is between a layer with a divided output and one with a divided input is divided, too, and so is what is
        within attention, and all that is within the parts `by_positions`, but for the `whole_inputs` of layers there.
        Behind a layer that returns a worker's own rows, it has these. Of a pipeline, it has an equal part of the
        activations, of the share `at_once` of the rows. Units that compute theirs again keep their inputs, which are
        divided by positions only, and one of them at a time its activations, of the share `again` of the rows.
        """
        styles = ((name, style) for name, style in (plan or {}).items() if not is_below(name, by_positions))
        divided = [name for name, style in styles if style in ("colwise", OWN_ROWS, HEADS)]
        divided += [f"{name}:within" for name in by_positions]
        within = sum(self._kept.get(name, 0) for name in divided)
        kept = tensor * (self._kept[""] - within) + within + (tensor - 1) * whole_inputs
        of_unit = 0.0
        if again and self._kept[""]:
            of_unit = self._around["again"] * kept / self._kept[""]
            kept = tensor * self._around[""] + (1 if by_positions else tensor) * self._around["inputs"]
        return (
            int(self.rows * (kept * at_once + tensor * pipeline * self._inputs)),
            int(self.rows * of_unit * again),
        )

    def _of_step(self, plan: Mapping[str, str] | None = None, tensor: int = 1, forwards: int = 3) -> int:
        """Returns the operations of a worker in a step; a backward pass has twice those of a forward pass.

        Workers that share layers compute those that are not divided for the rows of all; stages count as equal parts.
        """
        divided = sum(self._operations[name] for name, style in (plan or {}).items() if style != SUMMED)
        return int(forwards * self._share * (tensor * (self._operations[""] - divided) + divided))

    def _exchanged(self, plan: Mapping[str, str], tensor: int, by_positions: Sequence[str]) -> int:
        """Returns the bytes of a row that workers which share layers sum up: outputs forward, inputs backward.

        An output that is exchanged for own rows goes from one worker to another, forward and backward. Within the parts
        `by_positions`, a sum is scattered and gathered at other times; the output of the part is gathered once more,
        and so is the gradient of its input.
        """
        ends = {"rowwise": ("out",), "colwise": ("in",), "colwise_gather_output": ("in", "out")}
        ends |= {OWN_ROWS: ("in",), HEADS: ("in", "out")}
        # The output projection of attention is counted as that of the attention: torch does not call it as a layer.
        sums = [f"{name}:{end}" for name, style in plan.items() for end in ends.get(style, ())]
        passed = [f"{name}:out" for name, style in plan.items() if style == OWN_ROWS]
        sums += [f"{name}:out" for name in by_positions]
        found = sum(self._kept.get(key, 0) // tensor for key in passed)
        return found + sum(self._kept.get(key, 0) for key in sums)

    def _gathered_within(self, plan: Mapping[str, str], by_positions: Sequence[str]) -> int:
        """Returns the bytes of a row that layers within the parts take: as many as those behind them return."""
        inner = {name: style for name, style in plan.items() if is_below(name, by_positions)}
        ends = [f"{name}:out" for name, style in inner.items() if style in ("rowwise", HEADS)]
        return sum(self._kept.get(key, 0) for key in ends)

    def _state_of(self, parameters: Iterable[nn.Parameter]) -> int:
        return sum(self._state.get(parameter, 0) for parameter in parameters)

    def _averages(self, parameters: int) -> int:
        """Returns the bytes of the moving averages of trained parameters of so many bytes."""
        return 0 if self._config.ema_decay is None else parameters

    def _bytes_of(self, parameters: Iterable[nn.Parameter]) -> int:
        return sum(parameter.nbytes for parameter in parameters)

    @property
    def _buffers(self) -> int:
        return sum(buffer.nbytes for buffer in self._module.buffers())


def reduced(size: float, ranks: int) -> int:
    """Returns the bytes that each of some ranks sends to sum up `size` bytes in all of them."""
    return 2 * _gathered(size, ranks)


def _width(dtype: str | None) -> float:
    """Returns the width of numbers in a dtype of `ShardingOptions`, relative to that of parameters."""
    return 1.0 if dtype in (None, "fp32") else 0.5


def _gathered(size: float, ranks: int) -> int:
    return int(size * (ranks - 1) / ranks)


def _rows_of(batch: Batch, rows: int) -> Batch:
    """Returns a batch of as many rows, those of `batch` again and again."""

    def repeated(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.cat([tensor] * (rows // batch.rows))

    return replace(
        batch,
        inputs=tuple(torch.cat([tensor] * (rows // batch.rows)) for tensor in batch.inputs),
        label=repeated(batch.label),
        weight=repeated(batch.weight),
        loss_weight=repeated(batch.loss_weight),
        rows=rows,
    )
