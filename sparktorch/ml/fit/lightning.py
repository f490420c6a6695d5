"""A LightningModule as the Param `module`: it brings loss, optimizer and schedule, which other Params must not name."""

from __future__ import annotations

from typing import Any

from sparktorch.base.config import TrainConfig
from sparktorch.errors import Refusal, refuse
from sparktorch.ml.fit.values import Values
from sparktorch.train.lightning import LightningRecipe, check_class, without_trainer
from sparktorch.train.metrics import has_metric

__all__ = ["check_lightning", "lightning_recipe"]

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

_REFUSED = (
    *(
        Refusal(
            name,
            lambda p, name=name: p.is_set(name),  # type: ignore[misc]
            f"{name} is set, and the module is a LightningModule, which brings its own",
            f"leave it out: {why}",
        )
        for name, why in _BROUGHT.items()
    ),
    Refusal(
        "microBatchSize",
        lambda p: p["microBatchSize"] == "auto",
        "microBatchSize is 'auto', which may repeat a step, and with it the hooks of a LightningModule",
        "set microBatchSize to a number, or set accumulationSteps",
    ),
)


def check_lightning(p: Values) -> None:
    """Checks a LightningModule, and that no Param names what it brings.

    A `ConfigError` names a Param that contradicts it, a `ModuleError` a method that it lacks or that a fit cannot
    honour.
    """
    refuse(_REFUSED, p)
    check_class(p.source, validated=p.validated)


def lightning_recipe(p: Values, module: dict[str, Any], fields: dict[str, Any], config: TrainConfig) -> LightningRecipe:
    """Returns the recipe of a fit, of what the Param `module` and other Params give as fields of it."""
    return LightningRecipe(
        **{**module, "module": without_trainer(module["module"])},
        **fields,
        stage="fit",
        loss=None,
        epochs=p["epochs"],
        accumulation=p["accumulationSteps"],
        validates=p.validated,
        needs_metric=None if has_metric(config.best_metric, config.task, p["metrics"]) else config.needs_metric,
    )
