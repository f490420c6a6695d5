"""A loss that is NaN or infinite: where it was, and whether a step is fit to be taken."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.world import World
from sparktorch.distributed.client import PeerFailure
from sparktorch.errors import ModuleError
from sparktorch.train.dtensor import local

__all__ = ["LossWatch", "all_finite"]

_LOOK_STEPS = 32
_NOWHERE = torch.iinfo(torch.int64).max


class LossWatch:
    """Stops the training at the first loss that is not finite, in the rank that computed it.

    Its gradients make NaNs of the weights of all ranks, whose next losses are NaN too: what counts is
    who was first. On CPUs each loss is looked at before its gradients are sent. Reading one from a GPU
    waits for all its work, so there the ranks look together at the losses of a few dozen steps.
    """

    def __init__(self, world: World, *, at_once: bool | None = None) -> None:
        """Takes the rank's place, and whether it may read every loss; the device decides by default."""
        self._world = world
        self._at_once = torch.device(world.device).type == "cpu" if at_once is None else at_once

    def check(self, loss: torch.Tensor) -> None:
        """Looks at one loss, where that is for free.

        Raises:
            ModuleError: It is not finite.
        """
        if self._at_once and not math.isfinite(value := loss.item()):
            raise _stopped(value)

    def look_back(self, losses: torch.Tensor, steps: int, *, now: bool = False) -> None:
        """Looks at the losses since it last did; every rank calls it after each step.

        Args:
            losses: This rank's losses of the epoch, shape `(steps of the epoch,)`.
            steps: Number of steps of the epoch that were taken.
            now: Whether it must not be put off, on all ranks or on none.

        Raises:
            ModuleError: This rank's was the first that is not finite.
            PeerFailure: That of another rank was.
        """
        if self._at_once or (steps % _LOOK_STEPS and steps < len(losses) and not now):
            return
        since = (steps - 1) // _LOOK_STEPS * _LOOK_STEPS
        size, rank = self._world.world_size, self._world.rank
        seen = losses[since:steps]
        places = torch.arange(since, steps, device=losses.device) * size + rank
        first = torch.where(seen.isfinite(), _NOWHERE, places).min()
        if size > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        place = int(first)
        if place == _NOWHERE:
            return
        step = place // size
        if place % size != rank:
            raise PeerFailure(f"the loss of rank {place % size} in step {step + 1} is not finite")
        raise _stopped(float(losses[step]), step=step + 1)


def _stopped(loss: float, *, step: int | None = None) -> ModuleError:
    return ModuleError(
        f"the loss is {loss}",
        hint="lower learningRate, warm it up (warmupSteps), clip gradients (gradientClipNorm), or look for rows that "
        "the loss is not defined for, such as the logarithm of zero; nonFiniteLoss='skip' leaves such steps out",
        param="nonFiniteLoss",
        step=step,
    )


def all_finite(loss: torch.Tensor, module: nn.Module, world: World) -> bool:
    """Returns whether loss and gradients are finite in every rank; all of them call it.

    Args:
        loss: This rank's loss, a scalar.
        module: Holds the gradients of a step; of sharded ones each rank looks at its own.
        world: This rank's place.
    """
    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
    dense = [part._values() if part.is_sparse else part for part in gradients]
    # The largest element: no sum that could overflow. An empty share has none.
    largest = nn.utils.get_total_norm([part for part in dense if part.numel()], math.inf)
    finite = (loss.isfinite() & largest.isfinite()).float()
    if world.world_size > 1:
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)
