"""Checks of the Params, before any other step of a fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from pyspark.ml.param import Params
from pyspark.ml.param.shared import HasThresholds
from pyspark.sql import DataFrame
from torch import nn

from sparktorch.base.config import TrainConfig, above, at_least, one_of, rows_or_auto
from sparktorch.base.devices import is_kind
from sparktorch.base.imports import load_object
from sparktorch.errors import ColumnError, ConfigError, nearest
from sparktorch.ml.fit.inputs import check_ships
from sparktorch.ml.fit.lightning import brings_its_training, check_lightning
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams, ModelParams
from sparktorch.spark.column_names import ColumnNames
from sparktorch.train.callbacks import check_callback
from sparktorch.train.huggingface.models import MODEL_LOSS, has_own_loss
from sparktorch.train.metrics import has_metric
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import resumable, strategy_for, strategy_type

__all__ = [
    *("check_best_metric", "check_job", "check_model_folder", "check_new_columns", "check_outputs"),
    *("check_param_names", "check_params", "check_restarts", "check_scoring", "check_thresholds"),
]

_OUTPUTS = ("rawPredictionCol", "probabilityCol", "predictionCol")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def check_params(estimator: EstimatorParams, p: Values) -> None:
    """Checks the Params of an estimator, one by one and in combination.

    Raises:
        ConfigError: A Param is missing or out of range, or two Params exclude each other.
    """
    own = brings_its_training(p["module"])
    for name in ("module", "loss"):
        brings_loss = p["trainingStep"] or own or has_own_loss(p["module"])
        if p[name] is None and not (name == "loss" and brings_loss):
            raise ConfigError(f"{name} is not set", hint=f"pass {name}=... to the constructor", param=name)
    if own:
        check_lightning(estimator, p)
    above("learningRate", p["learningRate"], 0)
    one_of("dryRun", p["dryRun"], ("driver", "worker"))
    check_job(estimator, p)
    check_scoring(estimator)
    _check_loss(estimator, p)
    _check_schedule(p)
    _check_validation(p)
    _check_callbacks(p["callbacks"])
    if "lr" in p["optimizerParams"]:
        raise ConfigError("optimizerParams holds 'lr'", hint="set learningRate", param="optimizerParams")


def check_job(params: Any, p: Values) -> None:
    """Checks the Params of a job: workers, timeouts, batches and storage.

    Raises:
        ConfigError: A Param is out of range, or two Params exclude each other.
    """
    at_least("numWorkers", p["numWorkers"], 1)
    at_least("maxRestarts", p["maxRestarts"], 0)
    above("startTimeout", p["startTimeout"], 0)
    above("stallTimeout", p["stallTimeout"], 0)
    above("driverTimeout", p["driverTimeout"], 0)
    one_of("logLevel", p["logLevel"], _LOG_LEVELS)
    one_of("rendezvous", p["rendezvous"], ("auto", "driver", "rank0"))
    one_of("preflight", p["preflight"], ("basic", "full"))
    _check_device(p["device"])
    _check_sizes(p)
    _check_storage(params, p)


def check_scoring(instance: EstimatorParams | ModelParams) -> None:
    """Checks the Params of scoring.

    Raises:
        ConfigError: One of them is out of range.
    """
    rows_or_auto("predictBatchSize", instance.getPredictBatchSize())
    _check_device(instance.getDevice())
    one_of("handleInvalid", instance.getHandleInvalid(), ("error", "keep", "skip"))
    one_of("predictPrecision", instance.getPredictPrecision(), ("fp32", "bf16", "fp16"))
    if isinstance(instance, HasThresholds) and instance.isDefined(instance.thresholds):
        thresholds = instance.getThresholds()
        if not all(threshold >= 0 for threshold in thresholds) or thresholds.count(0) > 1:
            raise ConfigError(
                f"thresholds are {thresholds}",
                hint="each must be > 0, but for one at most, which may be 0",
                param="thresholds",
            )


def check_thresholds(instance: Params, classes: int | None) -> None:
    """Checks that `thresholds`, if set, has one value per class.

    Raises:
        ConfigError: It has more or fewer.
    """
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

    Args:
        estimator: Its Params become the model's.
        dataset: The rows to train on.
        outputs: Number of tensors that the module returns.

    Raises:
        ColumnError, ConfigError: As from `check_outputs`.
    """
    several = estimator.hasParam("outputCols") and (estimator.isDefined("outputCols") or outputs > 1)
    names = [estimator.getOrDefault(name) for name in _OUTPUTS if estimator.hasParam(name)]
    if several:  # where they have no names yet, the model asks for them
        names = estimator.getOrDefault("outputCols") if estimator.isDefined("outputCols") else []
    check_outputs(ColumnNames.of(dataset), [name for name in names if name])


