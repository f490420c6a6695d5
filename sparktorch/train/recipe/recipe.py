"""What to train: the factories of module, loss and optimizer, as a value that is sent to the ranks."""

from __future__ import annotations

import copy
import glob
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
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

# These options of optimizers follow from how parameters are divided.
KERNELS = ("foreach", "fused")

# A module with these attributes is a LightningModule.
_LONGEST_PARAMS = 500  # The edges of bins of a table would fill the screen.
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
        initial: Initial weights as safetensors bytes or in a folder; empty if the factory makes them.
        seed: The seed with which an earlier training of the initial weights has called the factory; `None` for the
            seed of this training.
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
        """Builds the module without values; its parts get them later.

        Saved values are those of `build_module`, and values that the parts draw are others.
        """
        built: list[Deferred] = []

        def build(make: Callable[[], nn.Module]) -> nn.Module:
            saved = self._saved_of if self.initial else None
            built.append(deferred(make, saved, seed=self.module_seed(seed)))
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
        """Copies the module if it is an instance; otherwise lets `build` call the factory."""
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
            except Exception:
                # The hint is written only now, because moduleParams may be large.
                params = shorten(str(dict(self.module_params)), _LONGEST_PARAMS, placeholder=" ...")
                hint = f"its parameters are {signature_of(factory)}; moduleParams are {params}"
                hint = unknown_parameter(factory, self.module_params) + hint
                if build is not called:
                    hint += "; with modelDir, only what is made by NumPy or device='cpu' has values there"
                with refusing(f"module {name_of(factory)} cannot be built", hint, code="ST-BUILD"):
                    raise
        what = ""
        hint = ""
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
        """Whether the module brings its own training step, as a LightningModule does."""
        return False

    def for_fit(self, config: TrainConfig, *, validated: bool) -> Recipe:
        """Returns the recipe for a fit, on the driver; `validated` says whether there are validation rows."""
        return self

    def build_hooks(self, module: nn.Module, world: World, steps: int) -> ModuleHooks:
        """Builds what the module brings to its training; `steps` is the number of steps in an epoch."""
        return ModuleHooks()

    def check_scored(self, module: nn.Module) -> None:
        """Checks, in the dry run, that the weights of the trained module fit the module that scores."""

    def module_seed(self, seed: int) -> int:
        """Returns the seed for the factory: `seed`, unless the initial weights were trained with another seed."""
        if lacks_base(self.packed):
            return seed_of(unpack_state(self.packed), seed)
        return seed if self.seed is None else self.seed

    @property
    def packed(self) -> bytes:
        """The initial weights as bytes; empty if there are none, or if they are in a folder."""
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

        It uses torch's fused kernel if the optimizer has one for the device of the parameters, the user has not chosen
        another kernel, no parameter is complex, and no gradient sparse. If `module` has only some of the parameters,
        `whole` is the module with all of them.
        """
        factory, parameters, options = self.optimizer_call(module, whole)
        with building("optimizer", factory):
            optimizer: torch.optim.Optimizer = factory(parameters, **options)
        return optimizer

    def check_optimizer(self, module: nn.Module) -> None:
        """Raises the errors of `build_optimizer`, and refuses an optimizer that computes the loss itself.

        It builds no optimizer if the optimizer is torch's, because the first one in a process imports `torch._dynamo`,
        which takes a second. torch's optimizers check their options before they refuse an empty list of parameters, so
        an empty list shows whether the options are right.
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
            else:  # An optimizer that is not torch's would silently keep unknown options of a group.
                reason = ", ".join(f"unknown option {name!r}" for name in options_of_group if name not in defaults)
            if reason:
                raise ConfigError(
                    f"parameterGroups[{number}] does not suit optimizer {name_of(factory)}: {reason}",
                    hint=f"its parameters are {signature_of(factory)}",
                    param="parameterGroups",
                )

    def try_sparse(self, module: nn.Module, *, clips: bool) -> None:
        """Takes a step in the dry run, if some of the gradients are sparse; it changes the parameters."""
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        sparse = [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]
        if not sparse:
            return
        what = f"the gradient of {sparse[0]!r} is sparse"
        dense = "make its table with sparse=False"
        if clips:
            raise ConfigError(f"{what}, and torch clips dense ones only", hint=dense, param="gradientClipNorm")
        optimizer = self.build_optimizer(module)
        explanation = f"{what}, and optimizer {type(optimizer).__name__} does not train the module"
        hint = f"'SGD' and 'Adagrad' take sparse and dense gradients, 'SparseAdam' sparse ones alone; or {dense}"
        with refusing(explanation, hint, param="optimizer"):
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
        """Returns the optimizer's factory, the trainable parameters, perhaps in groups, and the optimizer's options.

        Raises:
            ModuleError: The optimizer is unknown.
            ConfigError: A parameter group is invalid or without parameters.
        """
        factory = look_up(self.optimizer, "optimizer")
        parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        options = {"lr": self.learning_rate, **self.optimizer_params}
        has_chosen_kernel = bool({"fused", "foreach", "differentiable"} & options.keys())
        if not has_chosen_kernel and _can_be_fused(factory, module, parameters):
            options["fused"] = True
        if self.parameter_groups:
            parameters = group(module, self.parameter_groups, whole)
        return factory, parameters, options


