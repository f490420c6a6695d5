"""The recipe of a LightningModule: optimizer, schedule, steps and hooks come from the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sparktorch.adapters.lightning.optimizers import Configured
from sparktorch.adapters.lightning.recognise import check_class, check_instance, overrides, without_trainer
from sparktorch.adapters.lightning.state import TrainerView
from sparktorch.adapters.lightning.training import LightningTraining, training_of
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import ModuleError, refusing
from sparktorch.train.recipe.metrics import has_metric
from sparktorch.train.recipe.recipe import Recipe, called, recipe_of

__all__ = ["LightningRecipe"]


@dataclass(frozen=True, kw_only=True)
class LightningRecipe(Recipe):
    """What is trained, with a LightningModule; the fields of loss, optimizer and scheduler are not used.

    Attributes:
        epochs: Number of epochs.
        accumulation: Number of micro-batches in a step.
        validates: Whether there are validation rows.
        needs_metric: The metric that validations must log; `None` if any will do.
        stage: The argument of the module's `setup`.
    """

    epochs: int = 1
    accumulation: int = 1
    validates: bool = False
    needs_metric: str | None = None
    stage: str = "predict"

    def for_fit(self, config: TrainConfig, *, validated: bool) -> LightningRecipe:
        """Returns the recipe of a fit; refuses classes whose methods a fit would not call."""
        check_class(self.module, validated=validated)
        return replace(
            self,
            module=without_trainer(self.module),
            loss=None,
            epochs=config.epochs,
            accumulation=config.accumulation_steps,
            validates=validated,
            needs_metric=None if has_metric(config.best_metric, config.task, self.metrics) else config.needs_metric,
            stage="fit",
        )

    def _make_module(self, seed: int, build: Callable[[Callable[[], nn.Module]], nn.Module] = called) -> nn.Module:
        """Builds the module; calls `setup` and `configure_model`, which may make layers."""
        module: Any = super()._make_module(seed, build)
        check_instance(module)
        what = f"setup or configure_model of {type(module).__qualname__} failed"
        hint = "they are called before there is a self.trainer, in a process without data loaders"
        with torch.random.fork_rng(devices=()), refusing(what, hint, param="module"):
            torch.manual_seed(self.module_seed(seed))
            module.setup(self.stage)
            module.configure_model()
        return module  # type: ignore[no-any-return]

    @property
    def steps_itself(self) -> bool:
        """Whether the module brings its own training step: a LightningModule does."""
        return True

    def build_hooks(self, module: nn.Module, world: World, steps: int) -> LightningTraining:
        """Attaches the training to the module."""
        trainer = TrainerView(world, epochs=self.epochs, steps=steps, accumulation=self.accumulation)
        return LightningTraining(module, world, trainer, validates=self.validates, needs_metric=self.needs_metric)

    def build_optimizer(self, module: nn.Module, whole: nn.Module | None = None) -> torch.optim.Optimizer:
        """Returns the optimizer that the module builds."""
        return training_of(module).configured.optimizer

    def check_scored(self, module: nn.Module) -> None:
        """Checks that what `setup("fit")` makes is what `setup("predict")` makes."""
        if not overrides(module, "setup"):
            return
        states = module.state_dict(), replace(self, stage="predict")._make_module(0).state_dict()
        trained, scored = ({(name, tensor.shape) for name, tensor in state.items()} for state in states)
        if trained != scored:
            name, _ = min(trained ^ scored)
            what = f"setup('fit') and setup('predict') of {type(module).__qualname__} make another {name}"
            hint = "make weights and buffers in every stage, or in __init__: the fitted model is set up to predict"
            raise ModuleError(what, hint=hint, param="module")

    def check_optimizer(self, module: nn.Module) -> None:
        """Builds optimizer and schedulers."""
        where = f"configure_optimizers of {type(module).__qualname__}"
        with refusing(f"{where} failed", "on the driver, self.trainer tells of 100 steps in an epoch", param="module"):
            configured: Configured = training_of(module).configured
        trained = {parameter for group in configured.optimizer.param_groups for parameter in group["params"]}
        if not trained <= set(module.parameters()):
            raise ModuleError(f"{where} has parameters that are not the module's", param="module")

    def optimizer_call(
        self, module: nn.Module, whole: nn.Module | None = None
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Returns the class of the module's optimizer, its own groups, and its options."""
        built = self.build_optimizer(module)
        recipe = recipe_of(module, built)
        return type(built), built.param_groups, {"lr": recipe.learning_rate, **recipe.optimizer_params}
