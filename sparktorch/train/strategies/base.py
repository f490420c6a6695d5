"""What the training loop asks of a strategy, and what most strategies answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import download
from sparktorch.base.imports import load_object
from sparktorch.base.world import World
from sparktorch.errors import ConfigError
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["Strategy", "require_optimizer_class"]

_DATA = "data"  # the mesh's dimension along which ranks hold different samples

O = TypeVar("O")  # noqa: E741 - the options of a strategy


class Strategy(ABC, Generic[O]):
    """How the ranks of a process group share the training of one model.

    On the driver, `check` refuses what does not go together with the strategy. In every rank, the engine calls, in
    this order:

    1. `prepare(module)`, which returns the module that is called from then on, and `optimizer(recipe, module)`;
    2. where checkpoints are kept, `warm_up_passes` forward and backward passes without a step; where training goes on
       from one, `load_own_state`;
    3. in each step, forward and backward of each micro-batch (all but the last within `no_sync`), `before_step`,
       `gradient_norm` or `clip_gradients` where they are asked for, the optimizer's step, and `after_step`;
    4. for each validation, the block of `evaluating`; for each checkpoint, `saves` and `own_state`; after each epoch,
       `metrics`;
    5. `state_dict`, whenever the whole model is wanted.

    Every rank calls every method at the same place, for any of them may be a collective.

    Attributes:
        options_type: A dataclass of the strategy's options, `strategyParams`.
        collective_forward: Whether a forward pass waits for the other ranks, so that all must take equally many.
        waits_for_device: Whether each step waits for the device anyway, so that the ranks look at losses each by
            itself.
        warm_up_passes: Number of passes after which gradients are summed in their final order.
        resumable: Whether `named_tensors` holds all of its state, so that a checkpoint has it.
        own_batches: Whether each rank trains a model of its own, on batches of its own.
    """

    options_type: ClassVar[type[Any]]
    collective_forward: ClassVar[bool] = False
    waits_for_device: ClassVar[bool] = False
    warm_up_passes: ClassVar[int] = 0
    resumable: ClassVar[bool] = True
    own_batches: ClassVar[bool] = False

    @classmethod
    def makes_validation(cls, options: O) -> bool:
        """Whether the strategy chooses the validation rows itself."""
        return False

    @classmethod
    def check(cls, config: TrainConfig, recipe: Recipe, options: O) -> None:
        """Refuses, on the driver, what does not go together with this strategy.

        Raises:
            ConfigError: Names the Params.
        """

    @classmethod
    def needs_group(cls, options: O) -> bool:
        """Whether even a rank that is alone needs a process group, for what torch does in one only."""
        return False

    def __init__(self, config: TrainConfig, world: World, options: O) -> None:
        """Takes the configuration, the rank it works for, and its own options."""
        self._config = config
        self._world = world
        self._options = options
        self._device = torch.device(world.device)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of one dimension, named `data`."""
        # Of the group that is open: init_device_mesh opens another one on hosts with a GPU, for ranks on CPUs.
        group = dist.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, self._device.type, mesh_dim_names=(_DATA,))

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one, and there is no process group."""
        return self._world.world_size == 1

    def saves(self, name: str) -> bool:
        """Whether it falls to this rank to save a tensor of `state.named_tensors` that is not divided."""
        return self._world.is_main

    def own_state(self) -> dict[str, torch.Tensor]:
        """Returns what a rank keeps from step to step besides module and optimizer, by name, for `load_own_state`."""
        return {}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what this rank's `own_state` returned; with another number of ranks, from that of rank 0."""

    @property
    def gradient_divisor(self) -> int:
        """What the strategy divides summed gradients by; the loop multiplies the loss by it."""
        return self._world.world_size

    @abstractmethod
    def prepare(self, module: nn.Module) -> nn.Module:
        """Returns the module that the loop calls, on the rank's device, its gradients reduced over the ranks.

        Args:
            module: The user's, on the CPU.
        """

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer over the parameters this rank updates.

        Args:
            recipe: Names the optimizer.
            module: The module as it was given to `prepare`.
        """
        return recipe.build_optimizer(module)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the user's module under the one that `prepare` returned."""
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a block in which backward adds to this rank's gradients and sends nothing."""
        return nullcontext()

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> torch.Tensor | None:
        """Limits the gradients of the whole model: each element, then the norm of all.

        Returns:
            The norm before it was limited, a scalar tensor that may be divided among ranks; `None` without a limit.
        """
        if value is not None:
            nn.utils.clip_grad_value_(module.parameters(), value)
        return None if norm is None else nn.utils.clip_grad_norm_(module.parameters(), norm)

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the gradients of the whole model, a scalar tensor."""
        gradients: list[torch.Tensor] = [p.grad for p in module.parameters() if p.grad is not None]
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        return nn.utils.get_total_norm(dense)

    def before_step(self, module: nn.Module) -> None:
        """Is called when the gradients of a step are complete in this rank, before they are clipped."""

    def after_step(self, module: nn.Module) -> None:
        """Is called after each step of the optimizer."""

    def metrics(self) -> dict[str, float]:
        """Returns what the strategy measured since the last call, over all ranks: part of an epoch's record."""
        return {}

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """A block in which every rank holds the same model, the one that training would now return.

        Yields:
            The module to call, whose forward waits for no other rank unless `collective_forward`.
        """
        plain = self.unwrap(module)
        if not self.alone:
            for buffer in plain.buffers():  # running statistics are each rank's own
                dist.broadcast(buffer, 0)
        yield plain

    def state_dict(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns the whole model's state on the CPU; it is rank 0's to have, and empty elsewhere.

        Args:
            module: The one that `prepare` returned.
            copy: Whether it must not share memory with the module.
        """
        with self.evaluating(module) as plain:
            if not self._world.is_main:
                return {}
            return download({name: value.detach() for name, value in plain.state_dict().items()}, copy=copy)


def require_optimizer_class(config: TrainConfig, recipe: Recipe, each: str) -> str | type:
    """Returns the optimizer's name or class, having refused a factory: a strategy builds several of them.

    Args:
        config: Names the strategy.
        recipe: Names the optimizer.
        each: For what it builds one each.

    Raises:
        ConfigError: The optimizer is no class.
    """
    optimizer = recipe.optimizer
    if isinstance(optimizer, str) and ":" in optimizer:
        optimizer = load_object(optimizer)
    if isinstance(optimizer, str | type):
        return optimizer
    raise ConfigError(
        f"strategy {config.strategy!r} builds an optimizer for each {each}, and optimizer is no class",
        hint="name a class in torch.optim, or pass the class itself with optimizerParams",
        param="optimizer",
    )
