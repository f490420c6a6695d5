"""What to train: how module, loss and optimizer are made, as a value that travels to the ranks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from sparktorch.base.imports import SHIPPING_HINT, load_object
from sparktorch.base.state_dict import unpack_state
from sparktorch.errors import ConfigError, ModuleError, nearest
from sparktorch.train.recipe.loss import TrainingStep, weigh
from sparktorch.train.recipe.parameter_groups import freeze, group

__all__ = ["Loss", "ModuleSource", "Recipe"]


ModuleSource = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Factories for what is trained, with their parameters.

    Attributes:
        module: An `nn.Module` class or factory, its import path `"pkg.mod:Net"`, or an instance.
        module_params: Keyword arguments of the factory.
        initial: Weights to start from, a safetensors file; empty for those that the factory makes.
        loss: The name of a class in `torch.nn`, an import path, or a callable `(output, label)`
            that returns one loss per row, or their mean; `None` with a training step.
        loss_params: Keyword arguments of a loss class.
        optimizer: The name of a class in `torch.optim`, an import path, or a factory.
        optimizer_params: Keyword arguments of the optimizer besides the learning rate.
        learning_rate: Passed to the optimizer as `lr`.
        scheduler: The name of a class in `torch.optim.lr_scheduler`, an import path, or a factory
            `(optimizer, **params)`; `None` for a constant learning rate.
        scheduler_params: Keyword arguments of the scheduler.
        training_step: A callable `(module, batch)` that returns the loss, or the loss and a mapping of
            metrics, or its import path; in place of `loss`.
        parameter_groups: Options of the optimizer for parameters whose names match the patterns
            under "params"; the first group that matches a name holds.
        freeze: Patterns of names of parameters that are not trained; `"!pattern"` takes some out again.
        metrics: Further validation metrics by name: names of classes in torchmetrics, factories or instances.
        callbacks: What is called as the training goes on.
    """

    module: ModuleSource
    module_params: Mapping[str, Any] = field(default_factory=dict)
    initial: bytes = b""
    loss: str | Callable[..., torch.Tensor] | None = "MSELoss"
    loss_params: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | Callable[..., torch.optim.Optimizer] = "AdamW"
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 1e-3
    scheduler: str | Callable[..., Any] | None = None
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    training_step: str | Callable[..., Any] | None = None
    parameter_groups: Sequence[Mapping[str, Any]] = ()
    freeze: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Any] = ()

    def build_module(self, seed: int) -> nn.Module:
        """Builds the module; the same seed gives the same initial weights in every process.

        Raises:
            ModuleError: The factory fails, or what it returns is no `nn.Module`.
            ConfigError: The module has no such parameters to freeze.
        """
        module = self._make_module(seed)
        freeze(module, self.freeze)
        return module

    def _make_module(self, seed: int) -> nn.Module:
        if isinstance(self.module, nn.Module):
            if self.module_params:
                raise ModuleError("moduleParams are given, but module is an instance", hint="pass the class instead")
            try:
                return copy.deepcopy(self.module)
            except Exception as error:
                raise ModuleError(
                    f"the module instance cannot be copied: {error}", hint=SHIPPING_HINT, param="module"
                ) from error
        factory = load_object(self.module) if isinstance(self.module, str) else self.module
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            try:
                module = factory(**self.module_params)
            except Exception as error:
                raise ModuleError(
                    f"module {_name(factory)} cannot be built: {type(error).__name__}: {error}",
                    hint=f"its parameters are {_signature(factory)}; moduleParams are {dict(self.module_params)}",
                ) from error
        if not isinstance(module, nn.Module):
            raise ModuleError(
                f"module {_name(factory)} returned {type(module).__name__}, not an nn.Module",
                hint="pass an nn.Module class, a function that returns one, or an instance",
            )
        if self.initial:
            module.load_state_dict(unpack_state(self.initial))
        return module

    def build_loss(self) -> Loss:
        """Builds the loss.

        Raises:
            ModuleError: The loss is unknown or does not take its parameters.
        """
        return Loss(self.loss, self.loss_params)

    def build_training_step(self) -> TrainingStep | None:
        """Builds the training step, `None` where there is none and the loss counts.

        Raises:
            ModuleError: It cannot be imported or called.
        """
        step = load_object(self.training_step) if isinstance(self.training_step, str) else self.training_step
        if step is not None and not callable(step):
            raise ModuleError(f"trainingStep must be a callable (module, batch), got {step!r}", param="trainingStep")
        return None if step is None else TrainingStep(step)

    def build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer over the module's trainable parameters.

        It is the fused one where torch has such a kernel, the user has not chosen another, and
        neither complex parameters nor sparse gradients stand in its way.

        Raises:
            ModuleError: The optimizer is unknown or does not take its parameters.
        """
        factory, parameters, options = self.optimizer_call(module)
        try:
            optimizer: torch.optim.Optimizer = factory(parameters, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModuleError(
                f"optimizer {_name(factory)} cannot be built: {error}",
                hint=f"its parameters are {_signature(factory)}",
                param="optimizerParams",
            ) from error
        return optimizer

    def check_optimizer(self, module: nn.Module) -> None:
        """Refuses what `build_optimizer` would refuse, mostly without building one.

        The first optimizer of a process imports `torch._dynamo`, which takes a second. torch's own
        optimizers check their options before they miss the parameters.

        Raises:
            ModuleError: The optimizer is unknown or does not take its parameters.
            ConfigError: It does not take those of a group.
        """
        factory, _, options = self.optimizer_call(module)
        known: Mapping[str, Any] | None = None
        if not getattr(factory, "__module__", "").startswith("torch.optim."):
            known = self.build_optimizer(module).defaults
        elif _refusal(factory, options):
            self.build_optimizer(module)  # says why
        for number, given in enumerate(self.parameter_groups):
            own = {name: value for name, value in given.items() if name != "params"}
            if known is None:
                reason = _refusal(factory, {**options, **own})
            else:  # groups keep options that nobody looks at
                reason = ", ".join(f"unknown option {name!r}" for name in own if name not in known)
            if reason:
                raise ConfigError(
                    f"parameterGroups[{number}] does not suit optimizer {_name(factory)}: {reason}",
                    hint=f"its parameters are {_signature(factory)}",
                    param="parameterGroups",
                )

    def build_scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """Builds the scheduler, `None` where none is named.

        Args:
            optimizer: Whose learning rates it sets.
            steps: How often it will step: its `T_max` or `total_steps`, unless the user says otherwise.

        Raises:
            ModuleError: The scheduler is unknown or does not take its parameters.
        """
        if self.scheduler is None:
            return None
        factory, options = self._scheduler_call(steps)
        try:
            return factory(optimizer, **options)
        except (TypeError, ValueError) as error:
            raise self._wrong_scheduler(factory, error) from error

    def check_scheduler(self) -> None:
        """Refuses a scheduler that is unknown or does not take its parameters, without building it.

        Raises:
            ModuleError: As `build_scheduler`, for all that the signature shows.
        """
        if self.scheduler is None:
            return
        factory, options = self._scheduler_call(1)
        try:
            inspect.signature(factory).bind(None, **options)
        except TypeError as error:
            raise self._wrong_scheduler(factory, error) from error

    def _scheduler_call(self, steps: int) -> tuple[Any, dict[str, Any]]:
        """Returns the scheduler's factory and its options."""
        found = _lookup(self.scheduler, lr_scheduler, lr_scheduler.LRScheduler, "scheduler")
        options = dict(self.scheduler_params)
        for name in ("T_max", "total_steps"):
            if name in _parameters(found) and name not in options:
                options[name] = steps
        return found, options

    def _wrong_scheduler(self, factory: Any, error: Exception) -> ModuleError:
        return ModuleError(
            f"scheduler {_name(factory)} cannot be built: {error}",
            hint=f"its parameters are {_signature(factory)}",
            param="schedulerParams",
        )

    def optimizer_call(self, module: nn.Module) -> tuple[Any, list[Any], dict[str, Any]]:
        """Returns the optimizer's factory, the trainable parameters or groups of them, and its options.

        Raises:
            ModuleError: The optimizer is unknown.
            ConfigError: The module has no parameters for a group.
        """
        factory = _lookup(self.optimizer, torch.optim, torch.optim.Optimizer, "optimizer")
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {"lr": self.learning_rate, **self.optimizer_params}
        chosen = {"fused", "foreach", "differentiable"} & options.keys()
        dense = all(p.is_floating_point() for p in parameters) and not any(
            makes_sparse_gradients(part) for part in module.modules()
        )
        # Of the fused kernels, these two take parameters that are divided among ranks.
        whole = not any(hasattr(p, "to_local") for p in parameters) or factory in (torch.optim.Adam, torch.optim.AdamW)
        if "fused" in _parameters(factory) and dense and whole and not chosen:
            options["fused"] = True
        return factory, group(module, self.parameter_groups) if self.parameter_groups else parameters, options


