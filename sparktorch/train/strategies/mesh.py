"""Ranks in up to three dimensions: copies of the model, shards of its parameters, and parts of its layers.

`data` x `shard` is hybrid sharding: the model is divided within groups of ranks, and each group has a copy of it. Zhao
et al. 2023, PyTorch FSDP (https://arxiv.org/abs/2304.11277), section 3.2.2. A group that lies on one host gathers
parameters without the network between hosts, which carries 1/`shard` of the gradients then. `tensor` divides layers:
`tensor_parallel.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.config import TrainConfig, at_least, one_of
from sparktorch.base.devices import is_host
from sparktorch.distributed.process_group import subgroup
from sparktorch.errors import ConfigError
from sparktorch.train.dtensor import copies, local, mesh_of_training, part_of, undivided
from sparktorch.train.recipe.huggingface import MODEL_LOSS, gets_row_labels
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.fsdp import ShardingOptions, Zero3
from sparktorch.train.strategies.row_exchange import share_rows
from sparktorch.train.strategies.tensor_parallel import STYLES, check_gradients, check_plan, divide

__all__ = ["Mesh", "MeshOptions"]

_log = logging.getLogger(__name__)
_DIMENSIONS = ("data", "shard", "tensor")


@dataclass(frozen=True, kw_only=True)
class MeshOptions(ShardingOptions):
    """Options of `mesh`, besides those of `zero3`.

    Attributes:
        data: Number of groups, each with a copy of the model; `None` for as many as there are ranks for.
        shard: Number of ranks of a group among which parameters are sharded; `None` for as many as `data` leaves, or
            1 without `data`.
        tensor: Number of ranks among which layers are divided, which compute on the same rows; `None` for 1.
        plan: How layers are divided, "colwise", "rowwise" or "colwise_gather_output", by globs of their names; empty
            for the plan that is known of the module. The output of a "colwise" layer is divided, as a "rowwise" one
            takes it.
    """

    data: int | None = None
    shard: int | None = None
    tensor: int | None = None
    plan: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self._given()
        if not given:
            raise ConfigError(
                "strategy 'mesh' has no dimension",
                hint="strategyParams={'shard': n} divides the model among n workers, as many as a host has GPUs",
                param="strategyParams",
            )
        for name, value in given.items():
            at_least(f"strategyParams.{name}", value, 1)
        if self.plan and (self.tensor or 1) == 1:
            raise ConfigError(
                "strategyParams has a plan for dividing layers, and no tensor ranks",
                hint="set strategyParams.tensor to the number of workers that share a layer",
                param="strategyParams",
            )
        for pattern, style in self.plan.items():
            one_of(f"strategyParams.plan[{pattern!r}]", style, STYLES)

    def sizes(self, workers: int) -> tuple[int, int, int]:
        """Returns the sizes of the dimensions: data, shard, tensor.

        Raises:
            ConfigError: They do not multiply to the number of workers.
        """
        tensor = self.tensor or 1
        left = workers // tensor
        data = self.data or left // (self.shard or 1)
        shard = self.shard or left // data if data else 0
        if data * shard * tensor == workers:
            return data, shard, tensor
        given = " x ".join(f"{name} {value}" for name, value in self._given().items())
        possible = [size for size in range(1, workers + 1) if workers % size == 0]
        raise ConfigError(
            f"strategyParams has {given}, which {workers} workers cannot be divided into",
            hint=f"set one of them to {', '.join(map(str, possible))}, or change numWorkers",
            param="strategyParams",
        )

    def _given(self) -> dict[str, int]:
        """Returns the dimensions that are set."""
        return {name: value for name in _DIMENSIONS if (value := getattr(self, name)) is not None}


class Mesh(Zero3[MeshOptions]):
    """As `zero3` within each group of `shard` ranks; between groups, gradients are averaged."""

    options_type = MeshOptions
    _summed: Sequence[nn.Module] = ()
    _compared = False

    @classmethod
    def check(cls, config: TrainConfig, recipe: Recipe, options: MeshOptions) -> None:
        """Refuses what `zero3` does and, with `tensor`, modules that train themselves."""
        super().check(config, recipe, options)
        if (options.tensor or 1) > 1 and recipe.steps_itself:
            raise ConfigError(
                "a LightningModule computes in steps of its own, in which ranks that share layers cannot exchange rows",
                hint="pass its network as module, with a loss, or use strategyParams.shard instead of tensor",
                param="strategyParams",
            )

    @classmethod
    def check_workers(cls, options: MeshOptions, workers: int) -> None:
        """Refuses dimensions that do not multiply to the number of workers."""
        options.sizes(workers)

    @classmethod
    def check_module(cls, options: MeshOptions, recipe: Recipe, module: nn.Module) -> None:
        """Refuses what `zero3` does and, with `tensor`, plans that do not fit, and losses of rows from the module."""
        super().check_module(options, recipe, module)
        if (options.tensor or 1) == 1:
            return
        if recipe.training_step == MODEL_LOSS and gets_row_labels(module):
            raise ConfigError(
                f"{type(module).__name__} computes the loss of its rows, which with strategyParams.tensor are those of"
                " several ranks",
                hint="set loss, such as 'CrossEntropyLoss'",
                param="loss",
            )
        check_plan(module, options.plan, options.tensor or 1)

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        return self._options.sizes(self._world.world_size)

    @cached_property
    def _ranks(self) -> DeviceMesh:
        """The ranks in all dimensions; those of a group are on one host where a host has enough."""
        data, shard, tensor = self._sizes
        hosts: list[str] = [""] * self._world.world_size
        dist.all_gather_object(hosts, self._world.host)
        order = torch.tensor(sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank])))
        # Collectives number the ranks of a group in ascending order, and so must the mesh.
        ranks, largest = order.view(data, -1).sort().values.view(data, shard, tensor), max(map(hosts.count, hosts))
        for name, size in (("tensor", tensor), ("shard", shard * tensor)):
            groups = ranks.view(-1, size).tolist()
            apart = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
            if apart and size <= largest and self._world.is_main:
                _log.warning(
                    "%d of %d %s groups of strategy 'mesh' are on several hosts, whose network they load",
                    *(apart, len(groups), name),
                )
        along = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(self._sizes)]
        groups = [subgroup(self._world, lists) for lists in along]
        return mesh_of_training(groups, self._device.type, ranks, _DIMENSIONS)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold different samples, in the dimensions `data` and `shard`."""
        return part_of(self._ranks, "data", "shard")

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange the inputs of a forward pass."""
        return self._sizes[2] > 1

    @property
    def gradient_divisor(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self._world.world_size // self._sizes[2]

    def prepare(self, module: nn.Module) -> nn.Module:
        """Divides layers, and shards what is left of each rank's parameters, in place."""
        if self.exchanges_rows:
            group = part_of(self._ranks, "tensor")
            self._summed = divide(module, group, self._options.plan)
            share_rows(module, group.get_group(), self._device)
        return super().prepare(module)

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's shards, which may lie on several meshes."""
        built = super().optimizer(recipe, module)
        if self.exchanges_rows and isinstance(built, torch.optim.ASGD):
            for group in built.param_groups:
                group["foreach"] = False  # its kernels take those of one mesh only
        return built

    @property
    def acts_in_steps(self) -> bool:
        """Whether gradients must be summed before a step."""
        return bool(self._summed)

    def before_step(self, module: nn.Module) -> None:
        """Sums the gradients that ranks which share layers have computed in parts; compares the others, once."""
        if not self.exchanges_rows:
            return
        group = part_of(self._ranks, "tensor").get_group()
        for part in self._summed:
            for parameter in part.parameters(recurse=False):
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=group)
        if not self._compared:
            self._compared = True
            check_gradients(module, group)

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which ranks that share layers have the same bits of what is not divided."""
        if self.exchanges_rows and not is_host(self._device):  # kernels of accelerators may differ in the last bits
            group = part_of(self._ranks, "tensor").get_group()
            source = dist.get_global_rank(group, 0)
            for parameter in module.parameters():
                if undivided(parameter, "tensor"):
                    dist.broadcast(local(parameter.detach()), source, group=group)
        with super().evaluating(module) as same:
            yield same

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the whole model's gradients, of which some ranks have copies."""
        if self.alone:
            return super().gradient_norm(module)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for count, gradients in _by_copies(module, self._world.world_size).items():
            total += nn.utils.get_total_norm(gradients).to(self._device, torch.float64).square() / count
        dist.all_reduce(total)
        return total.sqrt()

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        with _unlogged("torch.distributed.tensor._redistribute"):  # advises to merge gathers, which it cannot
            return super().state_dict(module, copy=copy, leave_out=leave_out)

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> torch.Tensor | None:
        """Clips each rank's part of the gradients; torch's functions take no tensors of several meshes."""
        if self.alone:
            return super().clip_gradients(module, norm=norm, value=value)
        own = [part for parts in _by_copies(module, self._world.world_size).values() for part in parts]
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


@contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Context in which one of torch's loggers does not warn."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _by_copies(module: nn.Module, ranks: int) -> dict[int, list[torch.Tensor]]:
    """Returns this rank's parts of the gradients, by the number of ranks that have the same part."""
    found: dict[int, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            found.setdefault(copies(parameter.grad, ranks), []).append(local(parameter.grad))
    return found
