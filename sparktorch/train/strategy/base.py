"""What the training loop asks of a strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from sparktorch.train.recipe import Recipe

__all__ = ["Strategy"]


class Strategy(Protocol):
    """How the ranks of a process group share one model."""

    @property
    def gradient_divisor(self) -> int:
        """What the strategy divides summed gradients by; the loop multiplies the loss by it."""
        ...

    def prepare(self, module: nn.Module) -> nn.Module:
        """Returns the module that the loop calls, its gradients reduced over the ranks."""
        ...

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer over the parameters this rank updates."""
        ...

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a block in which backward adds to this rank's gradients and sends nothing."""
        ...

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> None:
        """Limits the gradients of the whole model: each element, then the norm of all."""
        ...

    def state_dict(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on the CPU; called by every rank, meant for rank 0."""
        ...
