"""What to train: the factories of module, loss and optimizer, as a value that is sent to the ranks."""

from __future__ import annotations

import copy
import glob
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparktorch.base.config import TrainConfig
from sparktorch.base.deferred import Deferred, PartialWeights, deferred
from sparktorch.base.imports import SHIPPING_HINT, load_object
from sparktorch.base.state_dict import unpack_state
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.base.world import World
from sparktorch.errors import ConfigError, ModuleError, refusing
from sparktorch.train.recipe.frozen_base import lacks_base, load_weights, seed_of
from sparktorch.train.recipe.lookup import (
    building,
    has_fused_kernel,
    look_up,
    name_of,
    parameters_of,
    signature_of,
    unknown_parameter,
)
from sparktorch.train.recipe.loss import Loss, TrainingStep
from sparktorch.train.recipe.module_hooks import ModuleHooks
from sparktorch.train.recipe.parameter_groups import freeze, group

__all__ = ["KERNELS", "ModuleSource", "Recipe", "called", "recipe_of"]

KERNELS = ("foreach", "fused")  # These options of optimizers follow from how parameters are divided.

_STEPS_ITSELF = ("training_step", "configure_optimizers", "automatic_optimization")


def called(make: Callable[[], nn.Module]) -> nn.Module:
    """Calls a factory."""
    return make()


