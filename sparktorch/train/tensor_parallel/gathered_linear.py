"""Linear layers whose input is divided by positions: it is gathered, forward and, unless it is kept, again backward.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

__all__ = ["POSITIONS", "ColwiseLinear", "as_part", "is_part", "linear_of_all"]

POSITIONS = 1  # the axis of the positions of (rows, positions, features)


def is_part(x: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`, of which each rank has some positions."""
    return hasattr(x, "to_local")


def as_part(own: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> Any:
    """Returns a `DTensor` of a shape of which a rank has its positions; they may be fewer than those of others."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(POSITIONS)], run_check=False, shape=shape, stride=stride)


def linear_of_all(
    x: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, recompute_allgather: bool
) -> torch.Tensor:
    """Returns this rank's outputs of a linear function, of all positions of a `DTensor` of which each rank has some.

    With `recompute_allgather`, positions are gathered again backward, instead of being kept.
    """
    given = (x.to_local(), weight, bias, x.device_mesh, x.shape, recompute_allgather)
    found: torch.Tensor = _LinearOfAll.apply(*given)  # type: ignore[no-untyped-call]  # torch's
    return found


class _LinearOfAll(torch.autograd.Function):
    """Keeps a rank's positions, or all; backward, the sum of gradients is scattered."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mesh: DeviceMesh,
        shape: torch.Size,
        recompute_allgather: bool,
    ) -> torch.Tensor:
        kind = own.device.type
        ctx.mesh, ctx.shape, ctx.recompute, ctx.own = mesh, shape, recompute_allgather, own.dtype
        ctx.bias = None if bias is None else bias.dtype
        if torch.is_autocast_enabled(kind) and own.dtype is not torch.float64:
            own = own.to(torch.get_autocast_dtype(kind))  # before it is sent
        whole = wait_tensor(_gathered(own, mesh, shape))  # type: ignore[no-untyped-call]  # torch's
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] and not recompute_allgather else own, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad
        dtype = gradient.dtype  # under autocast, that of the output
        whole = kept.to(dtype) if of_weight else None
        if whole is not None and ctx.recompute:
            whole = _gathered(whole, ctx.mesh, ctx.shape)  # while the next line computes
        found: list[torch.Tensor | None] = [None] * 6
        summed = _scattered(gradient @ weight.to(dtype), ctx.mesh) if of_input else None  # while the next lines compute
        flat = gradient.flatten(0, -2)
        if whole is not None:
            found[1] = (flat.T @ whole.flatten(0, -2)).to(weight.dtype)
        if of_bias:
            found[2] = flat.sum(0).to(ctx.bias)
        if summed is not None:
            found[0] = wait_tensor(summed).to(ctx.own)  # type: ignore[no-untyped-call]  # torch's
        return tuple(found)


def _gathered(own: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> torch.Tensor:
    """Returns all positions."""
    from torch.distributed.tensor import Replicate

    part = as_part(own.detach(), mesh, shape)
    found: torch.Tensor = part.redistribute(placements=[Replicate()], async_op=True).to_local()
    return found


def _scattered(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the sum over ranks of a tensor of all positions, of this rank's positions; it is to be waited for."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    terms = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return terms.redistribute(placements=[Shard(POSITIONS)], async_op=True).to_local()


class ColwiseLinear(nn.Linear):
    """A layer that is divided by columns, and takes a rank's positions: it returns all of them.

    Attributes:
        recompute_allgather: Whether it gathers its input again backward.
    """

    recompute_allgather: bool

    @classmethod
    def shard(cls, part: nn.Linear, mesh: DeviceMesh, *, recompute_allgather: bool) -> None:
        """Leaves a rank its outputs, in place; the parameters are the same in every rank before."""
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, parameter in list(part.named_parameters()):
            own = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            part.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        part.__class__ = cls
        vars(part).update(recompute_allgather=recompute_allgather)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes this rank's outputs of all positions."""
        divided: Any = self
        bias = None if divided.bias is None else divided.bias.to_local()
        return linear_of_all(input, divided.weight.to_local(), bias, recompute_allgather=self.recompute_allgather)
