"""What a strategy is: its `Kind`, which is known before there are ranks, and the `Strategy` object in each rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import download
from sparktorch.base.imports import load_object
from sparktorch.base.no_op import never, no_op
from sparktorch.base.world import World
from sparktorch.errors import ConfigError
from sparktorch.train.recipe.loss import Step, Sums
from sparktorch.train.recipe.recipe import Recipe

__all__ = [
    "GradientSync",
    "GradientsOfRows",
    "Job",
    "Kind",
    "OwnState",
    "Start",
    "Strategy",
    "broadcast",
    "check_optimizer_class",
]

O = TypeVar("O")  # noqa: E741 - the options of a strategy


@dataclass(frozen=True)
class Job:
    """What a strategy may refuse before the ranks train. What is not known yet is `None`.

    Attributes:
        config: How it trains.
        recipe: What is trained; `None` in a loop of the user's own.
        options: The options of the strategy.
        kind: The strategy.
        workers: Number of workers.
        device: The device of the ranks, for `Kind.check_device`.
        module: The module, in the dry run.
        batch: A few rows, with which the module can be called.
    """

    config: TrainConfig
    recipe: Any
    options: Any
    kind: Kind
    workers: int | None = None
    device: str = ""
    module: nn.Module | None = None
    batch: Batch | None = None

    @property
    def in_micro_batches(self) -> bool:
        """Whether a step may take several passes."""
        return self.config.accumulation_steps > 1 or self.config.micro_batch_size is not None

    @property
    def optimizer(self) -> str | type | None:
        """The optimizer's name or class; `None` of a function that makes it."""
        optimizer = self.recipe.optimizer
        if isinstance(optimizer, str) and ":" in optimizer:
            optimizer = load_object(optimizer)
        return optimizer if isinstance(optimizer, str | type) else None


def _refuse_nothing(job: Job) -> None:
    """Takes every job."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A strategy, as it is known before there are ranks: an entry of the registry.

    Attributes:
        options: A dataclass of its options, `strategyParams`.
        rank: The class of its object in each rank.
        check_settings: Refuses config, recipe and options that it does not support with a `ConfigError`.
        check_device: Refuses those that do not suit the device of the ranks.
        check: Refuses what depends on more: it is called when the number of workers is known, and the module, with a
            `Job` of these. Raises a `ConfigError`, or a `ModuleError`.
        needs_group: Whether, with some options, even a single rank needs a process group.
        makes_validation: Whether, with some options, it chooses the validation rows itself.
        resumable: Whether a checkpoint can hold all of its state.
        asynchronous: Whether, with some options, ranks take steps without waiting for each other, so that no two have
            the same weights.
        own_batches: Whether each rank trains a model of its own, on batches of its own.
        divides_parameters: Whether a rank keeps its share of the parameters only, and has `shares`. Then a forward pass
            is a collective: all ranks need the same number of passes, and none can fail alone.
        runs_passes: Whether it runs forward and backward passes itself, in `run_pass`.
        same_weights: Whether all ranks have the same weights after each step.
        waits_for_device: Whether each step waits for the device anyway, so that each rank can check its losses at once.
    """

    options: type[Any]
    rank: type[Strategy[Any]]
    check_settings: Callable[[Job], None] = _refuse_nothing
    check_device: Callable[[Job], None] = _refuse_nothing
    check: Callable[[Job], None] = _refuse_nothing
    needs_group: Callable[[Any], bool] = never
    makes_validation: Callable[[Any], bool] = never
    asynchronous: Callable[[Any], bool] = never
    resumable: bool = True
    own_batches: bool = False
    divides_parameters: bool = False
    runs_passes: bool = False
    same_weights: bool = False
    waits_for_device: bool = False


def check_optimizer_class(job: Job, part: str) -> None:
    """Refuses a function that makes an optimizer, for a strategy that builds one for each `part`."""
    if job.optimizer is None:
        raise ConfigError(
            f"strategy {job.config.strategy!r} builds an optimizer for each {part}, and optimizer is no class",
            hint="name a class in torch.optim, or pass the class itself with optimizerParams",
            param="optimizer",
            code="ST-STRATEGY",
        )


