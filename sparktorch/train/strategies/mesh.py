"""Hybrid sharding: the model is divided within groups of ranks, and each group has a copy of it.

Zhao et al. 2023, PyTorch FSDP (https://arxiv.org/abs/2304.11277), section 3.2.2. A group that lies on one host gathers
parameters without the network between hosts, which carries 1/`shard` of the gradients then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.config import at_least
from sparktorch.distributed.process_group import subgroup
from sparktorch.errors import ConfigError
from sparktorch.train.strategies.fsdp import ShardingOptions, Zero3

__all__ = ["Mesh", "MeshOptions"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MeshOptions(ShardingOptions):
    """Options of `mesh`, besides those of `zero3`.

    Attributes:
        data: Number of groups, each with a copy of the model; `None` for as many as there are ranks for.
        shard: Number of ranks of a group, among which the model is divided; `None` for as many as `data` leaves.
    """

    data: int | None = None
    shard: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is None and self.shard is None:
            raise ConfigError(
                "strategy 'mesh' has no dimension",
                hint="strategyParams={'shard': n} divides the model among n workers, as many as a host has GPUs",
                param="strategyParams",
            )
        for name in ("data", "shard"):
            if (value := getattr(self, name)) is not None:
                at_least(f"strategyParams.{name}", value, 1)

    def sizes(self, workers: int) -> tuple[int, int]:
        """Returns the number of groups, and that of ranks in each.

        Raises:
            ConfigError: They do not multiply to the number of workers.
        """
        data = self.data or workers // (self.shard or 1)
        shard = self.shard or workers // data if data else 0
        if data * shard == workers:
            return data, shard
        given = " x ".join(
            f"{name} {value}" for name in ("data", "shard") if (value := getattr(self, name)) is not None
        )
        possible = [size for size in range(1, workers + 1) if workers % size == 0]
        raise ConfigError(
            f"strategyParams has {given}, which {workers} workers cannot be divided into",
            hint=f"set one of them to {', '.join(map(str, possible))}, or change numWorkers",
            param="strategyParams",
        )


class Mesh(Zero3[MeshOptions]):
    """As `zero3` within each group; between groups, gradients are averaged."""

    options_type = MeshOptions

    @classmethod
    def check_workers(cls, options: MeshOptions, workers: int) -> None:
        """Refuses dimensions that do not multiply to the number of workers."""
        options.sizes(workers)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks in two dimensions, `data` and `shard`; those of a group are on one host where hosts have enough."""
        data, shard = self._options.sizes(self._world.world_size)
        hosts: list[str] = [""] * self._world.world_size
        dist.all_gather_object(hosts, self._world.host)
        ranks = torch.tensor(sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank]))).view(data, shard)
        apart = sum(len({hosts[rank] for rank in group}) > 1 for group in ranks.tolist())
        if apart and shard <= max(map(hosts.count, hosts)) and self._world.is_main:
            _log.warning(
                "%d of %d groups of strategy 'mesh' are on several hosts, whose network they load", apart, data
            )
        groups = [subgroup(self._world, lists) for lists in (ranks.T.tolist(), ranks.tolist())]
        return DeviceMesh.from_group(groups, self._device.type, mesh=ranks, mesh_dim_names=("data", "shard"))

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the whole model's gradients, of which each group has a copy."""
        norm = super().gradient_norm(module)
        return norm if self.alone else norm / self._options.sizes(self._world.world_size)[0] ** 0.5
