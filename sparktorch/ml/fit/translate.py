"""The one place where camelCase Params become configuration."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pyspark.ml.param.shared import HasThresholds

from sparktorch.base.config import CheckpointConfig, StorageConfig, Task, TrainConfig, above, at_least, one_of
from sparktorch.base.devices import is_kind
from sparktorch.base.imports import load_object
from sparktorch.distributed.monitor import Patience
from sparktorch.errors import ConfigError, nearest
from sparktorch.ml.fit.inputs import check_ships, input_options, preprocess_of
from sparktorch.model.export import Program
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.callbacks import check_callback
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.registry import check_strategy, strategy_type

if TYPE_CHECKING:
    from pyspark.ml.param import Params

    from sparktorch.ml.estimator import TorchEstimatorBase
    from sparktorch.ml.params import ScoringParams

__all__ = ["Request", "check_param_names", "check_scoring", "check_thresholds", "given", "input_names", "translate"]


_SHUFFLE_BLOCK = 32  # of rows that may be on disk

# Params that decide what a step trains.
_SAME = (
    *("module", "moduleParams", "loss", "lossParams", "trainingStep", "classWeights", "freeze"),
    *("optimizer", "optimizerParams", "learningRate", "parameterGroups"),
    *("scheduler", "schedulerParams", "schedulerInterval", "warmupSteps", "referenceBatchSize"),
    *("batchSize", "epochs", "split", "shuffle", "shuffleBlock", "seed", "precision", "emaDecay"),
    *("gradientClipNorm", "gradientClipValue", "nullPolicy", "fillValue"),
    *(
        "inputShapes",
        "inputLayouts",
        "inputDtypes",
        "maxLengths",
        "padValues",
        "assembleInputs",
        "labelCols",
        "preprocess",
    ),
    *("nonFiniteLoss", "syncBatchNorm", "earlyStoppingPatience", "validationInterval", "validationUnit"),
)


_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Request:
    """What an estimator's Params ask for.

    Attributes:
        recipe: What is trained.
        config: How.
        launch: Where.
        split: Whether rows are split over the workers by "key", or "keep" their partitions.
        storage: Where each worker keeps its rows.
        checkpoint: Where and how often its state is saved; `None` for nowhere.
        max_restarts: How often it is started again after the loss of a rank.
        min_workers: The fewest ranks to start it again with; `None` for as many as there were.
        dry_run: Where the first row is tried, on the "driver" or in a "worker".
        columns: Column names by role, the arguments of `spark.frame.prepare`.
    """

    recipe: Recipe
    config: TrainConfig
    launch: Launch
    split: str
    storage: StorageConfig
    checkpoint: CheckpointConfig | None
    max_restarts: int
    min_workers: int | None
    dry_run: str
    columns: dict[str, Any]


def given(instance: Params) -> dict[str, Any]:
    """Returns the constructor arguments that the caller gave, without the `None`s."""
    arguments: dict[str, Any] = instance._input_kwargs  # type: ignore[attr-defined]
    return {name: value for name, value in arguments.items() if value is not None}


def input_names(instance: Any) -> list[str]:
    """Returns the input columns: `inputCols` where it is set, else `featuresCol`.

    Raises:
        ConfigError: Both were set, or `inputCols` is empty.
    """
    if not instance.isSet("inputCols"):
        return [instance.getFeaturesCol()]
    if instance.isSet("featuresCol"):
        raise ConfigError("featuresCol and inputCols are both set", hint="set one of them", param="inputCols")
    names: list[str] = instance.getInputCols()
    if not names:
        raise ConfigError("inputCols is empty", param="inputCols")
    return names


def translate(estimator: TorchEstimatorBase[Any], task: Task) -> Request:
    """Checks the Params and translates them.

    Raises:
        ConfigError: A Param is missing or out of range.
    """
    p = _Values(estimator)
    for name in ("module", "loss"):
        if p[name] is None and (name == "module" or p["trainingStep"] is None):
            raise ConfigError(f"{name} is not set", hint=f"pass {name}=... to the constructor", param=name)
    above("learningRate", p["learningRate"], 0)
    at_least("numWorkers", p["numWorkers"], 1)
    at_least("maxRestarts", p["maxRestarts"], 0)
    above("startTimeout", p["startTimeout"], 0)
    above("stallTimeout", p["stallTimeout"], 0)
    one_of("logLevel", p["logLevel"], _LOG_LEVELS)
    check_scoring(estimator)
    one_of("rendezvous", p["rendezvous"], ("auto", "driver", "rank0"))
    one_of("preflight", p["preflight"], ("basic", "full"))
    one_of("dryRun", p["dryRun"], ("driver", "worker"))
    _check_loss(estimator, p)
    _check_schedule(p)
    _check_sizes(p)
    _check_storage(estimator, p)
    validated = p["validationIndicatorCol"] is not None or p["strategyParams"].get("folds")
    if p["earlyStoppingPatience"] is not None and not validated:
        raise ConfigError(
            "earlyStoppingPatience looks at the loss of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param="earlyStoppingPatience",
        )
    if p["metrics"] and not validated:
        raise ConfigError(
            "metrics are those of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param="metrics",
        )
    _check_callbacks(p["callbacks"])
    if "lr" in p["optimizerParams"]:
        raise ConfigError("optimizerParams holds 'lr'", hint="set learningRate", param="optimizerParams")
    request = Request(
        recipe=Recipe(
            **_module(p["module"], p["moduleParams"]),
            loss=p["loss"] if p["trainingStep"] is None else None,
            loss_params=p["lossParams"],
            optimizer=p["optimizer"],
            optimizer_params=p["optimizerParams"],
            learning_rate=p["learningRate"],
            scheduler=p["scheduler"],
            scheduler_params=p["schedulerParams"],
            training_step=p["trainingStep"],
            parameter_groups=tuple(p["parameterGroups"]),
            freeze=tuple(p["freeze"]),
            metrics=p["metrics"],
            callbacks=tuple(p["callbacks"]),
        ),
        config=TrainConfig(
            task=task,
            batch_size=p["batchSize"],
            epochs=p["epochs"],
            seed=p["seed"],
            shuffle=p["shuffle"],
            shuffle_block=_shuffle_block(p),
            strategy=p["strategy"],
            strategy_params=p["strategyParams"],
            accumulation_steps=p["accumulationSteps"],
            micro_batch_size=p["microBatchSize"],
            clip_norm=p["gradientClipNorm"],
            clip_value=p["gradientClipValue"],
            precision=p["precision"],
            schedule_interval=p["schedulerInterval"],
            warmup_steps=p["warmupSteps"],
            reference_batch_size=p["referenceBatchSize"],
            validation_interval=p["validationInterval"],
            validation_unit=p["validationUnit"],
            validation_batch_size=p["validationBatchSize"],
            patience=p["earlyStoppingPatience"],
            class_weights=_class_weights(p["classWeights"]),
            ema_decay=p["emaDecay"],
            non_finite=p["nonFiniteLoss"],
            deterministic=p["deterministic"],
            compile=p["compile"],
            channels_last=p["channelsLast"],
            sync_batch_norm=p["syncBatchNorm"],
        ),
        launch=Launch(
            world_size=p["numWorkers"],
            device=p["device"],
            rendezvous=p["rendezvous"],
            patience=Patience(start=p["startTimeout"], stall=p["stallTimeout"]),
            log_level=getattr(logging, p["logLevel"]),
        ),
        split=p["split"],
        storage=StorageConfig(kind=p["storage"], budget=p["memoryBudget"]),
        checkpoint=_checkpoint(p),
        max_restarts=p["maxRestarts"],
        min_workers=p["minWorkers"],
        dry_run=p["dryRun"],
        columns={
            "inputs": input_names(estimator),
            "label": _label(estimator, p),
            "weight": p["weightCol"],
            "validation": p["validationIndicatorCol"],
            "key": p["idCol"],
            "options": input_options(estimator),
            "preprocess": preprocess_of(estimator),
            "keyed": p["split"] == "key",
        },
    )
    check_strategy(request.config, request.recipe)
    if request.checkpoint is not None and not strategy_type(request.config).resumable:
        raise ConfigError(
            f"checkpointDir is set, and strategy {p['strategy']!r} has state in its workers that no checkpoint holds",
            hint="use 'ddp', 'zero1', 'zero2' or 'zero3', or leave checkpointDir out",
            param="checkpointDir",
        )
    _check_min_workers(p, request)
    if p["strategyParams"].get("folds") and p["validationIndicatorCol"] is not None:
        raise ConfigError(
            "strategyParams.folds makes the validation rows, and validationIndicatorCol names some",
            hint="leave one of them out",
            param="validationIndicatorCol",
        )
    return request


def _label(estimator: Params, p: _Values) -> str | list[str] | None:
    if p["labelCols"] is None:
        return p["labelCol"] or None
    if estimator.isSet("labelCol"):
        raise ConfigError("labelCol and labelCols are both set", hint="set one of them", param="labelCols")
    if not p["labelCols"]:
        raise ConfigError("labelCols is empty", hint="for no label at all, set labelCol=''", param="labelCols")
    return list(p["labelCols"])


def _check_min_workers(p: _Values, request: Request) -> None:
    if request.min_workers is None:
        return
    at_least("minWorkers", request.min_workers, 1)
    if request.min_workers > p["numWorkers"]:
        raise ConfigError(
            f"minWorkers is {request.min_workers}, more than numWorkers, {p['numWorkers']}", param="minWorkers"
        )
    if not request.max_restarts:
        raise ConfigError(
            "minWorkers says what a restart may go on with, and maxRestarts is 0",
            hint="set maxRestarts",
            param="minWorkers",
        )
    if not strategy_type(request.config).resumable:
        raise ConfigError(
            f"minWorkers is set, and under strategy {p['strategy']!r} another number of workers trains something else",
            hint="use 'ddp', 'zero1', 'zero2' or 'zero3', or leave minWorkers out",
            param="minWorkers",
        )


def _checkpoint(p: _Values) -> CheckpointConfig | None:
    if p["checkpointDir"] is None:
        return None
    CheckpointStore(p["checkpointDir"])  # refuses a file system that is unknown
    return CheckpointConfig(
        directory=p["checkpointDir"],
        interval=p["checkpointInterval"],
        unit=p["checkpointUnit"],
        keep=p["keepCheckpoints"],
        owner=secrets.token_hex(16),
        job=_identity(p),
    )


def _identity(p: _Values) -> dict[str, str]:
    """Returns what must be the same for a training to go on from another's checkpoint."""
    values = {name: p[name] for name in _SAME} | {"shuffleBlock": _shuffle_block(p)}
    return {name: _described(value) for name, value in values.items()}


