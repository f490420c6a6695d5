"""Ranks in up to four dimensions: copies of the model, its layers in stages, shards of parameters, parts of layers.

`data` x `shard` is hybrid sharding: the model is divided within groups of ranks, and each group has a copy of it. Zhao
et al. 2023, PyTorch FSDP (https://arxiv.org/abs/2304.11277), section 3.2.2. A group that lies on one host gathers
parameters without the network between hosts, which carries 1/`shard` of the gradients then. `tensor` divides layers:
`train/tensor_parallel`. `pipeline` has layers one after another on several ranks: `pipeline_mesh.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.batch import Batch
from sparktorch.base.devices import is_host
from sparktorch.distributed.process_group import KEEPS_ORDER, subgroup
from sparktorch.errors import ConfigError, Refusal
from sparktorch.train.recipe.adapter import arguments, without_caches
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import (
    divide_gradients,
    gradients_by_copies,
    local,
    mesh_of_training,
    part_of,
    step_on_both,
    undivided,
)
from sparktorch.train.sharding.layout import groups_along, layout
from sparktorch.train.sharding.units import check_optimizer, check_parts
from sparktorch.train.strategies.base import GradientSync, Job, Start
from sparktorch.train.strategies.fsdp import ZERO3, ShardedGradients, Zero3, check_sharding, needs_group
from sparktorch.train.strategies.mesh_options import MeshOptions, Sizes
from sparktorch.train.tensor_parallel.comparison import Comparison, check_gradients
from sparktorch.train.tensor_parallel.row_exchange import RowExchange, check_parts_within
from sparktorch.train.tensor_parallel.styles import OWN_ROWS, SUMMED, check_plan, left_whole, shard_layers

__all__ = ["MESH", "Mesh", "MeshOptions", "check_mesh", "styles_of"]

C = TypeVar("C")

_log = logging.getLogger(__name__)


class Mesh(Zero3[MeshOptions]):
    """As `zero3` within each group of `shard` ranks; between groups, gradients are averaged."""

    _summed: Sequence[nn.Module] = ()  # parts whose gradients ranks that share layers compute in parts
    _compared = False  # whether the divided module was compared with the undivided one
    _whole: nn.Module | None = None  # has the shapes of all parameters where this rank has those of some layers only

    @cached_property
    def _sizes(self) -> Sizes:
        return self._options.sizes(self._world.world_size)

    @cached_property
    def _layout(self) -> torch.Tensor:
        """The ranks in all four dimensions; those of inner groups are on one host where a host has enough."""
        hosts: list[str] = [""] * self._world.world_size
        dist.all_gather_object(hosts, self._world.host)
        ranks = layout(hosts, self._sizes, ascending=not KEEPS_ORDER)
        largest, inner = max(map(hosts.count, hosts)), 1
        for name in ("tensor", "shard"):
            inner *= getattr(self._sizes, name)
            groups = ranks.view(-1, inner).tolist()
            apart = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
            if apart and inner <= largest and self._world.is_main:
                _log.warning(
                    "%d of %d %s groups of strategy 'mesh' are on several hosts, whose network they load",
                    *(apart, len(groups), name),
                )
        return ranks

    @cached_property
    def _ranks(self) -> DeviceMesh:
        """The ranks in the dimensions with several of them, and in `shard`, where `fully_shard` wraps parameters."""
        sizes = self._sizes._asdict()
        names = [name for name, size in sizes.items() if size > 1 or (name == "shard" and self._wraps)]
        groups: list[Any] = [
            # Of a single group, `zero3` takes the default one, too.
            dist.group.WORLD
            if name == "shard" and sizes[name] == self._world.world_size
            else subgroup(self._world, groups_along(self._layout, Sizes._fields.index(name)))
            for name in names
        ]
        ranks = self._layout.view([sizes[name] for name in names])
        return mesh_of_training(groups, self._device.type, ranks, names)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold different samples: shards of the model, in groups along `data` if there are several."""
        return part_of(self._ranks, *(["data"] if self._sizes.data > 1 else []), "shard")

    @cached_property
    def _layers(self) -> dist.ProcessGroup:
        """The ranks that share layers."""
        return part_of(self._ranks, "tensor").get_group()

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """The ranks that compute on the same rows."""
        return self._layers

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange the inputs of a forward pass."""
        return self._sizes.tensor > 1

    def together(self, batch: Batch) -> Batch:
        """Returns a batch whose padded inputs are as long as the longest of the ranks that compute on its rows."""
        if not (self.exchanges_rows and batch.pads):
            return batch
        longest = torch.tensor([batch.inputs[place].shape[1] for place in batch.pads])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=None if self._options.stacked > 1 else self._sharing)
        return batch.padded(dict(zip(batch.pads, longest.tolist(), strict=True)))

    @classmethod
    def shards(cls, options: MeshOptions, workers: int) -> bool:
        """Whether parameters are wrapped for sharding: not where no ranks have other rows of the same part.

        What is not divided by `tensor` is a plain tensor then, beside `DTensor`s.
        """
        together = (options.pipeline or 1) * (options.tensor or 1)
        return super().shards(options, workers) and (together != workers or needs_group(options))

    @property
    def _wraps(self) -> bool:
        """Whether parameters are wrapped: in loops of users, who give torch's functions lists of them, always."""
        return super()._wraps or (self._in_users_loop and not self._alone)

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what reduces the gradients of the ranks with other rows, and completes those of divided layers."""
        root = module if self._wraps and self._options.stacked == 1 else None  # a schedule reduces those of stages
        divisor = self._sizes.data * self._sizes.shard  # number of ranks over which gradients are averaged
        if self._sizes.tensor == 1:
            return ShardedGradients(root, divisor, self._calls)
        return _DividedGradients(self, module, root, divisor)

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Divides layers, and shards what is left of each rank's parameters, in place."""
        if self.exchanges_rows:
            exchange = RowExchange(self._sharing, self._device)
            group = self._sharing
            comparison = self._undivided(
                module, start, lambda args, kwargs: Comparison(module, args, kwargs, group, exchange, self._device)
            )
            exchange.attach(module, self._divide_layers(module, self._styles(module), start))
            self._compared = comparison is not None and comparison.check(
                module.to(self._device), partial(self._complete, module)
            )
        return super().prepare(module, start)

    def _undivided(self, module: nn.Module, start: Start, compare: Callable[[Any, Any], C]) -> C | None:
        """Calls `compare` with a row of each rank before layers are divided; returns `None` if nothing is compared.

        One group of ranks compares for all: that of rank 0, and only if values and rows are known.
        """
        if self._sizes.tensor == 1 or start.example is None or any(p.is_meta for p in module.parameters()):
            return None
        if self._options.cpu_offload and not is_host(self._device):  # the device may not hold its part at once
            return None
        args, kwargs = arguments(self.together(start.example().slice(0, 1)), without_caches(module))
        kwargs.pop("labels", None)  # with which a model may compute a loss, too
        return compare(args, kwargs) if 0 in dist.get_process_group_ranks(self._sharing) else None

    def _styles(self, module: nn.Module) -> dict[str, str]:
        """Returns the style of each layer that is divided, and warns of those that could be but for their sizes."""
        size = self._sizes.tensor
        asked = size > 1 and not self._options.plan and self._world.is_main
        whole = left_whole(module, size) if asked else []
        if whole:
            others = f" (the first of {len(whole)})" if len(whole) > 1 else ""
            _log.warning("strategyParams.tensor is %d: %r, %s, stays whole%s", size, *whole[0], others)
        return styles_of(module, self._options)

    def _divide_layers(self, module: nn.Module, styles: Mapping[str, str], start: Start) -> list[nn.Module]:
        """Divides those layers that this rank has, in place; returns those whose columns are exchanged for rows."""
        parts = {name: module.get_submodule(name) for name in styles}
        own = {name: style for name, style in styles.items() if next(parts[name].parameters(), None) is not None}
        if own:
            ways = {"sequence": self._options.sequence, "recompute_allgather": self._options.recompute_allgather}
            shard_layers(module, part_of(self._ranks, "tensor"), own, start.materialise, **ways)
        self._summed = [parts[name] for name, style in own.items() if style == SUMMED]
        return [parts[name] for name, style in own.items() if style == OWN_ROWS]

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's shards, which may lie on several meshes, or beside plain tensors."""
        built = recipe.build_optimizer(module, self._whole)
        if len({hasattr(parameter, "to_local") for parameter in module.parameters()}) > 1:
            step_on_both(built)
        if self.exchanges_rows and isinstance(built, torch.optim.ASGD):
            for group in built.param_groups:
                group["foreach"] = False  # its kernels take those of one mesh only
        return built

    def _complete(self, module: nn.Module) -> None:
        """Completes the gradients of divided layers, and sums up those that ranks have computed in parts."""
        divide_gradients(module)
        for part in self._summed:
            for parameter in part.parameters(recurse=False):
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self._layers)

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which ranks that share layers have the same bits of what is not divided."""
        if self._sizes.tensor > 1 and not is_host(self._device):  # kernels of accelerators may differ in the last bits
            group = self._layers
            source = dist.get_global_rank(group, 0)
            for parameter in module.parameters():
                if undivided(parameter, "tensor"):
                    dist.broadcast(local(parameter.detach()), source, group=group)
        with super().evaluating(module) as same:
            yield same

    def _gradients(self, module: nn.Module) -> dict[int, list[torch.Tensor]]:
        """Returns this rank's parts of the gradients, by how many of all ranks have the same."""
        return gradients_by_copies(module, self._world.world_size, self._sizes.tensor)

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> torch.Tensor | None:
        """Clips each rank's part of the gradients; torch's functions take no tensors of several meshes."""
        if self._alone:
            return super().clip_gradients(module, norm=norm, value=value)
        own = [part for parts in self._gradients(module).values() for part in parts]
        if value is not None and own:
            torch._foreach_clamp_min_(own, -value)
            torch._foreach_clamp_max_(own, value)
        if norm is None:
            return None
        total = self.gradient_norm(module)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        if own:
            torch._foreach_mul_(own, factor.to(own[0].device, torch.float32))
        return total


