"""Ranks in up to four dimensions: copies of the model, its layers in stages, shards of parameters, parts of layers.

`data` x `shard` is hybrid sharding: the model is divided within groups of ranks, and each group has a copy of it. Zhao
et al. 2023, PyTorch FSDP (https://arxiv.org/abs/2304.11277), section 3.2.2. A group that lies on one host gathers
parameters without the network between hosts, which carries 1/`shard` of the gradients then. `tensor` divides layers:
`train/tensor_parallel`. `pipeline` has layers one after another on several ranks: `pipeline_mesh.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.batch import Batch
from sparktorch.base.devices import is_host
from sparktorch.base.imports import load_object
from sparktorch.base.no_op import no_op
from sparktorch.distributed.process_group import KEEPS_ORDER, subgroup
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.recipe.adapter import without_caches
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import (
    divide_gradients,
    gradients_by_copies,
    local,
    mesh_of_training,
    part_of,
    step_on_both,
    undivided,
    unviewed,
)
from sparktorch.train.sharding.layout import groups_along, layout
from sparktorch.train.sharding.units import check_optimizer, check_parts
from sparktorch.train.strategies.base import GradientSync, Job, Start
from sparktorch.train.strategies.fsdp import (
    ZERO3,
    ShardedGradients,
    Zero3,
    check_sharded_settings,
    check_sharding,
    needs_group,
)
from sparktorch.train.strategies.mesh_options import MeshOptions, Sizes
from sparktorch.train.tensor_parallel.comparison import compare_division
from sparktorch.train.tensor_parallel.shared_rows import compare_first_call, shared_rows
from sparktorch.train.tensor_parallel.styles import SUMMED, check_plan, left_whole, shard_layers

__all__ = ["MESH", "Mesh", "MeshOptions", "check_mesh", "check_mesh_settings", "styles_of"]

_log = logging.getLogger(__name__)


class Mesh(Zero3[MeshOptions]):
    """As `zero3` within each group of `shard` ranks; between groups, gradients are averaged."""

    # Ranks that share layers compute the gradients of these modules in parts.
    _summed: Sequence[nn.Module] = ()
    # It has the shapes of all parameters where this rank has those of some layers only.
    _whole: nn.Module | None = None

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
        if self._sizes.pipeline == 1:
            return self._layers
        return subgroup(self._world, self._layout.movedim(2, 1).reshape(-1, self.ranks_of_rows).tolist())

    @property
    def ranks_of_rows(self) -> int:
        """Number of ranks that compute on the same rows, and so compute the same loss."""
        return self._options.ranks_of_rows

    @property
    def reports_rows(self) -> bool:
        """Whether this rank reports what is computed of its rows: the first of those that compute on the same does."""
        return self.ranks_of_rows == 1 or self._sharing.rank() == 0

    def shared_rows(self, batch: Batch, before: Callable[[], object] = no_op) -> AbstractContextManager[Batch]:
        """Returns a context of a pass on the rows of all ranks that compute on the same."""
        if self.ranks_of_rows == 1:
            return super().shared_rows(batch)
        return shared_rows(batch, self._sharing, self._device, before)

    @classmethod
    def shards(cls, options: MeshOptions, workers: int) -> bool:
        """Whether parameters are wrapped for sharding: not where no ranks have other rows of the same part.

        What is not divided by `tensor` is a plain tensor then, beside `DTensor`s.
        """
        return super().shards(options, workers) and (options.ranks_of_rows != workers or needs_group(options))

    @property
    def _wraps(self) -> bool:
        """Whether parameters are wrapped: in loops of users, who give torch's functions lists of them, always."""
        return super()._wraps or (self._in_users_loop and not self._alone)

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what reduces the gradients of the ranks with other rows, and completes those of divided layers."""
        root = module if self._wraps and self._options.stacked == 1 else None  # A schedule reduces those of stages.
        divisor = self._sizes.data * self._sizes.shard  # Gradients are averaged over so many ranks.
        if self._sizes.tensor == 1:
            return ShardedGradients(root, divisor, self._calls)
        sync = ShardedGradients(root, divisor, self._calls, partial(self._complete, module, self._summed))
        sync.completes = bool(self._summed) or isinstance(self._options.plan, str)
        return sync

    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Divides layers, and shards what is left of each rank's parameters, in place."""
        if self._sizes.tensor > 1:
            styles = self._styles(module)
            self._compare_division(module, styles, start)
            self._summed = self._divide_layers(module, styles, start)
            if self._in_users_loop:
                compare_first_call(module, self._layers)
        return super().prepare(module, start)

    def _compare_division(self, module: nn.Module, styles: Mapping[str, str], start: Start) -> None:
        """Compares a divided copy of the module with an undivided one, where values and rows are known.

        The ranks that share layers with rank 0 do so for all.
        """
        offloads = self._options.cpu_offload and not is_host(self._device)
        if offloads or start.example is None or any(parameter.is_meta for parameter in module.parameters()):
            return
        # Ranks exchange rows here as in each pass, so that all draw as many numbers.
        with self.shared_rows(start.example()) as batch:
            arguments = Arguments.of_batch(batch.slice(0, 1), without_caches(module))

        def divide(copied: nn.Module) -> Callable[[], None]:
            return partial(self._complete, copied, self._divide_layers(copied, styles, start))

        if 0 in dist.get_process_group_ranks(self._layers):
            compare_division(module, divide, arguments, self._layers, self._device)

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
        """Divides those layers that this rank has, in place; returns the parts whose gradients are to be summed up."""
        if isinstance(self._options.plan, str):
            _divided_by_function(self._options.plan, module, part_of(self._ranks, "tensor"))
            return []
        parts = {name: module.get_submodule(name) for name in styles}
        present = {name: style for name, style in styles.items() if next(parts[name].parameters(), None) is not None}
        if present:
            shard_layers(module, part_of(self._ranks, "tensor"), present, start.materialise)
        return [parts[name] for name, style in present.items() if style == SUMMED]

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's shards, which may lie on several meshes, or beside plain tensors."""
        built = recipe.build_optimizer(module, self._whole)
        if len({hasattr(parameter, "to_local") for parameter in module.parameters()}) > 1:
            step_on_both(built)
        return built

    def _complete(self, module: nn.Module, summed: Sequence[nn.Module]) -> None:
        """Completes the gradients of divided layers, and sums up those of `summed`, which ranks computed in parts."""
        divide_gradients(module)
        for part in summed:
            for parameter in part.parameters(recurse=False):
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self._layers)

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which ranks that share layers have the same bits of what is not divided."""
        if self._sizes.tensor > 1 and not is_host(self._device):  # Kernels of accelerators may differ in last bits.
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
        gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
        if value is not None and gradients:
            torch._foreach_clamp_min_(gradients, -value)
            torch._foreach_clamp_max_(gradients, value)
        if norm is None:
            return None
        total = self.gradient_norm(module)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, torch.float32))
        return total


def styles_of(module: nn.Module, options: MeshOptions) -> dict[str, str]:
    """Returns the style of each layer that is divided; see `check_plan`, and `check_parts`."""
    size = options.tensor or 1
    if size == 1:
        return {}
    check_parts(module, staged=False)
    if isinstance(options.plan, str):
        load_object(options.plan)
        return {}
    return check_plan(module, options.plan, size)


def _divided_by_function(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Lets a user's function divide a module among the ranks of a mesh of one dimension; refuses other modules."""
    returned = load_object(path)(module, mesh)
    if returned is not module:
        raise ModuleError(
            f"strategyParams.plan: {path} returned a {type(returned).__name__} that is not the module which it got",
            hint="divide the module in place, as parallelize_module does, and return it",
            param="strategyParams",
            code="ST-TENSOR-PARALLEL",
        )
    for part in module.modules():
        if any(hasattr(parameter, "to_local") for parameter in part.parameters(recurse=False)):
            part.register_forward_hook(unviewed, with_kwargs=True)