def _described(value: Any) -> str:
    """Returns the same text for the same value in every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_described, value)) + "]"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _check_loss(estimator: Params, p: _Values) -> None:
    if p["trainingStep"] is not None and (estimator.isSet("loss") or p["lossParams"]):
        raise ConfigError(
            "trainingStep computes the loss, and loss or lossParams are set",
            hint="set one of them",
            param="trainingStep",
        )


def _check_schedule(p: _Values) -> None:
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
    if p["validationIndicatorCol"] is None and not p["strategyParams"].get("folds"):
        raise ConfigError(
            "ReduceLROnPlateau looks at the loss of validation rows, and there are none",
            hint="mark some with validationIndicatorCol",
            param="scheduler",
        )


def _check_sizes(p: _Values) -> None:
    rows, workers, parts = p["batchSize"], p["numWorkers"], p["accumulationSteps"]
    if p["strategy"] == "independent":  # each worker has batches of its own
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


def _check_storage(estimator: Params, p: _Values) -> None:
    one_of("split", p["split"], ("key", "keep"))
    if p["split"] == "keep" and p["strategyParams"].get("folds"):
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
    if p["storage"] == "memory" and estimator.isSet("memoryBudget"):
        raise ConfigError(
            "memoryBudget is set, and storage is 'memory', which takes what the rows need",
            hint="set storage='auto' or 'disk'",
            param="memoryBudget",
        )


def _shuffle_block(p: _Values) -> int:
    """Returns the block to shuffle by: it must not depend on whether "auto" finds room in memory."""
    if p["shuffleBlock"] is not None:
        return int(p["shuffleBlock"])
    return 1 if p["storage"] == "memory" else _SHUFFLE_BLOCK


def check_scoring(instance: ScoringParams) -> None:
    """Checks the Params that say how to score.

    Raises:
        ConfigError: One of them is out of range.
    """
    at_least("predictBatchSize", instance.getPredictBatchSize(), 1)
    if instance.getDevice() not in ("auto", "cpu") and not is_kind(instance.getDevice()):
        raise ConfigError(
            f"device {instance.getDevice()!r} is unknown",
            hint="it is 'auto', 'cpu', or an accelerator's type without a number: 'cuda' (of NVIDIA's and AMD's GPUs), "
            "'xpu' (of Intel's); which one a worker gets is for Spark to say",
            param="device",
        )
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
    """Checks that there is a threshold for each class, if there are any.

    Raises:
        ConfigError: There are more or fewer.
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


