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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from sparktorch.base.batch import Batch
from sparktorch.base.config import Precision, TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.train.checkpoint.tensors import create_optimizer_state, own_optimizer
from sparktorch.train.huggingface.models import arguments
from sparktorch.train.loop.engine import Engine
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.plan.activations import Activations
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.strategies.fsdp import units
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.strategies.registry import check_module, check_strategy, check_workers, strategy_for
from sparktorch.train.tensor_parallel.sequence import is_below, outermost
from sparktorch.train.tensor_parallel.styles import HEADS, OWN_ROWS, SUMMED, check_plan

__all__ = ["Need", "Plan", "plan"]

_log = logging.getLogger(__name__)

_ROWS = 2  # of the pass that is measured, and of a second one twice as many
_SIZES = (2, 4, 8)
_SHARED = ("ddp", "zero1", "zero2", "zero3")
# Where ranks that share a layer exchange its values: inputs backward, outputs forward.
_ENDS: dict[str, tuple[str, ...]] = {
    "rowwise": ("out",),
    "colwise": ("in",),
    "colwise_gather_output": ("in", "out"),
    OWN_ROWS: ("in",),
    HEADS: ("in", "out"),
}


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a worker needs under a strategy, in bytes.

    Attributes:
        strategy: The strategy.
        options: Its `strategyParams`.
        parameters: Parameters and buffers that it keeps.
        gradients: Gradients that it keeps.
        state: Its optimizer state.
        gathered: Parameters of other workers that it has at the same time.
        activations: What a forward pass keeps for the backward pass, and its inputs.
        on_host: What of this is in the host's memory, not in that of its device.
        sent: What it sends in a step.
        refused: Why the strategy cannot train this; then all figures are 0.
    """

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    gathered: int = 0
    activations: int = 0
    on_host: int = 0
    sent: int = 0
    refused: str = ""

    @property
    def total(self) -> int:
        """Bytes that it needs at once, of its device if it has one, but for what kernels and allocators take."""
        return self.parameters + self.gradients + self.state + self.gathered + self.activations - self.on_host


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """What each strategy takes of a worker; printed or shown, it is a table.

    Attributes:
        needs: One entry per strategy and its sizes.
        workers: Number of workers.
        rows: Rows of a worker in a forward pass.
        parameters: Number of the module's parameters.
        memory: Bytes that a worker has, if they were given.
    """

    needs: tuple[Need, ...]
    workers: int
    rows: int
    parameters: int
    memory: int | None = None

    @property
    def fitting(self) -> list[Need]:
        """Those that fit into the memory of a worker, the simplest first; all that are possible without a memory."""
        possible = [need for need in self.needs if not need.refused]
        return [need for need in possible if self.memory is None or need.total <= self.memory]

    def __str__(self) -> str:
        names = ("parameters", "gradients", "state", "gathered", "activations", "total", "sent")
        table = [["strategy", *names[:2], "optimizer", *names[3:6], "sent a step", ""]]
        for need in self.needs:
            title = " ".join([need.strategy, *(f"{name}={value}" for name, value in need.options.items())])
            figures = ["-" if need.refused else _shown(getattr(need, name)) for name in names]
            fits = "" if self.memory is None else "fits" if need.total <= self.memory else "too large"
            if need.on_host:
                fits = f"{fits}, {_shown(need.on_host)} in the host's memory".removeprefix(", ")
            table.append([title, *figures, need.refused or fits])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]).rstrip()
            for row in table
        ]
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        each = f"{self.parameters:,} parameters, {workers}, {self.rows:,} rows of each at a time"
        return "\n".join([each, "", *lines])

    __repr__ = __str__


def plan(recipe: Recipe, config: TrainConfig, workers: int, first: Batch, *, memory: int | None = None) -> Plan:
    """Returns what each strategy takes of a worker.

    It runs forward passes on a few rows, of a module that has shapes and no values where that is possible. Instances,
    LightningModules, adapters and modules that look at values take as much memory here as a training.

    Args:
        recipe: What is trained.
        config: How it is trained; its strategy and options are tried besides those of the table.
        workers: Number of workers.
        first: A batch of two rows.
        memory: Bytes that a worker has.

    Raises:
        ConfigError: Inputs are sparse or jagged.
        ModuleError: The module cannot be built or called.
    """
    if odd := [name for name, tensor in first.named.items() if tensor.layout is not torch.strided]:
        what = f"input {odd[0]!r} is sparse or jagged, and a plan is made of rows with as many numbers each"
        raise ConfigError(what, hint="set inputLayouts to 'dense' or 'padded' for the column", param="inputLayouts")
    measured = _Measured(recipe, config, workers, first)
    tried: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _SHARED] + _meshes(workers)
    own = (config.strategy, dict(config.strategy_params))
    if own not in tried and own[0] in (*_SHARED, "mesh"):
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
        less, more = (Activations(engine, _rows_of(self._first, rows)).found for rows in (_ROWS, 2 * _ROWS))
        self._kept = Counter({name: (more[name] - less[name]) // _ROWS for name in more})  # of a row
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
        found = self._copies(strategy) if strategy in ("ddp", "zero1") else self._shards(strategy, options)
        return replace(found, strategy=strategy, options=options)

    def _copies(self, strategy: str) -> Need:
        """Every worker has the whole model; under "zero1", each has the state of its own share of the parameters."""
        trained = [p for p in self._parameters.values() if p.requires_grad]
        gradients, state = _size(trained), sum(self._state.get(p, 0) for p in trained)
        sent = _reduced(gradients, self._workers)
        if strategy == "zero1":
            shares: list[list[nn.Parameter]] = [[] for _ in range(self._workers)]
            for parameter in sorted(trained, key=torch.Tensor.numel, reverse=True):  # as torch divides them
                min(shares, key=_size).append(parameter)
            state = max(sum(self._state.get(p, 0) for p in share) for share in shares)
            sent += _gathered(gradients, self._workers)
        return Need(
            strategy=strategy,
            parameters=_size(self._parameters.values()) + _size(self._module.buffers()),
            gradients=gradients,
            state=state + (0 if self._config.ema_decay is None else gradients),
            activations=self.rows * (self._kept[""] + self._inputs) + self._once,
            sent=sent,
        )

    def _shards(self, strategy: str, options: dict[str, Any]) -> Need:
        """Every worker has a part of each tensor, and gathers those of a unit at a time."""
        sharding: Any
        sharding, known = strategy_for(strategy, options)
        _, pipeline, shard, tensor = known.sizes(self._workers) if strategy == "mesh" else (1, 1, self._workers, 1)
        data = self._workers // (pipeline * shard * tensor)
        styles = check_plan(self._module, known.plan, tensor, staged=pipeline > 1) if tensor > 1 else {}
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
        wrapped = units(self._module, known)
        kept_gathered = strategy == "zero2" or pipeline > 1  # from forward to backward
        gathered = 0
        if sharding.rank.shards(known, self._workers):
            inside = [sum(of_worker.get(p, 0) for p in unit.parameters()) for unit in wrapped]
            gathered = (
                everything if kept_gathered else min(everything, everything - sum(inside) + 2 * max([0, *inside]))
            )
        width = _width(known.param_dtype)
        sent = self._passes * (1 if kept_gathered else 2) * int(_gathered(everything, shard) * width)
        sent += int(_gathered(gradients, shard) * _width(known.reduce_dtype or known.param_dtype))
        sent += _reduced(own, data)
        together = tensor * pipeline  # workers with the same rows
        sent += self._share * together * (_gathered(self._inputs, together) + 2 * passed)
        exchanged = sum(self._kept[f"{name}:{end}"] for name, style in styles.items() for end in _ENDS.get(style, ()))
        # Own rows of an output go from one worker to another, instead of being summed up or gathered for all.
        exchanged += sum(self._kept[f"{name}:out"] // tensor for name, style in styles.items() if style == OWN_ROWS)
        sent += self._share * tensor * _reduced(exchanged, tensor)
        # Until the last pass of a step has reduced them, a worker has whole gradients.
        whole = bool(gathered) and (self._passes > 1 or pipeline > 1)
        state = sum(int(self._state.get(p, 0) * kept[p] / max(p.nbytes, 1)) for p in kept if p.requires_grad)
        state += 0 if self._config.ema_decay is None else own
        parameters = sum(kept.values())
        return Need(
            strategy=strategy,
            parameters=parameters + _size(self._module.buffers()),
            gradients=gradients if whole else own,
            state=state,
            on_host=parameters + state + (0 if whole else own) if known.cpu_offload else 0,
            gathered=int(gathered * width),
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
        args, kwargs = arguments(self._first, self._module)
        kwargs.pop("labels", None)
        given, values, passed = Arguments.of(args, kwargs), list[torch.Tensor](), 0
        for number in range(options.stages):
            stage = cut.stage(number)
            stage.given, passed = given, max(passed, _size(values))
            values = [*stage(*values, **{str(place): tensor for place, tensor in enumerate(given.tensors)})]
        return max(of_ranks, key=lambda kept: sum(kept.values())), passed // self._first.rows

    def _activations(
        self, options: Any, styles: Mapping[str, str], tensor: int, pipeline: int, wrapped: Sequence[nn.Module]
    ) -> int:
        """Returns the bytes of the activations and inputs of a worker, which has the rows of all that share them.

        What is between a layer with a divided output and one with a divided input is divided, too, and so is what is
        within attention, and within layers whose sequences are divided. Of a pipeline, a worker has an equal part of
        the activations, of as many micro-batches as its schedule keeps. Units that compute theirs again keep their
        inputs, and the largest one at a time its activations.
        """
        if tensor > 1 and options.sequence:
            divided = sum(self._kept[f"{name}:within"] for name in outermost(self._module))
        else:
            begins = [name for name, style in styles.items() if style in ("colwise", OWN_ROWS, HEADS)]
            divided = sum(self._kept[f"{name}:begun"] for name in begins)
        kept = tensor * (self._kept[""] - divided) + divided
        weights = 0 if options.param_dtype else self._once // (tensor * pipeline)  # as autocast has them
        in_flight = options.count if pipeline > 1 and options.schedule == "gpipe" else pipeline
        at_once = min(1.0, in_flight / options.count) if pipeline > 1 else 1.0
        inputs = self.rows * tensor * pipeline * self._inputs
        if not options.activation_checkpointing:
            return int(self.rows * kept * at_once) + inputs + in_flight * weights
        names = {part: name for name, part in self._module.named_modules()}
        outside, again = self._again("", [names[unit] for unit in wrapped])
        again *= kept / max(self._kept[""], 1) * (pipeline / options.count if pipeline > 1 else 1.0)
        largest = max([0, *(_size(unit.parameters()) for unit in wrapped)]) / max(_size(self._parameters.values()), 1)
        # At the end of the forward pass, or while a unit computes again.
        return (
            int(self.rows * tensor * outside * at_once)
            + inputs
            + int(max(weights, self.rows * again + weights * largest))
        )

    def _again(self, scope: str, wrapped: Sequence[str]) -> tuple[float, float]:
        """Returns what a part keeps of a row whose units compute theirs again, and the most that one of them does."""
        below = [name for name in wrapped if name != scope and is_below(name, [scope])]
        units = [name for name in below if not is_below(name, [each for each in below if each != name])]
        whole = self._kept[f"{scope}:within" if scope else ""]
        kept = whole - sum(self._kept[f"{name}:within"] - self._kept[f"{name}:more"] for name in units)
        return kept, max([0.0, *(sum(self._again(name, wrapped)) for name in units)])


def _rows_of(batch: Batch, rows: int) -> Batch:
    """Returns a batch of as many rows, those of `batch` again and again."""

    def repeated(tensor: Any) -> Any:
        return None if tensor is None else torch.cat([tensor] * (rows // batch.rows))

    label, weight, loss_weight, sizes = map(repeated, (batch.label, batch.weight, batch.loss_weight, batch.sizes))
    more = {"label": label, "weight": weight, "loss_weight": loss_weight, "sizes": sizes}
    return replace(batch, inputs=tuple(map(repeated, batch.inputs)), rows=rows, **more)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gathered(size: float, ranks: int) -> int:
    return int(size * (ranks - 1) / ranks)


def _reduced(size: float, ranks: int) -> int:
    return 2 * _gathered(size, ranks)


def _width(dtype: str | None) -> float:
    """Returns the width of numbers in a dtype of `ShardingOptions`, relative to that of parameters."""
    return 1.0 if dtype in (None, "fp32") else 0.5


def _shown(count: int) -> str:
    for size, unit in ((1e3, "KB"), (1e6, "MB")):
        if round(count / size, 1) < 1000:  # as it is shown
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:,.2f} GB"
