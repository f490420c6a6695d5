"""Checks that ranks which shard parameters have gradients of the same ones; other sizes would crash or hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.devices import is_host
from sparktorch.errors import ModuleError

__all__ = ["HINT", "SameParameters"]

HINT = "use strategy='ddp' or 'zero1'; or let every row use them, with a factor of 0 where they do not count"
# Its name since torch 2.13, which warns of the other one.
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SameParameters:
    """A unit's `torch.distributed.fsdp` communication; ranks that reduced different sizes would crash or hang.

    The number of elements tells whether a rank has gradients of other parameters than in its first step, in which the
    ranks compare them.
    """

    def __init__(self, name: str, unit: nn.Module) -> None:
        """Takes a unit before it is sharded, and after those within it; its name is empty for the whole module."""
        from torch.distributed.fsdp import FSDPModule  # slow to import

        self._name = name or type(unit).__name__
        within = {
            each
            for part in unit.modules()
            if part is not unit and isinstance(part, FSDPModule)
            for each in part.modules()
        }
        self._parts = {prefix: part for prefix, part in unit.named_modules() if part not in within}
        self._sizes = {
            f"{prefix}.{each}".lstrip("."): parameter.shape
            for prefix, part in self._parts.items()
            for each, parameter in part.named_parameters(recurse=False)
        }
        self._known: dict[tuple[bool, ...], int] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a tensor for the communication."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces and scatters the gradients of the unit.

        Raises:
            ModuleError: This rank, or in the first step another one, has gradients of other parameters.
        """
        count = input_tensor.numel()
        own = (parameter for part in self._parts.values() for parameter in part._parameters.values())
        trained = tuple(parameter is not None and parameter.requires_grad for parameter in own)
        known = self._known.get(trained, count)
        most, least = max(known, count), min(known, count)
        if trained not in self._known and is_host(input_tensor.device):  # a step waits for no accelerator
            ends = torch.tensor([count, -count])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            most, least = int(ends[0]), -int(ends[1])
        self._known[trained] = most
        if least < most:
            raise self._refused(most - least, group.size())
        return _REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    def _refused(self, missing: int, ranks: int) -> ModuleError:
        """Returns an error that names the parameters and parts which have that many elements, if there are any."""
        padded = {name: -(-shape[0] // ranks) * ranks * shape[1:].numel() for name, shape in self._sizes.items()}
        parts = {name: [p for p in padded if p.startswith(f"{name}.")] for name in self._parts if name}
        fits = [
            *(f"parameter {name!r}" for name in padded if padded[name] == missing),
            *(f"parameters of {name!r}" for name, own in parts.items() if sum(padded[p] for p in own) == missing),
        ]
        what = " or ".join(fits) if fits else f"parameters of {self._name!r}"
        return ModuleError(
            f"{what} got gradients in some steps or ranks only, which strategies that shard parameters cannot train",
            hint=HINT,
            param="strategy",
            code="ST-SHARDING",
        )