def _module(module: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe's arguments for a module; a fitted model gives its code and its weights."""
    trained = getattr(module, "trained", None)
    if not isinstance(trained, TrainedModule):
        return {"module": module, "module_params": params}
    if isinstance(trained.source, Program):
        raise ConfigError(
            "the model to go on from was loaded from its exported graph, which is that of evaluation mode",
            hint="pass the module's class, and load the weights of model.module.state_dict() in it",
            param="module",
        )
    if params:
        raise ConfigError("moduleParams are given, but module is a fitted model", param="moduleParams")
    return {"module": trained.source, "module_params": trained.params, "initial": trained.weights}


def _check_callbacks(callbacks: list[Any]) -> None:
    for callback in callbacks:
        check_callback(callback)
        hint = "it holds something that stays in this process (a lock, a file, a session): make that in on_fit_start"
        check_ships(callback, type(callback).__qualname__, param="callbacks", hint=hint)


def _class_weights(value: Any) -> tuple[float, ...] | Literal["balanced"] | None:
    if value is None or value == "balanced":
        return "balanced" if value else None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"classWeights must be 'balanced' or a list, got {value!r}", param="classWeights")
    try:
        return tuple(float(weight) for weight in value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"classWeights are no numbers: {error}", param="classWeights") from error


class _Values:
    """An estimator's Param values by name; `None` where there is no such Param, no value and no default."""

    def __init__(self, instance: Params) -> None:
        self._instance = instance

    def __getitem__(self, name: str) -> Any:
        instance = self._instance
        return instance.getOrDefault(name) if instance.hasParam(name) and instance.isDefined(name) else None


def check_param_names(instance: Params, names: Iterable[str]) -> None:
    """Refuses names that are not Params of the instance.

    Raises:
        ConfigError: The hint names the nearest Param.
    """
    valid = [param.name for param in instance.params]
    for name in names:
        if name not in valid:
            raise ConfigError(f"{type(instance).__name__} has no Param {name!r}", hint=nearest(name, valid), param=name)
