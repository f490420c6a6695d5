"""Translates the camelCase Params into configuration objects; nothing else does."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Generic, Literal, TypeVar

from sparktorch.base.config import CheckpointConfig, StorageConfig, Task, TrainConfig
from sparktorch.base.imports import load_object
from sparktorch.data.columns import Groups, InputOptions, Window
from sparktorch.data.preprocess import check_signature
from sparktorch.distributed.monitor import Timeouts
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.checks import check_best_metric, check_job, check_params, check_ships
from sparktorch.ml.fit.identity import described
from sparktorch.ml.fit.refusals import check_model_folder, check_named_groups, check_restarts, check_whole_groups
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.classes import CLASSIFIER, GENERIC, RUN
from sparktorch.ml.params.declare import ParamSpec, input_names
from sparktorch.ml.params.mixins import EstimatorParams, RunParams
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.recipe.groups_loss import GroupsLossStep
from sparktorch.train.recipe.lookup import check_name, name_of
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_loop, check_strategy, check_workers
from sparktorch.worker import RankJob, TrainJob

__all__ = ["Request", "config_of", "input_columns", "translate", "translate_run"]

_EVERY = {spec.name: spec for spec in (*GENERIC, *CLASSIFIER)}
_SHUFFLE_BLOCK = 32  # Rows that may be on disk are shuffled in blocks of so many.


# The Params behind the arguments of `spark.frame.prepare`.
_COLUMNS = {
    "inputs": "featuresCol or inputCols",
    "label": "labelCol or labelCols",
    "weight": "weightCol",
    "validation": "validationIndicatorCol",
    "key": "idCol",
    "options": "nullPolicy, or how the inputs are described",
    "preprocess": "preprocess",
    "keyed": "split",
    "groups": "groupCol, orderCol, or what a sample is",
    "grades": "the kind of labels",
}

J = TypeVar("J", bound=RankJob)


@dataclass(frozen=True, kw_only=True)
class Request(Generic[J]):
    """A fit, or a `run`, as its Params ask for it.

    Attributes:
        job: What the ranks are to do; its columns are known once the DataFrame was looked at.
        launch: How the ranks start.
        columns: Column names by role, the arguments of `spark.frame.prepare`.
        split: "key" to split rows by key, "keep" to keep the partitions.
        folds: Whether the strategy chooses the validation rows, and every rank gets all rows.
        max_restarts: The most restarts after a lost rank.
        workers: The fewest and the most ranks.
        grow_after: Seconds that an attempt has with fewer than the most ranks before it may make way for one with more.
        preflight: "basic" to check settings, slots and GPUs before the job, "full" for the executors, too.
        dry_run: Where module and loss are tried: on the "driver" or in a "worker".
    """

    job: J
    launch: Launch
    columns: dict[str, Any]
    split: str
    folds: bool
    max_restarts: int
    workers: tuple[int, int]
    grow_after: float
    preflight: str
    dry_run: str = "driver"

    @property
    def rows(self) -> dict[str, Any]:
        """The values, by Param or group of Params, that decide which rows the ranks hold."""
        config, launch = self.job.config, self.launch
        return {_COLUMNS[name]: value for name, value in self.columns.items()} | {
            "the kind of estimator, whose labels have another type": config.task,
            "split": self.split,
            "strategyParams.folds": self.folds,
            "storage": self.job.storage,
            "numWorkers": self.workers,
            "device": launch.device,
            "rendezvous": launch.rendezvous,
            "startTimeout": launch.patience.start,
            "stallTimeout": launch.patience.stall,
            "driverTimeout": launch.patience.driver,
            "logLevel": launch.log_level,
            "microBatchSize or accumulationSteps": config.micro_batch_size is not None or config.accumulation_steps > 1,
        }

    @property
    def origin(self) -> str:
        """Where a restart goes on, for messages."""
        return "its last checkpoint" if self.job.checkpoint else "the beginning"

    def with_job(self, **changes: Any) -> Request[J]:
        """Returns a copy with some fields of its job changed."""
        return replace(self, job=replace(self.job, **changes))

    def with_launch(self, **changes: Any) -> Request[J]:
        """Returns a copy with some fields of its launch changed."""
        return replace(self, launch=replace(self.launch, **changes))


def translate(estimator: EstimatorParams, task: Task) -> Request[TrainJob]:
    """Checks the Params and translates them."""
    estimator = estimator.completed()  # type: ignore[attr-defined]  # All estimators have it.
    p = Values(estimator)
    check_params(p)
    task_training: TaskTraining = estimator._task_training()  # type: ignore[attr-defined]  # All estimators have it.
    groups = _groups(p, task_training)
    identity = {} if p["modelDir"] is None else {"modelDir": "set"}
    if groups is not None and groups.window is not None:
        identity["window"] = _window_text(groups.window)
    untrained = task_training.validates_untrained
    config = _config(p, task, _EVERY, model_folder=_new_folder(p), validates_untrained=untrained)
    job = _job(p, config, _EVERY, **identity)
    loss = _loss(p) if groups is None or groups.window is not None else _loss_of_groups(p, task_training)
    recipe = _recipe(p, config, loss)
    train_job = TrainJob(recipe=recipe, **job)
    request = _request(estimator, p, _EVERY, train_job, groups=groups, graded=task_training.graded)
    for kind in ("loss", "optimizer", "scheduler"):
        check_name(getattr(recipe, kind), kind)
    check_best_metric(config, recipe)
    check_strategy(config, recipe)
    check_workers(config, p.workers[1])
    check_restarts(p)
    if p["modelDir"] is not None:
        check_model_folder(p)
    return request


def translate_run(params: RunParams, function: Any) -> Request[RankJob]:
    """Checks the Params of `run` and translates them."""
    p, table = Values(params), {spec.name: spec for spec in RUN}
    check_job(p)
    # A run resumes the checkpoint of a function of the same name, whose code decides itself what it goes on with.
    name = repr(function) if isinstance(function, str) else name_of(function)
    job = RankJob(**_job(p, _config(p, "generic", table), table, function=name))
    request = _request(params, p, table, job, groups=_groups(p, TaskTraining()), graded=False)
    check_loop(request.job.config)
    check_workers(request.job.config, p.workers[1])
    check_restarts(p)
    return request


def config_of(estimator: Any) -> TrainConfig:
    """Returns how an estimator trains, unless its Params are refused."""
    estimator = estimator.completed()
    untrained = estimator._task_training().validates_untrained
    return _config(Values(estimator), estimator._task, _EVERY, validates_untrained=untrained)


def input_columns(instance: Any) -> dict[str, Any]:
    """Returns the input columns and how they become arguments, as arguments of `spark.frame.prepare`."""
    p = Values(instance)
    preprocess, policy = _preprocess(p), p["nullPolicy"]
    options = InputOptions(
        shapes={name: tuple(shape) for name, shape in p["inputShapes"].items()},
        layouts=p["inputLayouts"],
        dtypes=p["inputDtypes"],
        limits=p["maxLengths"],
        pads=p["padValues"],
        assemble=p["assembleInputs"],
        fill=p["fillValue"] if policy == "fill" else None,
        drop=policy == "drop",
        as_they_are=preprocess is not None,
        nulls=getattr(preprocess, "takes_nulls", False),
    )
    return {"inputs": input_names(instance), "options": options, "preprocess": preprocess}


def _request(
    params: Any, p: Values, table: Mapping[str, ParamSpec], job: J, *, groups: Groups | None, graded: bool
) -> Request[J]:
    patience, log_level = Timeouts(**_fields(p, "patience", table)), getattr(logging, p["logLevel"])
    return Request(
        job=job,
        launch=Launch(world_size=p.workers[1], patience=patience, log_level=log_level, **_fields(p, "launch", table)),
        workers=p.workers,
        columns={
            **input_columns(params),
            "label": p["labelCols"] or p["labelCol"] or None,
            "weight": p["weightCol"],
            "validation": p["validationIndicatorCol"],
            "key": p["idCol"],
            "keyed": p["split"] == "key",
            "groups": groups,
            "grades": graded,
        },
        folds=p.makes_validation,
        **_fields(p, "request", table),
    )


def _preprocess(p: Values) -> Any:
    """Returns the `preprocess` callable, or `None` if it is not set; refuses one that cannot be called or shipped."""
    function = p["preprocess"]
    if function is None:
        return None
    if isinstance(function, str):
        function = load_object(function)
    check_signature(function)
    check_ships(function, "preprocess", param="preprocess", hint="make what it holds inside it")
    return function


def _new_folder(p: Values) -> str | None:
    """Returns a folder for the model of one fit, `None` without `modelDir`."""
    if p["modelDir"] is None:
        return None
    started = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    return os.path.join(p["modelDir"], f"model-{started}-{secrets.token_hex(4)}")


def _job(p: Values, config: TrainConfig, table: Mapping[str, ParamSpec], **identity: str) -> dict[str, Any]:
    """Returns the fields of a `RankJob`; `identity` tells a training from others besides its Params."""
    return {
        # The monitor must name a stalled rank before the collectives of its peers time out.
        "collective_seconds": max(RankJob.collective_seconds, 2 * p["stallTimeout"]),
        "config": config,
        "storage": StorageConfig(**_fields(p, "storage", table)),
        "checkpoint": _checkpoint(p, table, identity),
    }


def _config(p: Values, task: Task, table: Mapping[str, ParamSpec], **fields: Any) -> TrainConfig:
    return TrainConfig(
        task=task,
        shuffle_block=_shuffle_block(p),
        class_weights=_class_weights(p["classWeights"]),
        **fields,
        **_fields(p, "config", table),
    )


def _fields(p: Values, configuration: str, table: Mapping[str, ParamSpec] = _EVERY) -> dict[str, Any]:
    """Returns the Param values for one configuration class, by field."""
    values = {}
    for name, spec in table.items():
        configuration_name, _, field = spec.field.partition(".")
        if configuration_name == configuration:
            value = p[name]
            values[field] = tuple(value) if isinstance(value, list) else value
    return values


def _checkpoint(p: Values, table: Mapping[str, ParamSpec], identity: Mapping[str, str]) -> CheckpointConfig | None:
    if p["checkpointDir"] is None:
        return None
    CheckpointStore(p["checkpointDir"])  # It raises if the file system is unknown.
    compared = {}  # A training resumes a checkpoint only if these are equal.
    for name, spec in table.items():
        if spec.compared is True or (spec.compared == "unless default" and p[name] != spec.default):
            compared[name] = p[name]
    compared["shuffleBlock"] = _shuffle_block(p)
    if p.trained is not None:  # The model itself has a uid, which is another in every process.
        compared["module"] = p.trained
    job = {**described(compared), **identity}
    return CheckpointConfig(owner=secrets.token_hex(16), job=job, **_fields(p, "checkpoint", table))


def _shuffle_block(p: Values) -> int:
    """Returns the shuffle block. It must not depend on whether "auto" uses memory or disk."""
    if p["shuffleBlock"] is not None:
        return int(p["shuffleBlock"])
    return 1 if p["storage"] == "memory" else _SHUFFLE_BLOCK


def _window_text(window: Window) -> str:
    """Returns the text by which checkpoints identify windows; it has the names of fields that the first ones have."""
    return (
        f"Window(context={window.context}, horizon={window.horizon}, step={window.step}, known={window.known_ahead}, "
        f"even={window.even})"
    )


def _groups(p: Values, task_training: TaskTraining) -> Groups | None:
    """Returns the groups of the rows, `None` if each row is a sample."""
    group, window = p["groupCol"] or task_training.group, task_training.window
    if group is None and window is None:
        if task_training.graded:
            check_named_groups(p)
        return None
    if p["split"] == "keep":
        hint = "leave split out: rows of a group are sent to the same worker"
        raise ConfigError("split='keep' may divide a group among workers", hint=hint, param="split", code="ST-GROUPS")
    return Groups(group=group, order=p["orderCol"], window=window)


def _recipe(p: Values, config: TrainConfig, loss: Mapping[str, Any]) -> Recipe:
    recipe = p.adapter.recipe(**{**_module(p), **_fields(p, "recipe", _EVERY), **loss})
    return recipe.for_fit(config, validated=p.validated)


def _loss(p: Values) -> dict[str, Any]:
    """Returns the recipe's arguments for the loss, the training step, or neither: the loss that the model has."""
    if p["trainingStep"] is not None:
        return {"loss": None}
    return {"loss": p["loss"]} if p["loss"] is not None else {"loss": None, "training_step": p.own_loss}


