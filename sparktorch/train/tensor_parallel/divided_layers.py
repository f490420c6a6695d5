"""Linear layers and attention of which each rank has a part, where torch's styles do not divide them so.

Attention is divided by heads (Shoeybi et al. 2019, Megatron-LM, https://arxiv.org/abs/1909.08053, section 3): queries,
keys and values by columns, so that a rank has whole heads, and the projection behind them by rows. Inputs may be
divided by positions (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2): they are gathered,
forward and, unless they are kept, again backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from sparktorch.base.devices import is_host, seed

__all__ = ["POSITIONS", "PROJECTION", "as_part", "drawn_apart", "is_part", "shard_columns", "shard_heads"]

POSITIONS = 1  # the axis of the positions of (rows, positions, features)
PROJECTION = "out_proj"  # of an nn.MultiheadAttention, which is divided by "rowwise"
_PACKED = ("in_proj_weight", "in_proj_bias")  # those of queries, of keys and of values, one behind the other


def is_part(x: torch.Tensor) -> bool:
    """Whether a tensor is a `DTensor`, of which each rank has some positions."""
    return hasattr(x, "to_local")


def as_part(own: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> Any:
    """Returns a `DTensor` of a shape of which a rank has its positions; they may be fewer than those of others."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(POSITIONS)], run_check=False, shape=shape, stride=stride)


def shard_columns(part: nn.Linear, mesh: DeviceMesh, *, recompute_allgather: bool) -> None:
    """Leaves a rank some outputs of a layer, in place, whose inputs are divided by positions, and gathered."""
    _shard_rows(part, mesh)
    part.__class__ = ColwiseLinear
    vars(part).update(recompute_allgather=recompute_allgather)


def shard_heads(part: nn.MultiheadAttention, mesh: DeviceMesh, *, recompute_allgather: bool) -> None:
    """Leaves a rank the projections of its heads, in place; `out_proj` is to be divided by "rowwise" besides.

    Names and shapes of the parameters stay: `in_proj_weight` is a `DTensor` of shape (3 * embed_dim, embed_dim).
    """
    _shard_rows(part, mesh)
    outside_graphs: Any = torch.compiler.disable  # generators are no part of a graph
    part.__class__ = MultiheadAttention
    vars(part).update(mesh=mesh, recompute_allgather=recompute_allgather, apart=outside_graphs(drawn_apart))


