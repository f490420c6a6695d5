"""Checks of the Params, before any other step of a fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.ml.param import Params
from pyspark.sql import DataFrame

from sparktorch.base.config import TrainConfig, above, at_least, one_of, rows_or_auto
from sparktorch.errors import ColumnError, ConfigError, nearest, refuse
from sparktorch.ml.fit.code_version import check_version
from sparktorch.ml.fit.inputs import check_ships
from sparktorch.ml.fit.refusals import COLUMNS, FIT, JOB, LIGHTNING, RESTARTS, SCORING
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.spark.column_names import ColumnNames
from sparktorch.train.callbacks import check_callback
from sparktorch.train.huggingface.models import MODEL_LOSS, has_own_loss
from sparktorch.train.lightning import check_class
from sparktorch.train.recipe.metrics import has_metric
from sparktorch.train.recipe.recipe import Recipe

__all__ = [
    *("check_best_metric", "check_job", "check_new_columns", "check_outputs", "check_param_names"),
    *("check_params", "check_restarts", "check_scoring", "check_thresholds"),
]

_OUTPUTS = ("rawPredictionCol", "probabilityCol", "predictionCol")
_VALID = {
    "logLevel": ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    "rendezvous": ("auto", "driver", "rank0"),
    "preflight": ("basic", "full"),
    "split": ("key", "keep"),
    "nullPolicy": ("error", "drop", "fill"),
}


def check_params(p: Values) -> None:
    """Checks the Params of an estimator, one by one and in combination."""
    brings_loss = p["trainingStep"] or p.brings_its_training or has_own_loss(p["module"])
    for name in ("module", "loss"):
        if p[name] is None and not (name == "loss" and brings_loss):
            raise ConfigError(f"{name} is not set", hint=f"pass {name}=... to the constructor", param=name)
    check_version(p.source)
    if p.brings_its_training:
        refuse(LIGHTNING, p)
        check_class(p.source, validated=p.validated)
    above("learningRate", p["learningRate"], 0)
    one_of("dryRun", p["dryRun"], ("driver", "worker"))
    check_job(p)
    check_scoring(p)
    refuse(FIT, p)
    for callback in p["callbacks"]:
        check_callback(callback)
        hint = "it holds something that stays in this process (a lock, a file, a session): make that in on_fit_start"
        check_ships(callback, type(callback).__qualname__, param="callbacks", hint=hint)


def check_job(p: Values) -> None:
    """Checks the Params of a job: columns, workers, timeouts, batches and storage."""
    at_least("numWorkers", p["numWorkers"], 1)
    at_least("maxRestarts", p["maxRestarts"], 0)
    for name in ("startTimeout", "stallTimeout", "driverTimeout"):
        above(name, p[name], 0)
    for name, valid in _VALID.items():
        one_of(name, p[name], valid)
    refuse(JOB, p)
    refuse(COLUMNS, p)


def check_scoring(p: Values) -> None:
    """Checks the Params of scoring."""
    rows_or_auto("predictBatchSize", p["predictBatchSize"])
    one_of("handleInvalid", p["handleInvalid"], ("error", "keep", "skip"))
    one_of("predictPrecision", p["predictPrecision"], ("fp32", "bf16", "fp16"))
    refuse(SCORING, p)
    refuse(COLUMNS, p)


def check_thresholds(instance: Params, classes: int | None) -> None:
    """Checks that `thresholds`, if set, has one value per class."""
    if classes is None or not instance.hasParam("thresholds") or not instance.isDefined("thresholds"):
        return
    thresholds = instance.getOrDefault("thresholds")
    if len(thresholds) != classes:
        raise ConfigError(
            f"thresholds has {len(thresholds)} values, and the model {classes} classes",
            hint="give one for each class",
            param="thresholds",
        )


def check_new_columns(estimator: EstimatorParams, dataset: DataFrame, outputs: int) -> None:
    """Checks that the model will add columns that the DataFrame of the fit has not, each under a name of its own.

    `outputs` is the number of tensors that the module returns.
    """
    several = estimator.hasParam("outputCols") and (estimator.isDefined("outputCols") or outputs > 1)
    names = [estimator.getOrDefault(name) for name in _OUTPUTS if estimator.hasParam(name)]
    if several:  # where they have no names yet, the model asks for them
        names = estimator.getOrDefault("outputCols") if estimator.isDefined("outputCols") else []
    check_outputs(ColumnNames.of(dataset), [name for name in names if name])


def check_outputs(columns: ColumnNames, names: Sequence[str]) -> None:
    """Refuses output columns that the DataFrame has, and two that have the same name to Spark."""
    taken = [name for name in names if columns.called(name)]
    if taken:
        raise ColumnError(
            f"the DataFrame already has a column {taken[0]!r}",
            hint="drop it, or name the model's output columns otherwise",
            column=taken[0],
        )
    own = "give each a name of its own, or leave one out with ''"
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two output columns are called {twice[0]!r}", hint=own)
    if alike := columns.alike(names):
        raise ConfigError(
            f"two output columns are called {alike[0]!r} and {alike[1]!r}, which to Spark is one name", hint=own
        )


def check_param_names(instance: Params, names: Iterable[str]) -> None:
    """Refuses names that are not Params of the instance; the hint suggests the nearest Param."""
    valid = [param.name for param in instance.params]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{type(instance).__name__} has no Param {name!r}", hint=nearest(name, valid), param=name)


def check_restarts(p: Values) -> None:
    """Checks that the strategy supports the checkpoints and restarts that the Params ask for."""
    if p["minWorkers"] is not None:
        at_least("minWorkers", p["minWorkers"], 1)
    refuse(RESTARTS, p)


def check_best_metric(config: TrainConfig, recipe: Recipe) -> None:
    """Checks that validations will have the metric of early stopping, as far as that is known before one."""
    name = config.needs_metric
    if name in (None, "val_loss") or has_metric(name, config.task, recipe.metrics) or recipe.steps_itself:
        return
    if recipe.training_step in (None, MODEL_LOSS) or not name.startswith("val_"):
        known = ["val_loss", *(["val_accuracy"] if config.task == "classification" else [])]
        raise ConfigError(
            f"earlyStoppingMetric is {name!r}, which no validation of this fit has",
            hint=nearest(name, [*known, *(f"val_{metric}" for metric in recipe.metrics)]),
            param="earlyStoppingMetric",
        )
