"""Batch normalisation with the statistics of the rows of all ranks.

`torch.nn.SyncBatchNorm` runs on GPUs only, and counts the placeholder rows of ranks without rows. Where a module has
it, what is here replaces it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from sparktorch.errors import ModuleError

__all__ = ["Presence", "has_batch_norm", "synchronise"]


@dataclass
class Presence:
    """Whether this rank has real rows in the current step, and not only placeholder rows."""

    rows: bool = True


def has_batch_norm(module: nn.Module) -> bool:
    """Returns whether the module has batch normalisation of a rank's rows, which needs at least two in training."""
    return any(isinstance(part, _BatchNorm) and "forward" not in vars(part) for part in module.modules())


def synchronise(module: nn.Module, presence: Presence, *, everywhere: bool = True, compiled: bool = False) -> None:
    """Makes the module's batch normalisation use the statistics of all ranks' rows in training.

    Without `everywhere`, it does so for torch's `SyncBatchNorm` over all ranks alone. It replaces only `forward`, in
    place; class, parameters, buffers and their names stay. The engine updates `presence` before each pass. A `compiled`
    module needs a graph break at each collective. A batch normalisation with a `forward` or a process group of its own
    is refused.
    """
    forward = torch.compiler.disable(_forward) if compiled else _forward  # type: ignore[no-untyped-call]
    for name, part in module.named_modules():
        is_torch_sync = type(part) is nn.SyncBatchNorm and part.process_group in (None, dist.group.WORLD)
        if not (is_torch_sync or (everywhere and isinstance(part, _BatchNorm))):
            continue
        if not (is_torch_sync or type(part).forward is _BatchNorm.forward):
            what = "process group" if type(part) is nn.SyncBatchNorm else "forward"
            raise ModuleError(
                f"syncBatchNorm cannot synchronise {name!r}, a {type(part).__qualname__} with a {what} of its own",
                hint="use nn.BatchNorm1d, 2d or 3d, or leave syncBatchNorm out",
                param="syncBatchNorm",
            )
        vars(part)["forward"] = partial(forward, part, presence)


def _forward(norm: Any, presence: Presence, x: torch.Tensor) -> torch.Tensor:
    """Normalises a tensor of shape `(rows, channels, ...)`, as `_BatchNorm.forward` does."""
    if not norm.training:
        return _BatchNorm.forward(norm, x)
    norm._check_input_dim(x)
    axes = [0, *range(2, x.dim())]
    shape = (1, -1, *[1] * (x.dim() - 2))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def real(values: torch.Tensor) -> torch.Tensor:
        return values if presence.rows else values[:0]

    # The mean comes first, and then the squared deviations, in another collective: plain sums of squares would lose a
    # variance that is much smaller than the mean.
    count = wide.new_full([1], real(wide).numel() // wide.shape[1])
    sums = _sum_over_ranks(torch.cat([real(wide).sum(axes), count]))
    mean, count = sums[:-1] / sums[-1], sums[-1].detach()
    centred = wide - mean.view(shape)
    squares = _sum_over_ranks(real(centred).square().sum(axes))
    # A single row has no variance between rows, even if it has several values a channel: see `Engine.step`.
    has_several_rows = count > wide[0].numel() // wide.shape[1]
    _track(norm, mean.detach(), squares.detach() / (count - 1).clamp(min=1), has_several_rows)
    scale = torch.rsqrt(squares / count + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    normalised = centred * scale.view(shape)
    if norm.affine:
        normalised = normalised + norm.bias.view(shape)
    return normalised.to(x.dtype)


def _track(norm: Any, mean: torch.Tensor, variance: torch.Tensor, counts: torch.Tensor) -> None:
    """Updates the running statistics by `momentum`, or without one to the mean over all batches, if the rows count."""
    if not norm.track_running_stats or norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(counts)
    for running, of_batch in (norm.running_mean, mean), (norm.running_var, variance):
        tracked = norm.num_batches_tracked.clamp(min=1).to(running.dtype)
        share = tracked.reciprocal() if norm.momentum is None else torch.full_like(tracked, norm.momentum)
        running.lerp_(of_batch.to(running.dtype), share * counts)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce sum with a gradient, which is the sum of all ranks' gradients.

    The one in `torch.distributed.nn` is deprecated in favour of a private one.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, values: torch.Tensor) -> torch.Tensor:
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        return summed


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():  # A single rank has no process group.
        return values
    summed: torch.Tensor = _SumOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return summed