def _can_be_fused(factory: Any, module: nn.Module, parameters: Sequence[torch.Tensor]) -> bool:
    """Returns whether an optimizer has a fused kernel for a module's trainable parameters and their gradients."""
    if not parameters:  # A rank may have none of the model's parameters.
        return False
    if not all(parameter.is_floating_point() for parameter in parameters):
        return False
    if any(makes_sparse_gradients(part) for part in module.modules()):
        return False
    # With momentum, which a scheduler may set, the kernel of SGD fails if a parameter gets its first gradient later.
    if factory is torch.optim.SGD:
        return False
    # Among the fused kernels, only those of Adam and AdamW take sharded parameters.
    is_sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
    if is_sharded and factory not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return all(has_fused_kernel(factory, device) for device in {parameter.device.type for parameter in parameters})


def recipe_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Recipe:
    """Returns a recipe with the class, options and parameter groups of an optimizer for a module's parameters.

    Call it before the first step, and before a strategy prepares the module, which may replace its parameters.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    _check_optimizer_of(optimizer, names)
    options = _constructor_options(type(optimizer), optimizer.defaults)
    groups = []
    for parameter_group in optimizer.param_groups:
        changed = {
            name: value for name, value in parameter_group.items() if name in options and value is not options[name]
        }
        patterns = [glob.escape(names[parameter]) for parameter in parameter_group["params"]]
        groups.append({"params": patterns, **changed, "lr": parameter_group["lr"]})
    rate = options.pop("lr")
    return Recipe(
        module=module, optimizer=type(optimizer), optimizer_params=options, learning_rate=rate, parameter_groups=groups
    )


def _check_optimizer_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Refuses an optimizer that does not suit a module, whose parameters have these names."""
    in_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    lacking = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in in_optimizer]
    what = ""
    hint = ""
    # Adagrad has a state before its first step, with the step 0.
    if any(state.get("step", 1) for state in optimizer.state.values()):
        what = "has taken steps already"
        hint = "wrap module and optimizer before the first step"
    elif in_optimizer - names.keys():
        what = "has parameters that are not the module's"
        hint = "build it from module.parameters(), of the module that is wrapped"
    elif lacking:
        what = f"lacks the trainable parameters {', '.join(lacking[:3])}"
        hint = "add them to it, or freeze them: parameter.requires_grad_(False)"
    elif "lr" not in optimizer.defaults:
        what = "has no learning rate 'lr'"
        hint = f"it has {signature_of(type(optimizer))}"
    if what:
        raise ModuleError(f"optimizer {name_of(type(optimizer))} {what}", hint=hint, code="ST-OPTIMIZER")


def _constructor_options(optimizer_class: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those defaults of an optimizer that its constructor takes; a base class may have added others."""
    parameters = inspect.signature(optimizer_class).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {}
    for name, value in defaults.items():
        is_unset_kernel = name in KERNELS and value is None
        if (takes_all or name in parameters) and not is_unset_kernel:
            options[name] = value
    return options


def makes_sparse_gradients(part: nn.Module) -> bool:
    """Returns whether a module's own parameters get sparse gradients, as those of torch's embeddings may."""
    return getattr(part, "sparse", None) is True and any(p.requires_grad for p in part.parameters(recurse=False))


def _refusal(factory: Any, options: Mapping[str, Any]) -> str:
    """Returns why one of torch's optimizers refuses its options; empty if it takes them."""
    try:
        factory([], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return "" if "empty parameter list" in str(error) else str(error)
    return ""