def check_outputs(columns: ColumnNames, names: Sequence[str]) -> None:
    """Checks the names of a model's output columns.

    Args:
        columns: The columns of the DataFrame.
        names: The names.

    Raises:
        ColumnError: The DataFrame has such a column.
        ConfigError: Two are the same name to Spark.
    """
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
    """Refuses names that are not Params of the instance.

    Raises:
        ConfigError: A name is unknown; the hint suggests the nearest Param.
    """
    valid = [param.name for param in instance.params]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{type(instance).__name__} has no Param {name!r}", hint=nearest(name, valid), param=name)


def check_restarts(p: Values, config: TrainConfig) -> None:
    """Checks that the strategy supports the checkpoints and restarts that the Params ask for.

    Raises:
        ConfigError: The strategy cannot resume from a checkpoint, or with fewer workers; or `minWorkers` is invalid.
    """
    if p["checkpointDir"] is not None and not strategy_type(config.strategy).resumable:
        raise ConfigError(
            f"checkpointDir is set, and strategy {p['strategy']!r} has state in its workers that no checkpoint holds",
            hint=f"use {resumable()}, or leave checkpointDir out",
            param="checkpointDir",
        )
    if p["minWorkers"] is None:
        return
    at_least("minWorkers", p["minWorkers"], 1)
    if p["minWorkers"] > p["numWorkers"]:
        raise ConfigError(
            f"minWorkers is {p['minWorkers']}, more than numWorkers, {p['numWorkers']}", param="minWorkers"
        )
    if not p["maxRestarts"]:
        raise ConfigError(
            "minWorkers says what a restart may go on with, and maxRestarts is 0",
            hint="set maxRestarts",
            param="minWorkers",
        )
    if not strategy_type(config.strategy).resumable:
        raise ConfigError(
            f"minWorkers is set, and under strategy {p['strategy']!r} another number of workers trains something else",
            hint=f"use {resumable()}, or leave minWorkers out",
            param="minWorkers",
        )


def check_model_folder(p: Values, recipe: Recipe) -> None:
    """Checks that workers can divide the model among them and write it into a folder.

    Raises:
        ConfigError: The module is one that the driver holds already, or brings its own steps, or `modelDir` cannot be a
            folder of all hosts.
    """
    if not os.path.isabs(p["modelDir"]):
        raise ConfigError(
            f"modelDir {p['modelDir']!r} is a URL or a relative path, and the files of a model are mapped into memory",
            hint="name a folder, from '/' on, on a file system that is mounted on all hosts",
            param="modelDir",
        )
    wanted = PurePath(p["modelDir"])
    file = next(filter(os.path.isfile, (wanted, *wanted.parents)), None)
    if file is not None:
        raise ConfigError(
            f"modelDir {p['modelDir']!r} cannot be a folder: {str(file)!r} is a file",
            hint="name another folder, on a file system that is mounted under the same path on all hosts",
            param="modelDir",
        )
    if recipe.steps_itself:
        raise ConfigError(
            "modelDir is set, and module is a LightningModule, whose steps may take parameters apart",
            hint="pass its network as module, with a loss, or leave modelDir out",
            param="module",
        )
    if isinstance(recipe.module, nn.Module):
        raise ConfigError(
            "modelDir is set, and module is an instance, which this process holds already",
            hint="pass a class or function that makes the module, and its arguments as moduleParams",
            param="module",
        )


def _check_device(device: str) -> None:
    if device not in ("auto", "cpu") and not is_kind(device):
        raise ConfigError(
            f"device {device!r} is unknown",
            hint="it is 'auto', 'cpu', or an accelerator's type without a number: 'cuda' (of NVIDIA's and AMD's GPUs), "
            "'xpu' (of Intel's); which one a worker gets is for Spark to say",
            param="device",
        )


