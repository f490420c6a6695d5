"""What each strategy takes of a worker: memory by what it keeps, and the bytes that it sends in a step.

Parameters, gradients and optimizer state are those of the ZeRO paper (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 5), counted for the layout that a strategy gives each tensor;
`benchmarks.memory` measures the same. Activations are what autograd keeps of a few rows, times the rows of a worker.
Collectives are counted as rings: of `b` bytes, each of `n` ranks sends `(n - 1) / n * b` to gather or to scatter, twice
that to reduce for all.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.base.config import Precision, TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.train.checkpoint.tensors import create_optimizer_state, own_optimizer
from sparktorch.train.loop.engine import Engine
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.plan.table import Need, Plan
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.units import ShardingOptions, recomputed, units
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.strategies.registry import check_module, check_strategy, check_workers, strategy_for
from sparktorch.train.tensor_parallel.styles import DIVIDED, SUMMED, check_plan

__all__ = ["plan"]

_log = logging.getLogger(__name__)

_SIZES = (2, 4, 8)
_SHARED = ("ddp", "zero1", "zero2", "zero3")
# Where ranks that share a layer exchange its values: inputs backward, outputs forward.
_ENDS = {"rowwise": "out", "colwise": "in", "colwise_gather_output": "in out"}


def plan(recipe: Recipe, config: TrainConfig, workers: int, first: Batch, *, memory: int | None = None) -> Plan:
    """Returns what each strategy takes of a worker, which has so many bytes of memory, if they are given.

    It runs forward passes on `first`, a batch of two rows, and on twice as many, of a module that has shapes and no
    values where that is possible. Instances, modules that bring their training, adapters, and modules that look at
    values take as much memory here as a training. The configuration's own strategy is tried besides those of the table.
    A `ConfigError` refuses inputs that are sparse or jagged; a `ModuleError` says that the module cannot be built or
    called.
    """
    for name, tensor in first.named.items():
        if tensor.layout is not torch.strided:
            what = f"input {name!r} is sparse or jagged, and a plan is made of rows with as many numbers each"
            raise ConfigError(what, hint="set inputLayouts to 'dense' or 'padded' for the column", param="inputLayouts")
    measured = _Measured(recipe, config, workers, first)
    tried: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _SHARED] + _meshes(workers)
    configured = (config.strategy, dict(config.strategy_params))
    by_function = isinstance(config.strategy_params.get("plan"), str)  # Nothing is known of what it divides.
    if configured not in tried and config.strategy in (*_SHARED, "mesh") and not by_function:
        tried.append(configured)
    needs = tuple(measured.need(name, options) for name, options in tried)
    return Plan(needs=needs, workers=workers, rows=measured.rows, parameters=measured.count, memory=memory)


def _meshes(workers: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the sizes of meshes that the table shows."""
    sizes = [size for size in _SIZES if workers % size == 0]
    meshes: list[dict[str, Any]] = [{"shard": size} for size in sizes if size < workers]
    meshes += [{"pipeline": size} for size in sizes]
    for size in sizes:
        meshes.append({"tensor": size})
        if workers > size:
            meshes.append({"tensor": size, "shard": workers // size})
    return [("mesh", options) for options in meshes]


class _Measured:
    """The module as one process trains it, and what autograd keeps of a row."""

    def __init__(self, recipe: Recipe, config: TrainConfig, workers: int, first: Batch) -> None:
        self._recipe, self._config, self._workers, self._first = recipe, config, workers, first
        # A worker has so many rows of a step, and takes so many passes over them.
        self._share = share = -(-config.batch_size // workers)
        size = config.micro_batch_size
        self.rows = min(share, size) if isinstance(size, int) else -(-share // config.accumulation_steps)
        self._passes = -(-share // self.rows)
        self._inputs = sum(tensor.nbytes for tensor in first.tensors) // first.rows
        # fp16 is as large as bf16, and not every CPU has it.
        precision: Precision = "bf16" if config.precision in ("bf16", "fp16") else "fp32"
        plain: dict[str, Any] = {"strategy": "ddp", "strategy_params": {}, "compile": False, "micro_batch_size": None}
        alone = replace(config, precision=precision, model_folder=None, **plain)
        shapes = replace(recipe, initial=recipe.packed)  # Weights in a folder are not read.
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # On "meta", autocast would cast nothing.
                engine = Engine(shapes, alone, World(), steps=1)
            self._measure(engine)
        except Exception as error:  # Torch may have no shapes of what an operator returns, or ask for a value.
            _log.debug("%s is measured with values: %s", recipe.module, error)
            self._measure(Engine(recipe, alone, World(), steps=1))
        self.count = sum(parameter.numel() for parameter in self._parameters.values())

    def _measure(self, engine: Engine) -> None:
        self._module = engine.unwrapped
        self._parameters = dict(self._module.named_parameters())
        engine.training_mode()
        rows, fields = self._first.rows, vars(self._first)
        twice = {**pytree.tree_map_only(torch.Tensor, _doubled, fields), "rows": 2 * rows}
        less, more = (_Activations(engine, Batch(**values)).sizes for values in (fields, twice))
        self._of_row = Counter({name: (more[name] - less[name]) // rows for name in more})
        # What is kept once for any rows are the weights as autocast has them.
        self._once = max(0, 2 * less[""] - more[""])
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
        kind: Any
        kind, layout = strategy_for(strategy, options)
        # Under these two, a worker has whole tensors; else a part of each, and it gathers those of a unit.
        whole_tensors = strategy in ("ddp", "zero1")
        if whole_tensors:
            layout = ShardingOptions()
        sizes = (1, 1, 1 if whole_tensors else self._workers, 1)
        _, pipeline, shard, tensor = layout.sizes(self._workers) if strategy == "mesh" else sizes
        data = self._workers // (pipeline * shard * tensor)
        styles = check_plan(self._module, layout.plan, tensor) if tensor > 1 else {}
        # The parameters of a worker before these are sharded, in bytes.
        of_worker = {parameter: parameter.nbytes for parameter in self._parameters.values()}
        for name, style in styles.items():
            for kind_of, parameter in self._module.get_submodule(name).named_parameters(recurse=False):
                if style != SUMMED and (kind_of == "weight" or style != "rowwise"):
                    of_worker[parameter] //= tensor
        passed_on = 0
        if pipeline > 1:
            of_worker, passed_on = self._of_stages(layout, of_worker)
        part = {p: math.ceil(len(p) / shard) / max(len(p), 1) if p.dim() else 1.0 for p in of_worker}
        held = {p: int(size * part[p]) for p, size in of_worker.items()}
        parameters = sum(held.values())
        trained = sum(size for p, size in held.items() if p.requires_grad)
        everything, gradients = sum(of_worker.values()), sum(size for p, size in of_worker.items() if p.requires_grad)
        wrapped = [] if whole_tensors else units(self._module, layout)
        until_backward = strategy == "zero2" or pipeline > 1  # What is gathered in forward is kept.
        gathered = 0
        inside = [sum(of_worker.get(p, 0) for p in unit.parameters()) for unit in wrapped]
        if not whole_tensors and kind.rank.shards(layout, self._workers):
            largest_at_once = min(everything, everything - sum(inside) + 2 * max([0, *inside]))
            gathered = everything if until_backward else largest_at_once
        width = _width(layout.param_dtype)
        twice = 0 if until_backward else sum(inside)  # Backward gathers those of units again, but not the rest.
        sent = self._passes * int(_of_ring(everything + twice, shard) * width)
        sent += int(_of_ring(gradients, shard) * _width(layout.reduce_dtype or layout.param_dtype))
        sent += 2 * _of_ring(trained, data)
        same_rows = tensor * pipeline  # So many workers compute on the same rows.
        sent += self._share * same_rows * (_of_ring(self._inputs, same_rows) + 2 * passed_on)
        exchanged = sum(
            self._of_row[f"{name}:{end}"] for name, style in styles.items() for end in _ENDS.get(style, "").split()
        )
        sent += self._share * tensor * 2 * _of_ring(exchanged, tensor)
        # Until the last pass of a step has reduced them, a worker has whole gradients.
        whole_gradients = bool(gathered) and (self._passes > 1 or pipeline > 1)
        states = {p: int(self._state.get(p, 0) * held[p] / max(p.nbytes, 1)) for p in held if p.requires_grad}
        state = sum(states.values())
        if strategy == "zero1":  # Each worker has the state of its own share of the parameters, as torch divides them.
            shares: list[list[nn.Parameter]] = [[] for _ in range(self._workers)]
            for parameter in sorted(states, key=torch.Tensor.numel, reverse=True):
                min(shares, key=_size).append(parameter)
            state = max(sum(states[p] for p in share) for share in shares)
            sent += _of_ring(gradients, self._workers)
        state += trained if self._config.ema_decay else 0
        return Need(
            strategy=strategy,
            options=options,
            parameters=parameters + _size(self._module.buffers()),
            gradients=gradients if whole_gradients else trained,
            state=state,
            on_host=parameters + state + (0 if whole_gradients else trained) if layout.cpu_offload else 0,
            gathered=int(gathered * width),
            activations=self._activations(layout, styles, tensor, pipeline, wrapped),
            sent=sent,
        )

    def _of_stages(
        self, options: MeshOptions, sizes: Mapping[nn.Parameter, int]
    ) -> tuple[dict[nn.Parameter, int], int]:
        """Returns the parameters of the worker with most, and the bytes of a row that stages pass on."""
        cut = Cut(self._module, options.stages, options.split)
        of_ranks: list[dict[nn.Parameter, int]] = [{} for _ in range(options.stages // options.stages_per_rank)]
        for name, parameter in self._parameters.items():
            of_ranks[cut.stage_of[name] % len(of_ranks)][parameter] = sizes[parameter]
        arguments, values, passed_on = Arguments.of_batch(self._first, self._module), list[torch.Tensor](), 0
        for number in range(options.stages):
            stage = cut.stage(number)
            stage.arguments, passed_on = arguments, max(passed_on, _size(values))
            values = [*stage(*values, **arguments.named)]

        def total(parameters: Mapping[nn.Parameter, int]) -> int:
            return sum(parameters.values())

        return max(of_ranks, key=total), passed_on // self._first.rows

    def _activations(
        self, options: Any, styles: Mapping[str, str], tensor: int, pipeline: int, wrapped: Sequence[nn.Module]
    ) -> int:
        """Returns the bytes of the activations and inputs of a worker, which has the rows of all that share them.

        What is between a layer with a divided output and one with a divided input is divided, too. Of a pipeline, a
        worker has an equal part of the activations, of as many micro-batches as its schedule keeps. Units that compute
        theirs again keep their inputs, and the largest one at a time its activations.
        """
        divided = sum(self._of_row[f"{name}:begun"] for name, style in styles.items() if style == "colwise")
        of_rows = tensor * (self._of_row[""] - divided) + divided
        # Autocast keeps the weights in its dtype.
        weights = 0 if options.param_dtype else self._once // (tensor * pipeline)
        in_flight = options.count if pipeline > 1 and options.schedule == "gpipe" else pipeline
        at_once = min(1.0, in_flight / options.count) if pipeline > 1 else 1.0
        inputs = self.rows * tensor * pipeline * self._inputs
        repeated = recomputed(wrapped, options, self._module)
        if not repeated:
            return int(self.rows * of_rows * at_once) + inputs + in_flight * weights
        names = {part: name for name, part in self._module.named_modules()}
        within = [names[unit] for unit in repeated if not _is_inside(names[unit], [names[part] for part in repeated])]
        outside = self._of_row[""] - sum(
            self._of_row[f"{name}:within"] - self._of_row[f"{name}:more"] for name in within
        )
        divided_share = of_rows / max(self._of_row[""], 1) * (pipeline / options.count if pipeline > 1 else 1.0)
        again = divided_share * max(self._of_row[f"{name}:within"] for name in within)
        largest = max(_size(unit.parameters()) for unit in repeated) / max(_size(self._parameters.values()), 1)
        # The most is kept at the end of the forward pass, or while a unit computes again.
        return (
            int(self.rows * tensor * outside * at_once)
            + inputs
            + int(max(weights, self.rows * again + weights * largest))
        )


class _Activations:
    """Records what autograd keeps of a batch.

    `sizes` has bytes: all of them as "". `NAME:in` and `NAME:out` are those of a part's inputs and output,
    `NAME:within` what is kept while it computes, but for its inputs, and `NAME:more` those of its inputs that are not
    kept. `NAME:begun` is what a linear layer begins: from its output on until the next one.
    """

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.sizes: Counter[str] = Counter({"": 0})
        module = engine.unwrapped
        self._seen = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *batch.tensors]}
        # The parts that compute now, and the bytes of their inputs by storage.
        self._open: list[tuple[str, dict[int | None, int]]] = []
        self._begun = ""
        self._tensors: list[torch.Tensor] = []  # They stay, so that no other storage gets the address of one.
        hooks = []
        for name, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            hooks.append(part.register_forward_hook(partial(self._leave, name)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _as_it_is):
                engine.losses_of(engine.module, batch)
        finally:
            for hook in hooks:
                hook.remove()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None and storage not in self._seen:
            self._seen.add(storage)
            self._tensors.append(tensor)
            names = {f"{name}:within" for name, inputs in self._open if storage not in inputs}
            for name in {"", *names, f"{self._begun}:begun"}:
                self.sizes[name] += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}.values()
        self.sizes[f"{name}:in"] += _size(inputs)
        self._open.append((name, {_storage(tensor): tensor.nbytes for tensor in inputs}))

    def _leave(self, name: str, part: nn.Module, args: Any, output: Any) -> None:
        _, inputs = self._open.pop()
        if self.sizes[f"{name}:within"]:  # If it computed this again, it would keep its inputs.
            self.sizes[f"{name}:more"] += sum(size for storage, size in inputs.items() if storage not in self._seen)
        if isinstance(part, DIVIDED):
            self._begun = name
            self.sizes[f"{name}:out"] += sum(
                t.nbytes for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)
            )


def _is_inside(name: str, parts: Iterable[str]) -> bool:
    """Whether a part of a module is within one of some others."""
    return any(name.startswith(f"{part}.") for part in parts)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Returns rows twice."""
    return torch.cat([tensor, tensor])


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage; `None` if it has no single one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _of_ring(size: float, ranks: int) -> int:
    """Returns what each of some ranks sends to gather or to scatter so many bytes."""
    return int(size * (ranks - 1) / ranks)


def _width(dtype: str | None) -> float:
    """Returns the width of numbers in a dtype of `ShardingOptions`, relative to that of parameters."""
    return 1.0 if dtype in (None, "fp32") else 0.5
