"""Finds NaN and infinite losses and gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.world import World
from sparktorch.distributed.client import PeerFailure
from sparktorch.errors import ModuleError
from sparktorch.train.sharding.dtensor import local

__all__ = ["LossWatch", "all_finite"]

_LOOK_STEPS = 32
_NONE = torch.iinfo(torch.int64).max


class LossWatch:
    """Stops the training at the first loss that is not finite, in the rank that computed it.

    The gradients of such a loss turn the weights of all ranks into NaN, and then all later losses, so only the first
    one is the root cause. On CPUs, each loss is checked before its gradients are sent. Reading a loss from a GPU waits
    for all of the GPU's work, so there the ranks check the losses of a few dozen steps together.
    """

    def __init__(self, world: World, *, at_once: bool) -> None:
        """Takes the rank's world, and whether to check every loss at once, or only in `look_back`."""
        self._world = world
        self._at_once = at_once

    def check(self, loss: torch.Tensor) -> None:
        """Raises a `ModuleError` for a loss that is not finite, if losses are checked at once."""
        if not self._at_once:
            return
        value = loss.item()
        if not math.isfinite(value):
            raise _stopped(value)

    def look_back(self, losses: torch.Tensor, steps: int, *, now: bool = False) -> None:
        """Checks the losses since the last check, every few dozen steps; every rank calls it after each step.

        `losses` has this rank's losses in the epoch, of shape `(steps of the epoch,)`; the first `steps` were taken.
        `now`, which is the same on all ranks, checks them even if none is due. Raises a `ModuleError` if the first loss
        that is not finite is this rank's, and a `PeerFailure` if it is another rank's.
        """
        if self._at_once or (steps % _LOOK_STEPS and steps < len(losses) and not now):
            return
        since = (steps - 1) // _LOOK_STEPS * _LOOK_STEPS
        size = self._world.world_size
        rank = self._world.rank
        # The losses of all ranks are numbered step by step, and within a step rank by rank. So the smallest number of
        # a loss that is not finite says in which step and in which rank the first one was.
        numbers = torch.arange(since, steps, device=losses.device) * size + rank
        smallest = torch.where(losses[since:steps].isfinite(), _NONE, numbers).min()
        if size > 1:
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        first = int(smallest)
        if first == _NONE:
            return
        step, culprit = divmod(first, size)
        if culprit != rank:
            raise PeerFailure(f"the loss of rank {culprit} in step {step + 1} is not finite")
        raise _stopped(float(losses[step]), step=step + 1)


def _stopped(loss: float, *, step: int | None = None) -> ModuleError:
    return ModuleError(
        f"the loss is {loss}",
        hint="lower learningRate, warm it up (warmupSteps), clip gradients (gradientClipNorm), or look for rows that "
        "the loss is not defined for, such as the logarithm of zero; nonFiniteLoss='skip' leaves such steps out",
        param="nonFiniteLoss",
        step=step,
        code="ST-NAN-LOSS",
    )


def all_finite(loss: torch.Tensor, module: nn.Module, world: World) -> bool:
    """Returns whether loss and gradients are finite in every rank; a collective, called by every rank.

    Each rank checks its own shards of sharded gradients.
    """
    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
    dense = [part._values() if part.is_sparse else part for part in gradients]
    # The norm is the largest absolute value, because a sum could overflow. Empty shards have no largest value.
    largest = nn.utils.get_total_norm([part for part in dense if part.numel()], math.inf)
    finite = (loss.isfinite() & largest.isfinite()).float()
    if world.world_size > 1:
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)