def _loss_of_groups(p: Values, task_training: TaskTraining) -> dict[str, Any]:
    """Returns the recipe's arguments for a loss of whole groups, or a training step that has one."""
    check_whole_groups(p)
    if p["trainingStep"] is not None:
        return {"loss": None}
    loss = p["loss"] if task_training.loss is None else task_training.loss
    if isinstance(loss, str) and ":" not in loss:
        raise ConfigError(
            f"loss {loss!r} is no import path, and torch's losses, which have names, are those of rows",
            hint="with groupCol, pass a callable (output, label, sizes) that returns one loss per group",
            param="loss",
        )
    loss = load_object(loss) if isinstance(loss, str) else loss
    check_ships(loss, f"loss {name_of(loss)}", param="loss", hint="make what it holds inside it")
    return {"loss": None, "training_step": GroupsLossStep(loss, p["lossParams"], task_training.metrics)}


def _module(p: Values) -> dict[str, Any]:
    """Returns the recipe's arguments for a module; for a fitted model, its code and weights."""
    module, params, trained = p["module"], p["moduleParams"], p.trained
    if trained is None:
        return p.adapter.recipe_fields(module, params, seed=p["seed"], in_place=p["modelDir"] is not None)
    fields = {"module": trained.source, "module_params": trained.params}
    return {**fields, "initial": trained.weights, "seed": trained.seed}


def _class_weights(value: Any) -> tuple[float, ...] | Literal["balanced"] | None:
    if value is None or value == "balanced":
        return "balanced" if value else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return tuple(map(float, value))
    hint = "it is 'balanced', or a list of a weight for each class 0, 1, ...: [1.0, 9.0]"
    raise ConfigError(f"classWeights is {value!r}", hint=hint, param="classWeights")
