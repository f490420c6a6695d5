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
    if odd := [name for name, tensor in first.named.items() if tensor.layout is not torch.strided]:
        what = f"input {odd[0]!r} is sparse or jagged, and a plan is made of rows with as many numbers each"
        raise ConfigError(what, hint="set inputLayouts to 'dense' or 'padded' for the column", param="inputLayouts")
    measured = _Measured(recipe, config, workers, first)
    tried: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _SHARED] + _meshes(workers)
    own = (config.strategy, dict(config.strategy_params))
    by_function = isinstance(own[1].get("plan"), str)  # nothing is known of what it divides
    if own not in tried and own[0] in (*_SHARED, "mesh") and not by_function:
        tried.append(own)
    needs = tuple(measured.need(name, options) for name, options in tried)
    return Plan(needs=needs, workers=workers, rows=measured.rows, parameters=measured.count, memory=memory)


def _meshes(workers: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the sizes of meshes that the table shows."""
    sizes = [size for size in _SIZES if workers % size == 0]
    found: list[dict[str, Any]] = [{"shard": size} for size in sizes if size < workers]
    found += [{"pipeline": size} for size in sizes]
    for size in sizes:
        found += [{"tensor": size}] + [{"tensor": size, "shard": workers // size}] * (workers > size)
    return [("mesh", options) for options in found]


class _Measured:
    """The module as one process trains it, and what autograd keeps of a row."""

    def __init__(self, recipe: Recipe, config: TrainConfig, workers: int, first: Batch) -> None:
        self._recipe, self._config, self._workers, self._first = recipe, config, workers, first
        self._share = share = -(-config.batch_size // workers)  # of the rows of a step
        size = config.micro_batch_size
        self.rows = min(share, size) if isinstance(size, int) else -(-share // config.accumulation_steps)
        self._passes = -(-share // self.rows)  # of a step
        self._inputs = sum(tensor.nbytes for tensor in first.tensors) // first.rows
        # fp16 is as large as bf16, and not every CPU has it.
        precision: Precision = "bf16" if config.precision in ("bf16", "fp16") else "fp32"
        plain: dict[str, Any] = {"strategy": "ddp", "strategy_params": {}, "compile": False, "micro_batch_size": None}
        alone = replace(config, precision=precision, model_folder=None, **plain)
        shapes = replace(recipe, initial=recipe.packed)  # what is in a folder is not read
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):  # not on "meta", where nothing is cast as by autocast
                engine = Engine(shapes, alone, World(), steps=1)
            self._measure(engine)
        except Exception as error:  # many: torch has no shapes of what an operator returns, or asks for a value
            _log.debug("%s is measured with values: %s", recipe.module, error)
            self._measure(Engine(recipe, alone, World(), steps=1))
        self.count = sum(parameter.numel() for parameter in self._parameters.values())

    def _measure(self, engine: Engine) -> None:
        self._module = engine.unwrapped
        self._parameters = dict(self._module.named_parameters())
        engine.training_mode()
        rows, once = self._first.rows, vars(self._first)
        twice = pytree.tree_map_only(torch.Tensor, lambda tensor: torch.cat([tensor, tensor]), once)
        less, more = (_Activations(engine, Batch(**each)).found for each in (once, {**twice, "rows": 2 * rows}))
        self._kept = Counter({name: (more[name] - less[name]) // rows for name in more})  # of a row
        self._once = max(0, 2 * less[""] - more[""])  # of any rows, such as the weights as autocast has them
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
        sharding: Any
        sharding, given = strategy_for(strategy, options)
        copies = strategy in ("ddp", "zero1")  # else, a worker has a part of each tensor, and gathers those of a unit
        known: Any = ShardingOptions() if copies else given
        sizes = (1, 1, 1 if copies else self._workers, 1)
        _, pipeline, shard, tensor = known.sizes(self._workers) if strategy == "mesh" else sizes
        data = self._workers // (pipeline * shard * tensor)
        styles = check_plan(self._module, known.plan, tensor) if tensor > 1 else {}
        of_worker = {parameter: parameter.nbytes for parameter in self._parameters.values()}  # before it is sharded
        for name, style in styles.items():
            for kind, parameter in self._module.get_submodule(name).named_parameters(recurse=False):
                if style != SUMMED and (kind == "weight" or style != "rowwise"):
                    of_worker[parameter] //= tensor
        passed = 0
        if pipeline > 1:
            of_worker, passed = self._of_stages(known, of_worker, styles)
        part = {p: math.ceil(len(p) / shard) / max(len(p), 1) if p.dim() else 1.0 for p in of_worker}
        kept = {p: int(size * part[p]) for p, size in of_worker.items()}
        own = sum(kept[p] for p in kept if p.requires_grad)
        everything, gradients = sum(of_worker.values()), sum(size for p, size in of_worker.items() if p.requires_grad)
        wrapped = [] if copies else units(self._module, known)
        kept_gathered = strategy == "zero2" or pipeline > 1  # from forward to backward
        gathered = 0
        inside = [sum(of_worker.get(p, 0) for p in unit.parameters()) for unit in wrapped]
        if not copies and sharding.rank.shards(known, self._workers):
            part_of_it = min(everything, everything - sum(inside) + 2 * max([0, *inside]))
            gathered = everything if kept_gathered else part_of_it
        width = _width(known.param_dtype)
        twice = 0 if kept_gathered else sum(inside)  # Backward gathers those of units again, but not the rest.
        sent = self._passes * int(_gathered(everything + twice, shard) * width)
        sent += int(_gathered(gradients, shard) * _width(known.reduce_dtype or known.param_dtype))
        sent += 2 * _gathered(own, data)
        together = tensor * pipeline  # workers with the same rows
        sent += self._share * together * (_gathered(self._inputs, together) + 2 * passed)
        exchanged = sum(
            self._kept[f"{name}:{end}"] for name, style in styles.items() for end in _ENDS.get(style, "").split()
        )
        sent += self._share * tensor * 2 * _gathered(exchanged, tensor)
        # Until the last pass of a step has reduced them, a worker has whole gradients.
        whole = bool(gathered) and (self._passes > 1 or pipeline > 1)
        states = {p: int(self._state.get(p, 0) * kept[p] / max(p.nbytes, 1)) for p in kept if p.requires_grad}
        state = sum(states.values())
        if strategy == "zero1":  # each worker has the state of its own share of the parameters, as torch divides them
            shares: list[list[nn.Parameter]] = [[] for _ in range(self._workers)]
            for parameter in sorted(states, key=torch.Tensor.numel, reverse=True):
                min(shares, key=_size).append(parameter)
            state = max(sum(states[p] for p in share) for share in shares)
            sent += _gathered(gradients, self._workers)
        state += own if self._config.ema_decay else 0
        parameters = sum(kept.values())
        gathered = int(gathered * width)
        if tensor > 1 and not (known.cpu_offload or self._config.model_folder):
            # The divided module is compared with the undivided one before it is sharded.
            gathered = max(gathered, everything + gradients - parameters - state - (gradients if whole else own))
        return Need(
            strategy=strategy,
            options=options,
            parameters=parameters + _size(self._module.buffers()),
            gradients=gradients if whole else own,
            state=state,
            on_host=parameters + state + (0 if whole else own) if known.cpu_offload else 0,
            gathered=gathered,
            activations=self._activations(known, styles, tensor, pipeline, wrapped),
            sent=sent,
        )

    def _of_stages(
        self, options: MeshOptions, sizes: Mapping[nn.Parameter, int], styles: Mapping[str, str]
    ) -> tuple[dict[nn.Parameter, int], int]:
        """Returns the parameters of the worker with most, and the bytes of a row that stages pass on."""
        cut = Cut(self._module, options.stages, options.split, styles)
        of_ranks: list[dict[nn.Parameter, int]] = [{} for _ in range(options.stages // options.stages_per_rank)]
        for name, parameter in self._parameters.items():
            of_ranks[cut.stage_of[name] % len(of_ranks)][parameter] = sizes[parameter]
        given, values, passed = Arguments.of_batch(self._first, self._module), list[torch.Tensor](), 0
        for number in range(options.stages):
            stage = cut.stage(number)
            stage.given, passed = given, max(passed, _size(values))
            values = [*stage(*values, **{str(place): tensor for place, tensor in enumerate(given.tensors)})]
        return max(of_ranks, key=lambda kept: sum(kept.values())), passed // self._first.rows

    def _activations(
        self, options: Any, styles: Mapping[str, str], tensor: int, pipeline: int, wrapped: Sequence[nn.Module]
    ) -> int:
        """Returns the bytes of the activations and inputs of a worker, which has the rows of all that share them.

        What is between a layer with a divided output and one with a divided input is divided, too. Of a pipeline, a
        worker has an equal part of the activations, of as many micro-batches as its schedule keeps. Units that compute
        theirs again keep their inputs, and the largest one at a time its activations.
        """
        divided = sum(self._kept[f"{name}:begun"] for name, style in styles.items() if style == "colwise")
        kept = tensor * (self._kept[""] - divided) + divided
        weights = 0 if options.param_dtype else self._once // (tensor * pipeline)  # as autocast has them
        in_flight = options.count if pipeline > 1 and options.schedule == "gpipe" else pipeline
        at_once = min(1.0, in_flight / options.count) if pipeline > 1 else 1.0
        inputs = self.rows * tensor * pipeline * self._inputs
        repeated = recomputed(wrapped, options, self._module)
        if not repeated:
            return int(self.rows * kept * at_once) + inputs + in_flight * weights
        names = {part: name for name, part in self._module.named_modules()}
        outside, again = self._again("", [names[unit] for unit in repeated])
        again *= kept / max(self._kept[""], 1) * (pipeline / options.count if pipeline > 1 else 1.0)
        largest = max([0, *(_size(unit.parameters()) for unit in repeated)]) / max(_size(self._parameters.values()), 1)
        # At the end of the forward pass, or while a unit computes again.
        return (
            int(self.rows * tensor * outside * at_once)
            + inputs
            + int(max(weights, self.rows * again + weights * largest))
        )

    def _again(self, scope: str, wrapped: Sequence[str]) -> tuple[float, float]:
        """Returns what a part keeps of a row whose units compute theirs again, and the most that one of them does."""
        below = [name for name in wrapped if name != scope and _is_below(name, [scope])]
        units = [name for name in below if not _is_below(name, [each for each in below if each != name])]
        whole = self._kept[f"{scope}:within" if scope else ""]
        kept = whole - sum(self._kept[f"{name}:within"] - self._kept[f"{name}:more"] for name in units)
        return kept, max([0.0, *(sum(self._again(name, wrapped)) for name in units)])


class _Activations:
    """Records what autograd keeps of a batch.

    `found` has bytes: all of them as "". `NAME:in` and `NAME:out` are those of a part's inputs and output,
    `NAME:within` what is kept while it computes, but for its inputs, and `NAME:more` those of its inputs that are not
    kept. `NAME:begun` is what a linear layer begins: from its output on until the next one.
    """

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.found: Counter[str] = Counter({"": 0})
        module = engine.unwrapped
        self._seen = {_storage(tensor) for tensor in [*module.parameters(), *module.buffers(), *batch.tensors]}
        self._open: list[tuple[str, dict[int | None, int]]] = []  # parts that compute now, and their inputs
        self._begun = ""
        self._tensors: list[torch.Tensor] = []  # no other storage gets the address of one
        hooks = []
        for name, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            hooks.append(part.register_forward_hook(partial(self._leave, name)))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
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
                self.found[name] += tensor.untyped_storage().nbytes()
        return tensor

    def _enter(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        given = {id(t): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values()
        self.found[f"{name}:in"] += sum(tensor.nbytes for tensor in given if tensor.requires_grad)
        self._open.append((name, {_storage(tensor): tensor.nbytes for tensor in given if tensor.requires_grad}))

    def _leave(self, name: str, part: nn.Module, args: Any, output: Any) -> None:
        _, inputs = self._open.pop()
        if self.found[f"{name}:within"]:  # it would keep its inputs if it computed this again
            self.found[f"{name}:more"] += sum(size for storage, size in inputs.items() if storage not in self._seen)
        if isinstance(part, DIVIDED):
            self._begun = name
            self.found[f"{name}:out"] += sum(
                t.nbytes for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)
            )


def _is_below(name: str, parts: Iterable[str]) -> bool:
    """Whether a part of a module is one of some, or within one."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def _storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's storage; `None` if it has not one."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gathered(size: float, ranks: int) -> int:
    return int(size * (ranks - 1) / ranks)


def _width(dtype: str | None) -> float:
    """Returns the width of numbers in a dtype of `ShardingOptions`, relative to that of parameters."""
    return 1.0 if dtype in (None, "fp32") else 0.5