@dataclass(frozen=True)
class Start:
    """What a strategy may use to prepare a module.

    Attributes:
        materialise: Gives a part of a module without values its values; for other modules it does nothing. A strategy
            that divides parameters calls it for one part after another.
        example: Returns a batch of this rank; `None` where none is known, as in loops of users.
    """

    materialise: Callable[[nn.Module], None] = no_op
    example: Callable[[], Batch] | None = None


class OwnState:
    """A strategy's own state between steps: here none."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns it, as tensors by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what this rank's `state_dict` returned, or rank 0's if the number of ranks has changed."""


class GradientSync:
    """How the gradients of a rank's backward passes become those of all ranks. Here, they stay those of this rank.

    The engine calls in each step, as any of these may be a collective, in every rank at the same point:

    1. forward and `backward` of each micro-batch: all but the last within `no_sync`, the last within `reducing`. Or,
       where the device may be full: `before_trial`, all of them within `no_sync`, once or more often, and `reduce`;
    2. `complete`, before it looks at the gradients.

    Attributes:
        divisor: Number by which summed gradients are divided; the loop multiplies the loss by it.
        warm_up_passes: Forward and backward passes without a step, after which gradients are summed in their final
            order.
        completes: Whether an optimizer may not step without `complete`, or, of a strategy that averages parameters in
            `after_step`, without its strategy: a loop then has to wrap its optimizer, too.
    """

    warm_up_passes: ClassVar[int] = 0
    completes = False

    def __init__(self, divisor: int) -> None:
        """Takes the number of ranks with other rows."""
        self.divisor = divisor

    def backward(self, loss: torch.Tensor, *, rows: bool) -> None:
        """Runs the backward pass of a micro-batch; `rows` says whether it has any but placeholders."""
        loss.backward()  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients are accumulated in this rank without reducing them."""
        return nullcontext()

    def reducing(self, *, rows: bool, warm_up: bool = False) -> AbstractContextManager[None]:
        """Returns a context of the last pass of a step, at whose end all gradients of the step are reduced.

        Args:
            rows: Whether this rank has rows in the step.
            warm_up: Whether no step follows, and gradients are zero.
        """
        return nullcontext()

    def before_trial(self) -> None:
        """Does the collectives that passes begin with, before passes that may find the device full."""

    def reduce(self, *, rows: bool = True) -> None:
        """Reduces the gradients that all passes of a step have accumulated within `no_sync`."""

    def complete(self) -> None:
        """Completes this rank's gradients after all passes of a step."""


class GradientsOfRows(GradientSync):
    """Gradients of a rank's own rows: none of placeholder rows.

    Their backward pass runs, for a module's own collectives. No row may use what placeholders do.

    Attributes:
        discards: Whether it is so in this step.
    """

    discards = True

    def __init__(self, module: nn.Module, divisor: int) -> None:
        """Takes the module that `prepare` returned."""
        super().__init__(divisor)
        self._module = module

    def backward(self, loss: torch.Tensor, *, rows: bool) -> None:
        """Runs the backward pass of a micro-batch."""
        super().backward(loss, rows=rows)
        if self.discards and not rows:
            self._module.zero_grad()