def check_mesh(job: Job) -> None:
    """Refuses what `zero3` does, and sizes, plans, losses and training steps that do not suit ranks that share rows."""
    check_sharding(job)
    options, module = job.options, job.module
    if module is None and job.workers is not None:
        options.sizes(job.workers)
    if module is None or job.batch is None or options.ranks_of_rows == 1:
        return
    step = job.recipe.build_training_step()
    if options.stacked > 1 and step is not None and step.is_mean(module):
        raise ConfigError(
            f"{type(module).__name__} computes the loss of its rows, which a pipeline computes of micro-batches",
            hint="set loss, such as 'CrossEntropyLoss'",
            param="loss",
            code="ST-MESH",
        )
    if (options.tensor or 1) > 1:
        check_optimizer(job.recipe, module)
        styles_of(module, options)


def check_mesh_settings(job: Job) -> None:
    """Refuses settings that `zero3` does, and those that do not suit ranks which compute on the same rows."""
    check_sharded_settings(job)
    if isinstance(job.options.plan, str) and job.config.model_folder:
        raise ConfigError(
            "strategyParams.plan is a function, which wants a module with values, and with modelDir no worker has one",
            hint="give a plan by patterns of names, or leave modelDir out",
            param="strategyParams",
            code="ST-MESH",
        )
    if job.options.ranks_of_rows > 1 and job.recipe.steps_itself:
        raise ConfigError(
            "a LightningModule computes in steps of its own, and strategyParams.tensor and pipeline compute on the "
            "rows of several workers",
            hint="pass its network as module, with a loss, or use strategyParams.shard instead of tensor and pipeline",
            param="strategyParams",
            code="ST-MESH",
        )


MESH = replace(ZERO3, options=MeshOptions, rank=Mesh, check_settings=check_mesh_settings, check=check_mesh)
