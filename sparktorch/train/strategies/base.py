"""The interface between the training loop and a strategy, with defaults that suit most strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import download
from sparktorch.base.imports import load_object
from sparktorch.base.world import World
from sparktorch.errors import Refusal
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import mesh_of_training

__all__ = ["Job", "Step", "Strategy", "needs_optimizer_class"]

_DATA = "data"  # the mesh's dimension along which ranks hold different samples

Step = Callable[[nn.Module, Batch], tuple[torch.Tensor, Sums]]
O = TypeVar("O")  # noqa: E741 - the options of a strategy


@dataclass(frozen=True)
class Job:
    """What a strategy may refuse before a job.

    Attributes:
        config: How it trains.
        recipe: What is trained; `None` in a loop of the user's own.
        options: The options of the strategy.
        kind: The class of the strategy.
    """

    config: TrainConfig
    recipe: Recipe | None
    options: Any
    kind: type[Strategy[Any]]

    @property
    def in_micro_batches(self) -> bool:
        """Whether a step may take several passes."""
        return self.config.accumulation_steps > 1 or self.config.micro_batch_size is not None

    @property
    def optimizer(self) -> str | type | None:
        """The optimizer's name or class; `None` of a function that makes it."""
        assert self.recipe is not None
        optimizer = self.recipe.optimizer
        if isinstance(optimizer, str) and ":" in optimizer:
            optimizer = load_object(optimizer)
        return optimizer if isinstance(optimizer, str | type) else None


def needs_optimizer_class(each: str) -> Refusal:
    """Returns the refusal of functions that make an optimizer, by a strategy that builds one for `each`."""
    return Refusal(
        "optimizer",
        lambda job: job.optimizer is None,
        f"strategy {{p.config.strategy!r}} builds an optimizer for each {each}, and optimizer is no class",
        "name a class in torch.optim, or pass the class itself with optimizerParams",
    )