class Loss:
    """One loss per row, whatever the user's loss returns."""

    def __init__(self, loss: str | Callable[..., torch.Tensor] | None, params: Mapping[str, Any]) -> None:
        """Resolves a name, class or callable; classes with a `reduction` are made with "none".

        Raises:
            ModuleError: The loss is unknown or does not take its parameters.
        """
        self.name = loss if isinstance(loss, str) else _name(loss)
        found = _lookup(loss, nn, nn.Module, "loss", suffix="Loss")
        reducing = "reduction" in _parameters(found)
        if isinstance(found, type):
            options = dict(params)
            self._refuse_weight(found, options.get("weight"))
            if reducing:
                self._refuse_sum(options.get("reduction", "mean"))
                options["reduction"] = "none"
            try:
                found = found(**options)
            except TypeError as error:
                raise ModuleError(
                    f"loss {self.name} cannot be built: {error}",
                    hint=f"its parameters are {_signature(found)}",
                    param="lossParams",
                ) from error
        elif params:
            raise ModuleError("lossParams are given, but loss is not a class", param="lossParams")
        elif isinstance(found, nn.Module):
            self._refuse_weight(type(found), getattr(found, "weight", None))
            found = copy.copy(found)
            if hasattr(found, "reduction"):
                self._refuse_sum(str(found.reduction))
                vars(found)["reduction"] = "none"
        elif reducing:  # the functions of torch.nn.functional
            found = functools.partial(found, reduction="none")
        self._function: Callable[..., torch.Tensor] = found

    def _refuse_sum(self, reduction: str) -> None:
        if reduction == "sum":
            raise ModuleError(
                f"loss {self.name} with reduction 'sum' would make the step depend on the batch size",
                hint="leave 'reduction' out: the gradient is that of the mean",
                param="loss",
            )

    def _refuse_weight(self, kind: type, weight: Any) -> None:
        # torch divides by the sum of the classes' weights, which is not known in one rank.
        if weight is not None and issubclass(kind, nn.CrossEntropyLoss | nn.NLLLoss):
            raise ModuleError(
                f"loss {self.name} has a weight for each class, by which the mean over a batch would not be divided",
                hint="give the weights as classWeights",
                param="lossParams",
            )

    def to(self, device: str) -> Loss:
        """Moves the loss's own tensors, if it has any, to the device."""
        if isinstance(self._function, nn.Module):
            self._function.to(device)
        return self

    def __call__(self, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the weighted sum of the rows' losses, a scalar tensor.

        Args:
            output: What the module returned.
            label: The labels, shape `(rows, ...)`.
            weight: float32 weights of shape `(rows,)`, or `None` for ones.

        Raises:
            ModuleError: The loss returned neither a scalar nor a value per row, or a scalar where
                rows have weights.
        """
        losses = self.per_row(output, label)
        return weigh(losses, _rows(output), weight, what=f"loss {self.name}", param="loss")

    def per_row(self, output: Any, label: torch.Tensor | None) -> torch.Tensor:
        """Returns what the user's loss returns: shape `(rows, ...)`, or a scalar mean."""
        return self._function(output) if label is None else self._function(output, label)


def _rows(output: Any) -> int:
    """Number of rows of an output: of the tensor, or of the first one in a tuple or mapping."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return len(output)


def makes_sparse_gradients(part: nn.Module) -> bool:
    """Whether a part of a module, not one within it, is trained with sparse gradients, as torch's embeddings may be."""
    return getattr(part, "sparse", None) is True and any(p.requires_grad for p in part.parameters(recurse=False))


def _lookup(value: Any, namespace: Any, base: type, what: str, *, suffix: str = "") -> Any:
    """Resolves the name of a class in a torch namespace, an import path, or passes a callable on."""
    if not isinstance(value, str):
        if callable(value):
            return value
        raise ModuleError(f"{what} must be a name or a callable, got {value!r}", param=what)
    if ":" in value:
        return load_object(value)
    names = {
        name
        for name, found in vars(namespace).items()
        if isinstance(found, type) and issubclass(found, base) and found is not base and name.endswith(suffix)
    }
    if value not in names:
        raise ModuleError(f"{what} {value!r} is unknown", hint=nearest(value, names), param=what)
    return getattr(namespace, value)


def _refusal(factory: Any, options: Mapping[str, Any]) -> str:
    """Returns why one of torch's optimizers does not take its options, empty where it does."""
    try:
        factory([], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return "" if "empty parameter list" in str(error) else str(error)
    return ""


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _signature(factory: Any) -> str:
    try:
        return str(inspect.signature(factory))
    except (TypeError, ValueError):
        return "unknown"