ModuleSource = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Factories for what is trained, with their parameters.

    Attributes:
        module: An `nn.Module` class or factory, its import path `"pkg.mod:Net"`, or an instance.
        module_params: Keyword arguments of the factory.
        initial: Initial weights as safetensors bytes or in a folder; empty for those that the factory makes.
        seed: The seed for the factory that an earlier training of the initial weights had; `None` for the training's.
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
            metrics, or its import path; used instead of `loss`. Or a `TrainingStep`.
        parameter_groups: Options of the optimizer for parameters whose names match the patterns
            under "params". A parameter belongs to the first group that matches its name.
        freeze: Name patterns of parameters that are not trained; `"!pattern"` unfreezes parameters.
        metrics: Additional validation metrics by name: names of classes in torchmetrics, factories or instances.
        callbacks: Callbacks to call during training.
    """

    module: ModuleSource
    module_params: Mapping[str, Any] = field(default_factory=dict)
    initial: bytes | WeightsFolder = b""
    seed: int | None = None
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
        """Builds the module; the same seed gives the same initial weights in every process."""
        if isinstance(self.initial, WeightsFolder):
            built = self.build_deferred(seed)
            built.materialise(built.module)
            return built.module
        module = self._make_module(seed)
        if self.initial:
            load_weights(module, unpack_state(self.initial))
        freeze(module, self.freeze)
        return module

    def build_deferred(self, seed: int) -> Deferred:
        """Builds the module without values, whose parts get others than by `build_module`, but for saved ones."""
        built: list[Deferred] = []

        def build(make: Callable[[], nn.Module]) -> nn.Module:
            built.append(deferred(make, self._saved_of if self.initial else None, seed=self.module_seed(seed)))
            return built[0].module

        module = self._make_module(seed, build)
        if self.initial and not isinstance(built[0].saved, PartialWeights):
            built[0].check_saved()
        freeze(module, self.freeze)
        return built[0]

    def _saved_of(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        """Returns the initial weights under the names of a module."""
        return unpack_state(self.initial) if isinstance(self.initial, bytes) else self.initial

    def _arguments(self, factory: Any) -> Mapping[str, Any]:
        """Returns the keyword arguments with which the factory is called."""
        return self.module_params

    def _make_module(self, seed: int, build: Callable[[Callable[[], nn.Module]], nn.Module] = called) -> nn.Module:
        """Makes the module, and lets `build` call the factory, if it is made by one."""
        if isinstance(self.module, nn.Module):
            if self.module_params:
                raise ModuleError("moduleParams are given, but module is an instance", hint="pass the class instead")
            with refusing("the module instance cannot be copied", SHIPPING_HINT, param="module"):
                return copy.deepcopy(self.module)
        factory = load_object(self.module) if isinstance(self.module, str) else self.module

        def make() -> nn.Module:
            module: nn.Module = factory(**self._arguments(factory))
            return module

        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.module_seed(seed))
            try:
                module = build(make)
            except Exception:  # The moduleParams, which may be large, are written only here.
                hint = f"its parameters are {signature_of(factory)}; moduleParams are {dict(self.module_params)}"
                hint = unknown_parameter(factory, self.module_params) + hint
                if build is not called:
                    hint += "; with modelDir, only what is made by NumPy or device='cpu' has values there"
                with refusing(f"module {name_of(factory)} cannot be built", hint, code="ST-BUILD"):
                    raise
        what = hint = ""
        if not isinstance(module, nn.Module):
            what = f"{type(module).__name__}, not an nn.Module"
            hint = "pass an nn.Module class, a function that returns one, or an instance"
        elif not self.steps_itself and all(hasattr(module, name) for name in _STEPS_ITSELF):
            what = "a LightningModule, whose steps a fit would not call"
            hint = "pass its class, and its arguments as moduleParams; or an instance"
        if what:
            raise ModuleError(f"module {name_of(factory)} returned {what}", hint=hint, param="module", code="ST-BUILD")
        return module

    @property
    def steps_itself(self) -> bool:
        """Whether the module brings its own training step."""
        return False

    def for_fit(self, config: TrainConfig, *, validated: bool) -> Recipe:
        """Returns the recipe of a fit, in the driver; `validated` says whether there are validation rows."""
        return self

    def build_hooks(self, module: nn.Module, world: World, steps: int) -> ModuleHooks:
        """Builds what the module brings to its training; `steps` is the number of steps in an epoch."""
        return ModuleHooks()

    def check_scored(self, module: nn.Module) -> None:
        """Checks, in the dry run, that trained weights fit the module that scores."""

    def module_seed(self, seed: int) -> int:
        """Returns the seed for the factory: the given one, or that which the initial weights were trained with."""
        if lacks_base(self.packed):
            return seed_of(unpack_state(self.packed), seed)
        return seed if self.seed is None else self.seed

    @property
    def packed(self) -> bytes:
        """The initial weights, empty if they are in a folder."""
        return self.initial if isinstance(self.initial, bytes) else b""

    def build_loss(self) -> Loss:
        """Builds the loss."""
        return Loss(self.loss, self.loss_params)

    def build_training_step(self) -> TrainingStep | None:
        """Builds the training step; returns `None` if the recipe has a loss instead."""
        step: Any = load_object(self.training_step) if isinstance(self.training_step, str) else self.training_step
        if step is None:
            return None
        return step if isinstance(step, TrainingStep) else TrainingStep(step)

    def build_optimizer(self, module: nn.Module, whole: nn.Module | None = None) -> torch.optim.Optimizer:
        """Builds the optimizer over the module's trainable parameters.

        It uses torch's fused kernel if the optimizer has one for the parameters' device, the user has not chosen
        another, and the parameters and gradients permit it: no complex parameters, no sparse gradients. `whole` has all
        parameters, if `module` has some of them only.
        """
        factory, parameters, options = self.optimizer_call(module, whole)
        with building("optimizer", factory):
            optimizer: torch.optim.Optimizer = factory(parameters, **options)
        return optimizer

    def check_optimizer(self, module: nn.Module) -> None:
        """Raises the errors of `build_optimizer`, mostly without building an optimizer.

        The first optimizer of a process imports `torch._dynamo`, which takes a second. torch's own
        optimizers check their options before they refuse an empty list of parameters. Refuses one that
        computes the loss itself.
        """
        factory, _, options = self.optimizer_call(module)
        if isinstance(factory, type) and issubclass(factory, torch.optim.LBFGS):
            raise ConfigError(
                f"optimizer {name_of(factory)} computes the loss several times in a step",
                hint="choose another one, or write a loop of your own, see sparktorch.run",
                param="optimizer",
                code="ST-OPTIMIZER",
            )
        defaults: Mapping[str, Any] | None = None
        if not getattr(factory, "__module__", "").startswith("torch.optim."):
            defaults = self.build_optimizer(module).defaults
        elif _refusal(factory, options):
            self.build_optimizer(module)  # It raises with the reason.
        for number, options_of in enumerate(self.parameter_groups):
            options_of_group = {name: value for name, value in options_of.items() if name != "params"}
            if defaults is None:
                reason = _refusal(factory, {**options, **options_of_group})
            else:  # An optimizer silently keeps unknown options of a group.
                reason = ", ".join(f"unknown option {name!r}" for name in options_of_group if name not in defaults)
            if reason:
                raise ConfigError(
                    f"parameterGroups[{number}] does not suit optimizer {name_of(factory)}: {reason}",
                    hint=f"its parameters are {signature_of(factory)}",
                    param="parameterGroups",
                )

    def try_sparse(self, module: nn.Module, *, clips: bool) -> None:
        """Takes a step with gradients that are there, if some are sparse, in the dry run: parameters change."""
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        sparse = [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]
        if not sparse:
            return
        what, dense = f"the gradient of {sparse[0]!r} is sparse", "make its table with sparse=False"
        if clips:
            raise ConfigError(f"{what}, and torch clips dense ones only", hint=dense, param="gradientClipNorm")
        optimizer = self.build_optimizer(module)
        says = f"{what}, and optimizer {type(optimizer).__name__} does not train the module"
        hint = f"'SGD' and 'Adagrad' take sparse and dense gradients, 'SparseAdam' sparse ones alone; or {dense}"
        with refusing(says, hint, param="optimizer"):
            optimizer.step()

    def build_scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """Builds the scheduler, whose default `T_max` or `total_steps` is `steps`; `None` if the recipe has none."""
        if self.scheduler is None:
            return None
        factory, options = self.scheduler_call(steps)
        with building("scheduler", factory):
            return factory(optimizer, **options)

    def check_scheduler(self) -> None:
        """Checks the scheduler's name and parameters against its signature, without building it."""
        if self.scheduler is None:
            return
        factory, options = self.scheduler_call(1)
        with building("scheduler", factory):
            inspect.signature(factory).bind(None, **options)

    def scheduler_call(self, steps: int) -> tuple[Any, dict[str, Any]]:
        """Returns the scheduler's factory and its options."""
        scheduler = look_up(self.scheduler, "scheduler")
        options = dict(self.scheduler_params)
        for name in ("T_max", "total_steps"):
            if name in parameters_of(scheduler) and name not in options:
                options[name] = steps
        return scheduler, options

    def optimizer_call(
        self, module: nn.Module, whole: nn.Module | None = None
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Returns the optimizer's factory, the trainable parameters or groups of them, and its options.

        Raises:
            ModuleError: The optimizer is unknown.
            ConfigError: A parameter group is invalid or without parameters.
        """
        factory = look_up(self.optimizer, "optimizer")
        parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {"lr": self.learning_rate, **self.optimizer_params}
        chosen = {"fused", "foreach", "differentiable"} & options.keys()
        dense = all(p.is_floating_point() for p in parameters) and not any(
            makes_sparse_gradients(part) for part in module.modules()
        )
        # SGD's fails with momentum where a gradient comes in a later step; a scheduler may bring the momentum.
        dense = dense and factory is not torch.optim.SGD
        # Among the fused kernels, only those of Adam and AdamW take sharded parameters.
        fits = not any(hasattr(p, "to_local") for p in parameters) or factory in (torch.optim.Adam, torch.optim.AdamW)
        devices = {p.device.type for p in parameters}
        fits = fits and bool(devices)  # A rank may have no parameters.
        if dense and fits and not chosen and all(has_fused_kernel(factory, device) for device in devices):
            options["fused"] = True
        if self.parameter_groups:
            parameters = group(module, self.parameter_groups, whole)
        return factory, parameters, options


def recipe_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Recipe:
    """Returns a recipe with the class, options and parameter groups of an optimizer of a module's parameters.

    Call it before a strategy prepares the module, which may replace its parameters, and before the first step.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    in_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    lacking = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in in_optimizer]
    reasons = (
        (
            any(state.get("step", 1) for state in optimizer.state.values()),  # Adagrad's state begins with a step 0.
            "has taken steps already",
            "wrap module and optimizer before the first step",
        ),
        (
            in_optimizer - names.keys(),
            "has parameters that are not the module's",
            "build it from module.parameters(), of the module that is wrapped",
        ),
        (
            lacking,
            f"lacks the trainable parameters {', '.join(lacking[:3])}",
            "add them to it, or freeze them: parameter.requires_grad_(False)",
        ),
        ("lr" not in optimizer.defaults, "has no learning rate 'lr'", f"it has {signature_of(type(optimizer))}"),
    )
    for applies, what, hint in reasons:
        if applies:
            raise ModuleError(f"optimizer {name_of(type(optimizer))} {what}", hint=hint, code="ST-OPTIMIZER")
    options = _accepted(type(optimizer), optimizer.defaults)
    groups = [
        {
            "params": [glob.escape(names[parameter]) for parameter in group["params"]],
            **{name: value for name, value in group.items() if name in options and value is not options[name]},
            "lr": group["lr"],
        }
        for group in optimizer.param_groups
    ]
    rate = options.pop("lr")
    return Recipe(
        module=module, optimizer=type(optimizer), optimizer_params=options, learning_rate=rate, parameter_groups=groups
    )


def _accepted(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of an optimizer that its constructor takes; a base class may add some."""
    parameters = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {
        name: value
        for name, value in defaults.items()
        if (takes_all or name in parameters) and not (name in KERNELS and value is None)
    }


def makes_sparse_gradients(part: nn.Module) -> bool:
    """Returns whether a module itself, not a child, has sparse gradients, as torch's embeddings may have."""
    return getattr(part, "sparse", None) is True and any(p.requires_grad for p in part.parameters(recurse=False))


def _refusal(factory: Any, options: Mapping[str, Any]) -> str:
    """Returns why one of torch's optimizers refuses its options; empty if it takes them."""
    try:
        factory([], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return "" if "empty parameter list" in str(error) else str(error)
    return ""
