"""Translates the camelCase Params into configuration objects; nothing else does."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from sparktorch.base.config import CheckpointConfig, StorageConfig, Task, TrainConfig
from sparktorch.distributed.monitor import Timeouts
from sparktorch.errors import ConfigError, refuse
from sparktorch.ml.fit.checks import check_best_metric, check_job, check_params, check_restarts
from sparktorch.ml.fit.identity import described
from sparktorch.ml.fit.inputs import input_names, input_options, preprocess_of
from sparktorch.ml.fit.refusals import MODEL_FOLDER
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.declare import ParamSpec
from sparktorch.ml.params.mixins import EstimatorParams, RunParams
from sparktorch.ml.params.tables import CLASSIFIER, GENERIC, RUN
from sparktorch.model.export import Program
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.huggingface.folder import opened
from sparktorch.train.huggingface.models import MODEL_LOSS
from sparktorch.train.lightning import LightningRecipe, without_trainer
from sparktorch.train.recipe.lookup import name_of
from sparktorch.train.recipe.metrics import has_metric
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_loop, check_strategy, check_workers

__all__ = ["JobRequest", "Request", "config_of", "translate", "translate_run"]

_EVERY = {spec.name: spec for spec in (*GENERIC, *CLASSIFIER)}
_SHUFFLE_BLOCK = 32  # for storage on disk


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """What the job of a fit, or of `run`, is to be like.

    Attributes:
        split: "key" to split rows by key, "keep" to keep the partitions.
        checkpoint: Where and how often to save the training state; `None` for no checkpoints.
        max_restarts: The most restarts after a lost rank.
        min_workers: The fewest ranks for a restart; `None` for all.
        columns: Column names by role, the arguments of `spark.frame.prepare`.
    """

    config: TrainConfig
    launch: Launch
    split: str
    storage: StorageConfig
    checkpoint: CheckpointConfig | None
    max_restarts: int
    min_workers: int | None
    columns: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request(JobRequest):
    """The configuration of a fit; the dry run happens on the "driver" or in a "worker"."""

    recipe: Recipe
    dry_run: str


def translate(estimator: EstimatorParams, task: Task) -> Request:
    """Checks the Params and translates them."""
    estimator = estimator.completed()  # type: ignore[attr-defined]  # what all estimators have
    p = Values(estimator)
    check_params(p)
    job = _job(estimator, p, task, _EVERY, **({} if p["modelDir"] is None else {"modelDir": "set"}))
    request = Request(recipe=_recipe(p, job["config"]), dry_run=p["dryRun"], **job)
    check_best_metric(request.config, request.recipe)
    check_strategy(request.config, request.recipe)
    check_workers(request.config, p["numWorkers"])
    check_restarts(p)
    if p["modelDir"] is None:
        return request
    refuse(MODEL_FOLDER, p)
    return replace(request, config=replace(request.config, model_folder=_new_folder(p["modelDir"])))


def config_of(estimator: Any) -> TrainConfig:
    """Returns how an estimator trains, unless its Params are refused."""
    return _config(Values(estimator.completed()), estimator._task, _EVERY)


def _new_folder(directory: str) -> str:
    """Returns the path of a new folder for the model of one fit."""
    started = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return os.path.join(directory, f"model-{started}-{secrets.token_hex(4)}")


def translate_run(params: RunParams, function: Any) -> JobRequest:
    """Checks the Params of `run` and translates them."""
    p = Values(params)
    check_job(p)
    named = repr(function) if isinstance(function, str) else name_of(function)  # its code decides itself what resumes
    request = JobRequest(**_job(params, p, "generic", {spec.name: spec for spec in RUN}, function=named))
    check_loop(request.config)
    check_workers(request.config, p["numWorkers"])
    check_restarts(p)
    return request


def _job(params: Any, p: Values, task: Task, table: Mapping[str, ParamSpec], **known: str) -> dict[str, Any]:
    """Returns the fields of a `JobRequest`; `known` identifies a training besides its Params."""
    patience, log_level = Timeouts(**_fields(p, "patience", table)), getattr(logging, p["logLevel"])
    return {
        "config": _config(p, task, table),
        "launch": Launch(patience=patience, log_level=log_level, **_fields(p, "launch", table)),
        "storage": StorageConfig(**_fields(p, "storage", table)),
        "checkpoint": _checkpoint(p, table, known),
        "columns": {
            "inputs": input_names(params),
            "label": p["labelCols"] or p["labelCol"] or None,
            "weight": p["weightCol"],
            "validation": p["validationIndicatorCol"],
            "key": p["idCol"],
            "options": input_options(params),
            "preprocess": preprocess_of(params),
            "keyed": p["split"] == "key",
        },
        "split": p["split"],
        "max_restarts": p["maxRestarts"],
        "min_workers": p["minWorkers"],
    }


def _config(p: Values, task: Task, table: Mapping[str, ParamSpec]) -> TrainConfig:
    shaped: dict[str, Any] = {"shuffle_block": _shuffle_block(p), "class_weights": _class_weights(p["classWeights"])}
    return TrainConfig(task=task, **shaped, **_fields(p, "config", table))


def _fields(p: Values, configuration: str, table: Mapping[str, ParamSpec] = _EVERY) -> dict[str, Any]:
    """Returns the Param values for one configuration class, by field."""
    named = ((spec.field.partition("."), p[name]) for name, spec in table.items())
    found = {field: value for (of, _, field), value in named if of == configuration}
    return {field: tuple(value) if isinstance(value, list) else value for field, value in found.items()}


def _checkpoint(p: Values, table: Mapping[str, ParamSpec], known: Mapping[str, str]) -> CheckpointConfig | None:
    if p["checkpointDir"] is None:
        return None
    CheckpointStore(p["checkpointDir"])  # raises if the file system is unknown
    return CheckpointConfig(
        owner=secrets.token_hex(16), job={**_identity(p, table), **known}, **_fields(p, "checkpoint", table)
    )


def _identity(p: Values, table: Mapping[str, ParamSpec]) -> dict[str, str]:
    """Returns the values that must be equal to resume from a checkpoint."""
    values = {
        name: p[name]
        for name, spec in table.items()
        if spec.compared is True or (spec.compared and p[name] != spec.default)
    } | {"shuffleBlock": _shuffle_block(p)}
    trained = getattr(p["module"], "trained", None)
    if isinstance(trained, TrainedModule):  # the model's uid is another in every process
        values["module"] = trained
    return described(values)


def _shuffle_block(p: Values) -> int:
    """Returns the shuffle block. It must not depend on whether "auto" uses memory or disk."""
    if p["shuffleBlock"] is not None:
        return int(p["shuffleBlock"])
    return 1 if p["storage"] == "memory" else _SHUFFLE_BLOCK


def _recipe(p: Values, config: TrainConfig) -> Recipe:
    module, fields = _module(p), _fields(p, "recipe", _EVERY)
    if p.brings_its_training:
        return _lightning_recipe(p, module, fields, config)
    return Recipe(**{**module, **fields, **_loss(p)})


def _lightning_recipe(
    p: Values, module: dict[str, Any], fields: dict[str, Any], config: TrainConfig
) -> LightningRecipe:
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


def _loss(p: Values) -> dict[str, Any]:
    """Returns the recipe's arguments for the loss, the training step, or neither: the loss that the model has."""
    if p["trainingStep"] is not None:
        return {"loss": None}
    return {"loss": p["loss"]} if p["loss"] is not None else {"loss": None, "training_step": MODEL_LOSS}


def _module(p: Values) -> dict[str, Any]:
    """Returns the recipe's arguments for a module; for a fitted model, its code and weights."""
    module, params = p["module"], p["moduleParams"]
    trained = getattr(module, "trained", None)
    if not isinstance(trained, TrainedModule):
        found = opened(module, params, seed=p["seed"], in_place=p["modelDir"] is not None)
        return {"module": module, "module_params": params} if found is None else found
    if isinstance(trained.source, Program):
        raise ConfigError(
            "the model to go on from was loaded from its exported graph, which is that of evaluation mode",
            hint="pass the module's class, and load the weights of model.module.state_dict() in it",
            param="module",
        )
    if params:
        raise ConfigError("moduleParams are given, but module is a fitted model", param="moduleParams")
    fields = {"module": trained.source, "module_params": trained.params}
    return {**fields, "initial": trained.weights, "seed": trained.seed}


def _class_weights(value: Any) -> tuple[float, ...] | Literal["balanced"] | None:
    if value is None or value == "balanced":
        return "balanced" if value else None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"classWeights must be 'balanced' or a list, got {value!r}", param="classWeights")
    try:
        return tuple(float(weight) for weight in value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"classWeights are no numbers: {error}", param="classWeights") from error
