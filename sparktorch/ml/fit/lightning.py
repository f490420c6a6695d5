"""A LightningModule as the Param `module`: it brings loss, optimizer and schedule, which other Params must not name."""

from __future__ import annotations

from typing import Any

from sparktorch.base.config import TrainConfig
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.train.lightning import LightningRecipe, check_class, is_lightning, without_trainer
from sparktorch.train.metrics import has_metric
from sparktorch.train.strategies.registry import strategy_for

__all__ = ["brings_its_training", "check_lightning", "lightning_recipe"]

_BROUGHT = {
    "loss": "training_step returns it",
    "lossParams": "training_step computes the loss",
    "trainingStep": "the module has its own training_step",
    "optimizer": "configure_optimizers returns it",
    "optimizerParams": "configure_optimizers returns the optimizer",
    "learningRate": "configure_optimizers sets it",
    "parameterGroups": "configure_optimizers makes the groups",
    "scheduler": "configure_optimizers returns it",
    "schedulerParams": "configure_optimizers returns the scheduler",
    "schedulerInterval": "it is the 'interval' that configure_optimizers returns",
    "warmupSteps": "return a scheduler with a warm-up, such as SequentialLR",
    "referenceBatchSize": "scale the learning rate in configure_optimizers",
}


def brings_its_training(module: Any) -> bool:
    """Returns whether the Param `module` is a LightningModule, or a model that was fitted with one."""
    return is_lightning(_source(module))


def _source(module: Any) -> Any:
    return getattr(getattr(module, "trained", None), "source", module)


def check_lightning(estimator: EstimatorParams, p: Values) -> None:
    """Checks a LightningModule, and that no Param names what it brings.

    Raises:
        ConfigError: A Param is set that contradicts it; names the Param.
        ModuleError: It has methods that a fit cannot honour, or lacks some; names the method.
    """
    source = _source(p["module"])
    for name, hint in _BROUGHT.items():
        if estimator.hasParam(name) and estimator.isSet(name):
            what = f"{name} is set, and the module is a LightningModule, which brings its own"
            raise ConfigError(what, hint=f"leave it out: {hint}", param=name)
    if p["microBatchSize"] == "auto":
        what = "microBatchSize is 'auto', which may repeat a step, and with it the hooks of a LightningModule"
        hint = "set microBatchSize to a number, or set accumulationSteps"
        raise ConfigError(what, hint=hint, param="microBatchSize")
    check_class(source, validated=_validates(p))


def _validates(p: Values) -> bool:
    """Whether there are validation rows, marked or chosen by the strategy."""
    strategy, options = strategy_for(p["strategy"], p["strategyParams"])
    return p["validationIndicatorCol"] is not None or strategy.makes_validation(options)


def lightning_recipe(p: Values, module: dict[str, Any], fields: dict[str, Any], config: TrainConfig) -> LightningRecipe:
    """Returns the recipe of a fit, of what the Param `module` and other Params give as fields of it."""
    return LightningRecipe(
        **{**module, "module": without_trainer(module["module"])},
        **fields,
        stage="fit",
        loss=None,
        epochs=p["epochs"],
        accumulation=p["accumulationSteps"],
        validates=_validates(p),
        needs_metric=None if has_metric(config.best_metric, config.task, p["metrics"]) else config.needs_metric,
    )
