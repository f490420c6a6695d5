"""Data parallel: every rank holds the whole model, gradients are all-reduced while they appear."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparktorch.train.recipe import Recipe
from sparktorch.world import World

__all__ = ["DDP"]


class DDP:
    """`DistributedDataParallel`; alone, the plain module."""

    def __init__(self, world: World, *, unused_parameters: bool) -> None:
        """Takes the rank it works for, and whether some parameters may get no gradient in a step."""
        self._world = world
        self._unused_parameters = unused_parameters

    @property
    def gradient_divisor(self) -> int:
        """DDP averages over the ranks."""
        return self._world.world_size

    def prepare(self, module: nn.Module) -> nn.Module:
        """Wraps the module; rank 0's initial parameters and buffers go to every rank."""
        if self._world.world_size == 1:
            return module
        index = torch.device(self._world.device).index
        return DistributedDataParallel(
            module,
            device_ids=None if index is None else [index],
            gradient_as_bucket_view=True,
            find_unused_parameters=self._unused_parameters,
        )

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer over all trainable parameters."""
        return recipe.build_optimizer(module)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Leaves out the all-reduce."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> None:
        """Limits the gradients, which are the same on every rank."""
        if value is not None:
            nn.utils.clip_grad_value_(module.parameters(), value)
        if norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), norm)

    def state_dict(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the wrapped module's state; parameters are the same on every rank."""
        plain = module.module if isinstance(module, DistributedDataParallel) else module
        return {name: value.detach().cpu() for name, value in plain.state_dict().items()}