class Strategy(ABC, Generic[O]):
    """How the ranks of a process group share the training of one model: the object in a rank.

    The engine calls, in this order:

    1. `prepare(module)`, which returns the module that is called from then on; `gradients` and `optimizer`;
    2. in each step, forward and backward of each micro-batch as `GradientSync` says, `gradient_norm` or
       `clip_gradients` if needed, the optimizer's step, and `after_step`;
    3. for each validation, the context of `evaluating`; for each checkpoint, `saves` and `own_state`; after each epoch,
       `metrics`;
    4. `state_dict`, or `shares`, whenever the model is needed.

    Every rank calls every method at the same point, because any of them may be a collective.

    Attributes:
        own_state: Its own state between steps, which goes into checkpoints.
    """

    def __init__(self, config: TrainConfig, world: World, options: O, *, in_users_loop: bool = False) -> None:
        """Takes the configuration, the rank's world, and the options.

        `in_users_loop` says whether a user's code has the parameters, their gradients and the optimizer.
        """
        self._config = config
        self._world = world
        self._options = options
        self._in_users_loop = in_users_loop
        self._device = torch.device(world.device)
        self.own_state = OwnState()

    @property
    def _alone(self) -> bool:
        """Whether this rank is the only one, and there is no process group."""
        return self._world.world_size == 1

    @abstractmethod
    def prepare(self, module: nn.Module, start: Start) -> nn.Module:
        """Returns the module that the loop calls: on the rank's device, and wrapped as the strategy needs it."""

    def gradients(self, module: nn.Module) -> GradientSync:
        """Returns what reduces the gradients of the module that `prepare` returned."""
        return GradientSync(self._world.world_size)

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer over the parameters this rank updates, of the module as it was given to `prepare`."""
        return recipe.build_optimizer(module)

    @property
    def ranks_of_rows(self) -> int:
        """Number of ranks that compute on the same rows, and so compute the same loss."""
        return 1

    @property
    def reports_rows(self) -> bool:
        """Whether this rank reports what is computed of its rows: one of the ranks that compute on the same does."""
        return True

    def shared_rows(self, batch: Batch, before: Callable[[], object] = no_op) -> AbstractContextManager[Batch]:
        """Returns a context of a pass on a batch, which yields it with the rows of all ranks that compute on the same.

        These ranks draw the same numbers in it; `before` is called while each still has its own. It is a collective of
        them, if there are several.
        """
        return nullcontext(batch)

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs forward and backward of a micro-batch from `shared_rows`, for strategies that run passes.

        `step` calls a module with a batch, `scale` is a factor of the loss, and `autocast` the context of a forward
        pass.

        Returns:
            The sum of the weighted losses of the batch, without the factor, a scalar tensor; and the sums of metrics.
        """
        raise NotImplementedError

    def within_forward(self, module: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls a function that computes with the module's parameters, as if it were the module's forward pass.

        It calls the user's module, any parts of it, or other methods than `forward`. The module is what `prepare`
        returned, or what `evaluating` has yielded.
        """
        return function()

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

    def after_step(self, module: nn.Module) -> None:
        """Is called after each step of the optimizer."""

    def metrics(self) -> dict[str, float]:
        """Returns the strategy's metrics since the last call, over all ranks, for the epoch's record."""
        return {}

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which every rank holds the model that training would return now.

        Yields:
            The module to call; its forward pass is a collective only if parameters are divided.
        """
        broadcast(module.buffers(), self._world)
        yield module

    def for_training_step(self, module: nn.Module) -> nn.Module:
        """Returns what stands for a module that `evaluating` has yielded where a training step calls it."""
        return module

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Returns the whole model's state dict on the CPU in rank 0, but for some names; an empty dict in other ranks.

        With `copy`, the tensors share no memory with the module.
        """
        with self.evaluating(module) as plain:
            if not self._world.is_main:
                return {}
            state = plain.state_dict().items()
            return download({name: value.detach() for name, value in state if name not in leave_out}, copy=copy)

    def shares(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns this rank's share of the model that training would return now, for strategies that divide parameters.

        Returns:
            `DTensor`s by name, and tensors that are the same in all ranks that have them; with `copy`, copies on the
            CPU. One that the module has under several names is there under the first. A rank of a pipeline has those of
            its stages only.
        """
        raise NotImplementedError

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves the unsharded tensor of that name."""
        return self._world.is_main


def broadcast(tensors: Iterable[torch.Tensor], world: World) -> None:
    """Gives all ranks rank 0's tensors."""
    for tensor in tensors if world.world_size > 1 else ():
        values = tensor.detach()
        contiguous = values.contiguous()  # This is a copy of a tensor in another memory format.
        dist.broadcast(contiguous, 0)
        if contiguous is not values:
            values.copy_(contiguous)