class _DividedGradients(ShardedGradients):
    """Gradients of divided layers, some of which ranks that share these have computed in parts."""

    def __init__(self, mesh: Mesh, module: nn.Module, root: nn.Module | None, divisor: int) -> None:
        super().__init__(root, divisor, mesh._calls)
        self._mesh, self._module, self.completes = mesh, module, bool(mesh._summed)

    def complete(self) -> None:
        """Completes them, and compares those of what is not divided, where the divided module was not compared."""
        mesh = self._mesh
        mesh._complete(self._module)
        if not mesh._compared:
            mesh._compared = True
            check_gradients(self._module, mesh._layers)


def styles_of(module: nn.Module, options: MeshOptions) -> dict[str, str]:
    """Returns the style of each layer that is divided; see `check_plan`, and `check_parts`."""
    size = options.tensor or 1
    if size == 1:
        return {}
    check_parts(module, staged=False)
    return check_plan(module, options.plan, size, staged=options.stacked > 1, sequence=options.sequence)


def check_mesh(job: Job) -> None:
    """Refuses what `zero3` does, and sizes, plans, losses and training steps that do not suit ranks that share rows."""
    check_sharding(job)
    options, module = job.options, job.module
    if module is None and job.workers is not None:
        options.sizes(job.workers)
    if module is None or job.batch is None or (options.tensor or 1) * options.stacked == 1:
        return
    step = job.recipe.build_training_step()
    if step is not None and step.is_mean(module):
        raise ConfigError(
            f"{type(module).__name__} computes the loss of its rows, which with strategyParams.tensor or pipeline "
            "are those of several ranks",
            hint="set loss, such as 'CrossEntropyLoss'",
            param="loss",
            code="ST-MESH",
        )
    if (options.tensor or 1) > 1:
        check_optimizer(job.recipe, module)
        styles_of(module, options)
        if step is not None and options.stacked == 1:
            check_parts_within(step, module, job.batch)


MESH = replace(
    ZERO3,
    options=MeshOptions,
    rank=Mesh,
    check=check_mesh,
    refusals=(
        Refusal(
            "compile",
            lambda job: job.options.sequence and job.config.compile,
            "compile does not compile layers between which strategyParams.sequence divides sequences",
            "leave compile or sequence out",
            "ST-MESH",
        ),
        Refusal(
            "strategyParams",
            lambda job: (job.options.tensor or 1) * job.options.stacked > 1 and job.recipe.steps_itself,
            "a LightningModule computes in steps of its own, in which ranks that share layers or rows cannot exchange "
            "them",
            "pass its network as module, with a loss, or use strategyParams.shard instead of tensor and pipeline",
            "ST-MESH",
        ),
        *ZERO3.refusals,
    ),
)
