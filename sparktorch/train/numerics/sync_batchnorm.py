"""Batch normalisation with the statistics of the rows of all ranks.

`torch.nn.SyncBatchNorm` runs on GPUs only, and counts the placeholder rows of ranks without rows. So `synchronise`
replaces its `forward`, too.
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

from sparktorch.base.batch import Batch
from sparktorch.errors import ModuleError

__all__ = ["RealRows", "buffers_of_rank", "has_batch_norm", "synchronise"]


@dataclass
class RealRows:
    """The number of real rows in this rank's current pass; the rows after them are placeholders, or fill the batch up.

    Attributes:
        real: Number of real rows.
        total: Number of all rows.
    """

    real: int = 1
    total: int = 1

    def set_from(self, batch: Batch) -> None:
        """Reads the numbers from the batch of the next pass."""
        if batch.sizes is None:
            self.real = batch.rows
            self.total = batch.sample_count
        else:
            self.real = int(batch.sizes[: batch.rows].sum())
            self.total = int(batch.sizes.sum())

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values of the real rows; within the module, a row may have become several rows."""
        if self.real == self.total:
            return values
        return values[: len(values) * self.real // self.total]


def has_batch_norm(module: nn.Module) -> bool:
    """Returns whether batch normalisation uses a rank's own rows somewhere, and so needs two of them in training."""
    return any(isinstance(part, _BatchNorm) and not _is_synchronised(part) for part in module.modules())


def buffers_of_rank(module: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers that each rank updates from its own rows: all but those of synchronised layers."""
    shared = {id(buffer) for part in module.modules() if _is_synchronised(part) for buffer in part.buffers()}
    return [buffer for buffer in module.buffers() if id(buffer) not in shared]


def _is_synchronised(part: nn.Module) -> bool:
    """Returns whether `synchronise` has replaced the layer's `forward`."""
    return isinstance(part, _BatchNorm) and "forward" in vars(part)


def synchronise(module: nn.Module, real_rows: RealRows, *, everywhere: bool = True, compiled: bool = False) -> None:
    """Makes the module's batch normalisation use the statistics of all ranks' rows in training.

    Without `everywhere`, it changes only torch's `SyncBatchNorm` over all ranks. It replaces `forward`, in place;
    class, parameters, buffers and their names stay. The engine sets `real_rows` before each pass. A `compiled` module
    needs a graph break at each collective. A batch normalisation with its own `forward` or process group is refused.
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
        vars(part)["forward"] = partial(forward, part, real_rows)


def _forward(norm: Any, real_rows: RealRows, x: torch.Tensor) -> torch.Tensor:
    """Normalises a tensor of shape `(rows, channels, ...)`, as `_BatchNorm.forward` does."""
    if not norm.training:
        return _BatchNorm.forward(norm, x)
    norm._check_input_dim(x)
    axes = [0, *range(2, x.dim())]
    shape = (1, -1, *[1] * (x.dim() - 2))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    real_part = real_rows.part_of
    # One collective sums the values, and a second one the squared deviations from their mean: plain sums of squares
    # would lose a variance that is much smaller than the mean.
    count = wide.new_full([1], real_part(wide).numel() // wide.shape[1])
    sums = _sum_over_ranks(torch.cat([real_part(wide).sum(axes), count]))
    mean = sums[:-1] / sums[-1]
    count = sums[-1].detach()
    centred = wide - mean.view(shape)
    squares = _sum_over_ranks(real_part(centred).square().sum(axes))
    # A single row has no variance between rows, even if it has several values a channel: it does not count.
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
    """Moves the running statistics towards a batch's, if `counts` is true.

    They move by the share `momentum`; without a momentum, they become the mean over all batches.
    """
    if not norm.track_running_stats or norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(counts)
    for running, batch_value in (norm.running_mean, mean), (norm.running_var, variance):
        tracked = norm.num_batches_tracked.clamp(min=1).to(running.dtype)
        share = tracked.reciprocal() if norm.momentum is None else torch.full_like(tracked, norm.momentum)
        running.lerp_(batch_value.to(running.dtype), share * counts)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce sum with a gradient, which is the sum of all ranks' gradients.

    The all-reduce in `torch.distributed.nn` is deprecated in favour of a private function.
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