class Strategy(ABC, Generic[O]):
    """How the ranks of a process group share the training of one model.

    On the driver, `check` refuses settings that the strategy does not support. In every rank, the engine calls, in
    this order:

    1. `prepare(module)`, which returns the module that is called from then on, and `optimizer(recipe, module)`;
    2. with checkpoints, `warm_up_passes` forward and backward passes without a step; to resume from a checkpoint,
       `load_own_state`;
    3. in each step, forward and backward of each micro-batch (all but the last within `no_sync`, and `after_backward`;
       or `before_trial` and all of them within `no_sync`, once or more often; or with `reduces_apart` once; and
       `reduce`), `before_step`, `gradient_norm` or `clip_gradients` if needed, the optimizer's step, and `after_step`;
    4. for each validation, the context of `evaluating`; for each checkpoint, `saves` and `own_state`; after each epoch,
       `metrics`;
    5. `state_dict`, whenever the whole model is needed.

    Every rank calls every method at the same point, because any of them may be a collective.

    Attributes:
        options_type: A dataclass of the strategy's options, `strategyParams`.
        collective_forward: Whether a forward pass is a collective, so that all ranks need the same number of passes,
            and none can fail alone.
        waits_for_device: Whether each step waits for the device anyway, so that each rank can check its losses at once.
        warm_up_passes: Passes that warm up the reducer, after which it sums gradients in their final order.
        refusals: What it refuses of a `Job`, besides what its bases do.
        resumable: Whether a checkpoint can hold all of its state.
        own_batches: Whether each rank trains a model of its own, on batches of its own.
        runs_passes: Whether the strategy runs forward and backward passes itself, in `run_pass`.
        divides_parameters: Whether a rank keeps its share of the parameters only, and has `shares`.
        example: Returns a batch of this rank, for a strategy that needs one before it prepares a module.
        materialise: Gives a part of a module without values its values; for other modules it does nothing. A strategy
            that divides parameters calls it in `prepare`, for one part after another.
    """

    options_type: ClassVar[type[Any]]
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            "modelDir",
            lambda job: job.config.model_folder and not job.kind.divides_parameters,
            "modelDir is set, and under strategy {p.config.strategy!r} each worker holds the whole model",
            "set strategy='zero3', or 'mesh'; or leave modelDir out",
        ),
    )
    collective_forward: ClassVar[bool] = False
    waits_for_device: ClassVar[bool] = False
    warm_up_passes: ClassVar[int] = 0
    resumable: ClassVar[bool] = True
    own_batches: ClassVar[bool] = False
    runs_passes: ClassVar[bool] = False
    divides_parameters: ClassVar[bool] = False

    @classmethod
    def makes_validation(cls, options: O) -> bool:
        """Whether the strategy chooses the validation rows itself."""
        return False

    @classmethod
    def check_workers(cls, options: O, workers: int) -> None:
        """Refuses, on the driver, options that do not suit the number of workers.

        Raises:
            ConfigError: They do not.
        """

    @classmethod
    def check_device(cls, options: O, device: str) -> None:
        """Refuses options that do not suit the device of a rank, on the driver where it is known there.

        Raises:
            ConfigError: They do not.
        """

    @classmethod
    def needs_group(cls, options: O) -> bool:
        """Returns whether even a single rank needs a process group, for options that torch supports only in one."""
        return False

    @classmethod
    def check_module(cls, options: O, recipe: Recipe, module: nn.Module, workers: int) -> None:
        """Refuses, before the module is called, options that do not suit it.

        Args:
            options: The strategy's options.
            recipe: What is trained.
            module: The module.
            workers: Number of workers.

        Raises:
            ConfigError: An option is refused.
            ModuleError: The module is.
        """

    @classmethod
    def check_call(cls, options: O, recipe: Recipe, module: nn.Module, batch: Batch) -> None:
        """Refuses, in the dry run, options that do not suit what the module does with a few rows.

        Raises:
            ConfigError: An option is refused.
            ModuleError: The module is.
        """

    def __init__(self, config: TrainConfig, world: World, options: O) -> None:
        """Takes the configuration, the rank's world, and the strategy's options."""
        self._config = config
        self._world = world
        self._options = options
        self._device = torch.device(world.device)
        self.materialise: Callable[[nn.Module], None] = lambda part: None
        self.example: Callable[[], Batch] | None = None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh of one dimension, named `data`."""
        # Uses the open group: for CPU ranks on hosts with a GPU, init_device_mesh would open another one.
        group = dist.group.WORLD
        assert group is not None
        return mesh_of_training([group], self._device.type, torch.arange(self._world.world_size), [_DATA])

    searches = False  # whether the ranks find out in each step which parameters none of them has used
    in_users_loop = False  # whether a user's code has the parameters, their gradients and the optimizer

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one, and there is no process group."""
        return self._world.world_size == 1

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves the unsharded tensor of that name."""
        return self._world.is_main

    def own_state(self) -> dict[str, torch.Tensor]:
        """Returns the strategy's own state between steps, as tensors by name, for `load_own_state`."""
        return {}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what this rank's `own_state` returned, or rank 0's if the number of ranks has changed."""

    @property
    def acts_in_steps(self) -> bool:
        """Whether `before_step` changes gradients, so that an optimizer may not step without it."""
        return type(self).before_step is not Strategy.before_step

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange the inputs of a forward pass, which then should have the same shapes in all ranks."""
        return False

    def together(self, batch: Batch) -> Batch:
        """Returns a batch as the ranks that compute on its rows together need it. A collective of these, if any."""
        return batch

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs forward and backward of a micro-batch, for strategies with `runs_passes`.

        Args:
            module: The module that `prepare` returned.
            batch: This rank's rows.
            step: Calls a module with a batch; returns the sum of the weighted losses, and the sums of metrics.
            scale: Factor of the loss.
            autocast: Context of a forward pass.

        Returns:
            This rank's part of the sum of the weighted losses of all ranks, without the factor, a scalar tensor; and
            the sums of metrics.
        """
        raise NotImplementedError

    def shown(self, module: nn.Module) -> nn.Module:
        """Returns what stands for a module that `evaluating` has yielded where a training step calls it."""
        return module

    @property
    def gradient_divisor(self) -> int:
        """Number by which the strategy divides summed gradients; the loop multiplies the loss by it."""
        return self._world.world_size

    @abstractmethod
    def prepare(self, module: nn.Module) -> nn.Module:
        """Returns the module that the loop calls: on the rank's device, and wrapped as the strategy needs it.

        Args:
            module: The user's module, on the CPU.
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

    def within_forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls a function that computes with the module's parameters, as if it were the module's forward pass.

        Args:
            module: The module that `prepare` returned, or that `evaluating` has yielded.
            function: Calls the user's module, any parts of it, or other methods than `forward`.
        """
        return function()

    def no_sync(self, module: nn.Module, *, last: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which backward accumulates this rank's gradients without reducing them.

        Args:
            module: The module that `prepare` returned.
            last: Whether it is for the last pass of a step, as in `reduces_apart`.
        """
        return nullcontext()

    def before_trial(self, module: nn.Module) -> None:
        """Is called before passes that may find the device full; does the collectives that they would begin with."""

    def reduces_apart(self, *, rows: bool) -> bool:
        """Whether all passes of a step are to be within `no_sync`, followed by `reduce`.

        If it is so without rows, placeholder rows leave no gradients.

        Args:
            rows: Whether this rank has rows in the step.
        """
        return False

    def reduce(self, module: nn.Module, *, rows: bool = True) -> None:
        """Reduces the gradients that all passes of a step have accumulated within `no_sync`.

        Args:
            module: The module that `prepare` returned.
            rows: Whether this rank has rows in the step.
        """

    def after_backward(self, module: nn.Module, *, rows: bool) -> None:
        """Is called after the last backward pass of a step, if that was not within `no_sync`; `rows` as in `reduce`."""

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> torch.Tensor | None:
        """Clips the gradients of the whole model, first each element by value, then all together by norm.

        Returns:
            The norm before clipping by norm, a scalar tensor that may be sharded; `None` if `norm` is `None`.
        """
        if value is not None:
            nn.utils.clip_grad_value_(module.parameters(), value)
        return None if norm is None else nn.utils.clip_grad_norm_(module.parameters(), norm)

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the gradients of the whole model, a scalar tensor."""
        gradients: list[torch.Tensor] = [p.grad for p in module.parameters() if p.grad is not None]
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        return nn.utils.get_total_norm(dense) if dense else torch.zeros((), device=self._device)

    def before_step(self, module: nn.Module) -> None:
        """Is called when the gradients of a step are complete in this rank, before they are clipped."""

    def after_step(self, module: nn.Module) -> None:
        """Is called after each step of the optimizer."""

    def metrics(self) -> dict[str, float]:
        """Returns the strategy's metrics since the last call, over all ranks, for the epoch's record."""
        return {}

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which every rank holds the model that training would return now.

        Yields:
            The module to call; its forward pass is a collective only with `collective_forward`.
        """
        plain = self.unwrap(module)
        if not self.alone:
            for buffer in self.common_buffers(plain):  # running statistics are each rank's own
                dist.broadcast(buffer, 0)
        yield plain

    def common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers of the user's module of which rank 0's are those of the model."""
        return module.buffers()

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Returns the whole model's state dict on the CPU in rank 0, an empty dict in other ranks.

        Args:
            module: The module that `prepare` returned.
            copy: Whether the tensors must not share memory with the module.
            leave_out: Names of tensors to leave out.
        """
        with self.evaluating(module) as plain:
            if not self._world.is_main:
                return {}
            state = plain.state_dict().items()
            return download({name: value.detach() for name, value in state if name not in leave_out}, copy=copy)

    def shares(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns this rank's share of the model that training would return now, for strategies that divide parameters.

        Args:
            module: The module that `prepare` returned.
            copy: Whether to return copies, on the CPU.

        Returns:
            `DTensor`s by name, and tensors that are the same in all ranks that have them. One that the module has under
            several names is there under the first. A rank of a pipeline has those of its stages only.
        """
        raise NotImplementedError