def _shard_rows(part: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves a rank its rows of a part's own parameters, and of each block of the packed ones."""
    from torch.distributed.tensor import DTensor, Shard

    from sparktorch.train.sharding.packed import Packed

    for name, parameter in list(part.named_parameters(recurse=False)):
        blocks, placement = (3, Packed.of(3, mesh)) if name in _PACKED else (1, Shard(0))
        by_rank = parameter.detach().view(blocks, mesh.size(), -1, *parameter.shape[1:])
        own = by_rank[:, mesh.get_local_rank()].flatten(0, 1).clone()
        shape, stride = parameter.shape, parameter.stride()
        divided = DTensor.from_local(own, mesh, [placement], run_check=False, shape=shape, stride=stride)
        part.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


class ColwiseLinear(nn.Linear):
    """A layer that is divided by columns, and takes a rank's positions: it returns all of them."""

    recompute_allgather: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes this rank's outputs of all positions."""
        divided: Any = self
        bias = None if divided.bias is None else divided.bias.to_local()
        return _linear_of_all(input, divided.weight.to_local(), bias, recompute=self.recompute_allgather)


class MultiheadAttention(nn.MultiheadAttention):
    """Torch's, divided by heads; it has its name, by which `wrap_classes` finds it."""

    mesh: DeviceMesh
    recompute_allgather: bool
    apart: Callable[..., Any]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes what `nn.MultiheadAttention.forward` does, of the same arguments in all ranks of the mesh."""
        heads, rank = self.num_heads // self.mesh.size(), self.mesh.get_local_rank()
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)  # rows, heads, positions, features of a head
        projected = _projected(self, query, key, value)
        q, k, v = (each.view(*each.shape[:-1], heads, -1).permute(order) for each in projected)
        # A mask of keys, (rows, keys), is one of all heads and queries.
        mask = None if key_padding_mask is None else _added(key_padding_mask, q.dtype)[:, None, None]
        causal = is_causal and mask is None and not need_weights  # attn_mask is that of `is_causal`, which kernels know
        if attn_mask is not None and not causal:
            own = _added(attn_mask, q.dtype)
            if own.dim() == 3:
                own = own.view(len(q), -1, *own.shape[1:])[:, rank * heads : (rank + 1) * heads]
            mask = own if mask is None else own + mask
        dropout = self.dropout if self.training else 0.0
        attend: Callable[..., Any] = partial(_weighted if need_weights else _fused, q, k, v, mask, dropout, causal)
        attended, weights = self.apart(attend, rank, q.device) if dropout else attend()
        attended = attended.transpose(1, 2) if self.batch_first else attended.permute(2, 0, 1, 3)
        output: torch.Tensor = self.out_proj(attended.flatten(2))
        return output, None if weights is None else _of_all_heads(weights, self.mesh, average=average_attn_weights)


def _projected(
    part: MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> list[torch.Tensor]:
    """Returns queries, keys and values of this rank's heads."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    given = (query, key, value)
    # Each rank computes a part of the gradient of an input, which backward sums up: once for each different input.
    entered = {
        id(each): DTensor.from_local(each, part.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        for each in given
        if not is_part(each)
    }

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if is_part(x):
            return _linear_of_all(x, weight, bias, recompute=part.recompute_allgather)
        return F.linear(entered[id(x)], weight, bias)

    parameters: dict[str, Any] = part._parameters
    own = {name: parameter.to_local() for name, parameter in parameters.items() if parameter is not None}
    bias, packed = own.get("in_proj_bias"), own.get("in_proj_weight")
    if packed is not None and query is key is value:
        return list(linear(query, packed, bias).chunk(3, -1))
    weights = [own[f"{name}_proj_weight"] for name in "qkv"] if packed is None else packed.chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [linear(x, weight, b) for x, weight, b in zip(given, weights, biases, strict=True)]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what is added to the scores, which are 0 or minus infinity for a mask of booleans."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: Any) -> tuple[torch.Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, *how), None


def _weighted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention and its weights, of shape (rows, heads, queries, keys)."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # in this order, as torch: the product might overflow
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ v, weights


def drawn_apart(function: Callable[[], Any], rank: int, device: torch.device) -> Any:
    """Calls a function that draws other numbers in each rank; afterwards, the ranks' generators are equal again."""
    drawn = int(torch.randint(2**31, ()))
    of_device = [] if is_host(device) else [device]
    with torch.random.fork_rng(of_device, device_type="cuda" if is_host(device) else device.type):
        seed(drawn + rank, device)
        return function()


def _of_all_heads(weights: torch.Tensor, mesh: DeviceMesh, *, average: bool) -> torch.Tensor:
    """Returns the weights of all heads, or their mean, in every rank."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    own, placement = (weights.mean(1) / mesh.size(), Partial()) if average else (weights, Shard(1))
    return DTensor.from_local(own, mesh, [placement], run_check=False).full_tensor()


def _linear_of_all(x: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, recompute: bool) -> torch.Tensor:
    """Returns this rank's outputs of a linear function, of all positions of a `DTensor` of which each rank has some."""
    given = (x.to_local(), weight, bias, x.device_mesh, x.shape, recompute)
    found: torch.Tensor = _LinearOfAll.apply(*given)  # type: ignore[no-untyped-call]  # torch's
    return found


class _LinearOfAll(torch.autograd.Function):
    """Keeps a rank's positions, which are gathered again backward, or all; the sum of gradients is scattered."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mesh: DeviceMesh,
        shape: torch.Size,
        recompute: bool,
    ) -> torch.Tensor:
        kind = own.device.type
        ctx.mesh, ctx.shape, ctx.recompute, ctx.own = mesh, shape, recompute, own.dtype
        ctx.bias = None if bias is None else bias.dtype
        if torch.is_autocast_enabled(kind) and own.dtype is not torch.float64:
            own = own.to(torch.get_autocast_dtype(kind))  # before it is sent
        whole = wait_tensor(_gathered(own, mesh, shape))  # type: ignore[no-untyped-call]  # torch's
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] and not recompute else own, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from torch.distributed.tensor import DTensor, Partial, Shard

        kept, weight = ctx.saved_tensors
        of_input, of_weight, of_bias, *_ = ctx.needs_input_grad
        dtype = gradient.dtype  # under autocast, that of the output
        whole = kept.to(dtype) if of_weight else None
        if whole is not None and ctx.recompute:
            whole = _gathered(whole, ctx.mesh, ctx.shape)  # while the next lines compute
        found: list[torch.Tensor | None] = [None] * 6
        summed: Any = None
        if of_input:  # it is scattered while the next lines compute
            terms = DTensor.from_local(gradient @ weight.to(dtype), ctx.mesh, [Partial()], run_check=False)
            summed = terms.redistribute(placements=[Shard(POSITIONS)], async_op=True).to_local()
        flat = gradient.flatten(0, -2)
        if whole is not None:
            found[1] = (flat.T @ whole.flatten(0, -2)).to(weight.dtype)
        if of_bias:
            found[2] = flat.sum(0).to(ctx.bias)
        if of_input:
            found[0] = wait_tensor(summed).to(ctx.own)  # type: ignore[no-untyped-call]  # torch's
        return tuple(found)


def _gathered(own: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> torch.Tensor:
    """Returns all positions, which may be on their way."""
    from torch.distributed.tensor import Replicate

    part = as_part(own.detach(), mesh, shape)
    found: torch.Tensor = part.redistribute(placements=[Replicate()], async_op=True).to_local()
    return found