def _check_loss(estimator: EstimatorParams, p: Values) -> None:
    if p["trainingStep"] is not None and (estimator.isSet("loss") or p["lossParams"]):
        raise ConfigError(
            "trainingStep computes the loss, and loss or lossParams are set",
            hint="set one of them",
            param="trainingStep",
        )


def _check_schedule(p: Values) -> None:
    scheduler = p["scheduler"]
    if scheduler is None and p["schedulerParams"]:
        raise ConfigError("schedulerParams are given, but no scheduler", param="schedulerParams")
    if isinstance(scheduler, str) and ":" in scheduler:
        scheduler = load_object(scheduler)
    if getattr(scheduler, "__name__", scheduler) != "ReduceLROnPlateau":
        return
    if p["schedulerInterval"] == "step":
        raise ConfigError(
            "ReduceLROnPlateau looks at the loss of an epoch, and schedulerInterval is 'step'",
            hint="set schedulerInterval='epoch'",
            param="schedulerInterval",
        )
    if p["validationIndicatorCol"] is None and not _makes_validation(p):
        raise ConfigError(
            "ReduceLROnPlateau looks at the loss of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param="scheduler",
        )


def _check_sizes(p: Values) -> None:
    rows, workers, parts = p["batchSize"], p["numWorkers"], p["accumulationSteps"] or 1
    if strategy_type(p["strategy"]).own_batches:  # each worker has batches of its own
        workers = 1
    if 0 < rows < workers:
        raise ConfigError(
            f"batchSize is {rows}, to be shared by {workers} workers",
            hint="set it to numWorkers at least: it counts the rows of all workers together",
            param="batchSize",
        )
    if parts > 1 and parts * workers > rows:
        raise ConfigError(
            f"accumulationSteps is {parts}, and each of {workers} workers has {rows / workers:.3g} rows of a batch",
            hint="set it to batchSize / numWorkers at most",
            param="accumulationSteps",
        )


def _check_storage(params: Any, p: Values) -> None:
    one_of("split", p["split"], ("key", "keep"))
    if p["split"] == "keep" and _makes_validation(p):
        raise ConfigError(
            "strategyParams.folds gives every worker all the rows, and split is 'keep'",
            hint="leave one of them out",
            param="split",
        )
    if p["split"] == "keep" and p["minWorkers"] is not None:
        raise ConfigError(
            "minWorkers lets a restart go on with fewer workers, and split='keep' makes one of each partition",
            hint="leave one of them out",
            param="split",
        )
    if p["storage"] == "memory" and params.isSet("memoryBudget"):
        raise ConfigError(
            "memoryBudget is set, and storage is 'memory', which takes what the rows need",
            hint="set storage='auto' or 'disk'",
            param="memoryBudget",
        )


def _check_validation(p: Values) -> None:
    folds = _makes_validation(p)
    if folds and p["validationIndicatorCol"] is not None:
        raise ConfigError(
            "strategyParams.folds makes the validation rows, and validationIndicatorCol names some",
            hint="leave one of them out",
            param="validationIndicatorCol",
        )
    validated = p["validationIndicatorCol"] is not None or folds
    early = "earlyStoppingMetric" if p["earlyStoppingPatience"] is None else "earlyStoppingPatience"
    if not validated and (p["earlyStoppingPatience"] is not None or p["earlyStoppingMetric"] != "val_loss"):
        raise ConfigError(
            f"{early} looks at a metric of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param=early,
        )
    if p["metrics"] and not validated:
        raise ConfigError(
            "metrics are those of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param="metrics",
        )


def check_best_metric(config: TrainConfig, recipe: Recipe) -> None:
    """Checks that validations will have the metric of early stopping, as far as that is known before one.

    Raises:
        ConfigError: They will not.
    """
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


def _check_callbacks(callbacks: list[Any]) -> None:
    for callback in callbacks:
        check_callback(callback)
        hint = "it holds something that stays in this process (a lock, a file, a session): make that in on_fit_start"
        check_ships(callback, type(callback).__qualname__, param="callbacks", hint=hint)


def _makes_validation(p: Values) -> bool:
    """Whether the strategy chooses the validation rows."""
    strategy, options = strategy_for(p["strategy"], p["strategyParams"])
    return strategy.makes_validation(options)
