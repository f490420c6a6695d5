"""Refusals of Params that cannot be together, or cannot work at all: a function for each subject."""

from __future__ import annotations

import os

import torch
from torch import nn

from sparktorch.base.devices import is_kind
from sparktorch.errors import ConfigError, ConflictError
from sparktorch.ml.fit.values import Values
from sparktorch.model.export import Program, Script
from sparktorch.train.strategies.registry import resumable

__all__ = [
    "check_batches",
    "check_columns",
    "check_device",
    "check_epochs",
    "check_instances",
    "check_learning_rate",
    "check_memory_budget",
    "check_model_folder",
    "check_module",
    "check_named_groups",
    "check_number_of_workers",
    "check_restarts",
    "check_scheduler",
    "check_set",
    "check_signs_of_thresholds",
    "check_split",
    "check_training_step",
    "check_validation",
    "check_whole_groups",
]

_ONE = "leave one of them out"
_MARK_SOME = "mark some with validationIndicatorCol; estimators for one task hold some out with validationFraction"


def check_set(p: Values, name: str, hint: str) -> None:
    """Refuses a Param without a value, or with an empty name of a column."""
    if p[name] is None or p[name] == "":
        raise ConfigError(f"{name} is not set", hint=hint, param=name, code="ST-NOT-SET")


def check_module(p: Values) -> None:
    """Refuses a module that cannot be trained, and one without a loss."""
    check_set(p, "module", "pass module=... to the constructor")
    if p["loss"] is None and not (p["trainingStep"] or p.brings_its_training or p.own_loss):
        raise ConfigError("loss is not set", hint="pass loss=... to the constructor", param="loss", code="ST-NOT-SET")
    if isinstance(p["module"], torch.jit.ScriptModule | torch.export.ExportedProgram):
        raise ConflictError(
            "module is a program of TorchScript or torch.export, which cannot be sent to the workers to be trained",
            hint="pass the class that it was made of; to score with it as it is, there is fromModule of the models",
            param="module",
        )
    if p.trained is not None and isinstance(p.trained.source, Program | Script):
        raise ConflictError(
            "the model to go on from was loaded from its graph, which is that of evaluation mode",
            hint="pass the module's class, and load the weights of model.module.state_dict() in it",
            param="module",
        )
    if p.trained is not None and p["moduleParams"]:
        raise ConflictError("moduleParams are given, but module is a fitted model", param="moduleParams")


def check_number_of_workers(p: Values) -> None:
    """Refuses numbers of workers that contradict each other."""
    if p["minWorkers"] is not None and isinstance(p["numWorkers"], tuple):
        raise ConflictError(
            f"minWorkers is {p['minWorkers']}, and numWorkers is {p['numWorkers']}, whose first number says the same",
            hint=_ONE,
            param="minWorkers",
        )
    least, most = p.workers
    if least > most:
        raise ConflictError(
            f"the fewest workers are {least}, more than the most, {most}",
            hint="numWorkers=(2, 4) are 2 to 4, and so are minWorkers=2 and numWorkers=4",
            param="numWorkers",
        )


def check_device(p: Values) -> None:
    """Refuses a device that is no type of accelerator."""
    if p["device"] not in ("auto", "cpu") and not is_kind(p["device"]):
        raise ConfigError(
            f"device {p['device']!r} is unknown",
            hint="it is 'auto', 'cpu', or an accelerator's type without a number: 'cuda' (of NVIDIA's and AMD's "
            "GPUs), 'xpu' (of Intel's); which one a worker gets is for Spark to say",
            param="device",
            code="ST-UNKNOWN-NAME",
        )


def check_batches(p: Values) -> None:
    """Refuses batches of fewer rows than there are workers or, with accumulation, parts to share them."""
    if 0 < p["batchSize"] < p.sharing:
        raise ConfigError(
            f"batchSize is {p['batchSize']}, to be shared by {p.sharing} workers",
            hint="set it to numWorkers at least: it counts the rows of all workers together",
            param="batchSize",
            code="ST-BATCH-SIZE",
        )
    if (p["accumulationSteps"] or 1) > 1 and p["accumulationSteps"] > p.share:
        raise ConfigError(
            f"accumulationSteps is {p['accumulationSteps']}, and each of {p.sharing} workers has {p.share:.3g} rows "
            "of a batch",
            hint="set it to batchSize / numWorkers at most",
            param="accumulationSteps",
            code="ST-BATCH-SIZE",
        )


def check_split(p: Values) -> None:
    """Refuses to keep the partitions where the rows must be divided otherwise."""
    if p["split"] == "keep" and p.makes_validation:
        raise ConflictError(
            "strategyParams.folds gives every worker all the rows, and split is 'keep'", hint=_ONE, param="split"
        )
    least, most = p.workers
    if p["split"] == "keep" and least < most:
        raise ConflictError(
            "the number of workers may change, and split='keep' makes one of each partition", hint=_ONE, param="split"
        )


def check_memory_budget(p: Values) -> None:
    """Refuses a budget of memory where rows take what they need."""
    if p["storage"] == "memory" and p.is_set("memoryBudget"):
        raise ConflictError(
            "memoryBudget is set, and storage is 'memory', which takes what the rows need",
            hint="set storage='auto' or 'disk'",
            param="memoryBudget",
        )


def check_columns(p: Values) -> None:
    """Refuses Params of columns of which one takes the place of another, and empty lists of columns."""
    if p.is_set("fillValue") and p["nullPolicy"] != "fill":
        raise ConflictError(
            f"fillValue is set, and nullPolicy is {p['nullPolicy']!r}", hint="set nullPolicy='fill'", param="fillValue"
        )
    for several, one in (("inputCols", "featuresCol"), ("labelCols", "labelCol")):
        if p[several] is not None and p.is_set(one):
            raise ConflictError(f"{one} and {several} are both set", hint="set one of them", param=several)
    if p["inputCols"] == []:
        raise ConfigError("inputCols is empty", param="inputCols", code="ST-NOT-SET")
    if p["labelCols"] == []:
        raise ConfigError(
            "labelCols is empty", hint="for no label at all, set labelCol=''", param="labelCols", code="ST-NOT-SET"
        )


def check_signs_of_thresholds(p: Values) -> None:
    """Refuses thresholds of which one is negative, or more than one is 0."""
    thresholds = p["thresholds"]
    if thresholds and (min(thresholds) < 0 or thresholds.count(0) > 1):
        raise ConfigError(
            f"thresholds are {thresholds}",
            hint="each must be > 0, but for one at most, which may be 0",
            param="thresholds",
            code="ST-CLASH",
        )


def check_instances(p: Values) -> None:
    """Refuses an optimizer or a scheduler that was made on the driver."""
    for name, kind, options in (
        ("optimizer", torch.optim.Optimizer, "learningRate and optimizerParams"),
        ("scheduler", torch.optim.lr_scheduler.LRScheduler, "schedulerParams"),
    ):
        if isinstance(p[name], kind):
            raise ConflictError(
                f"{name} is an instance, which has the parameters of one module on the driver",
                hint=f"pass its class, with {options}: each worker makes its own",
                param=name,
            )


def check_epochs(p: Values) -> None:
    """Refuses a fit without an epoch."""
    if p["epochs"] < 1:
        raise ConfigError(
            f"epochs must be at least 1, got {p['epochs']}",
            hint="a module that was trained elsewhere scores without a fit: see fromModule of the models",
            param="epochs",
            code="ST-VALUE",
        )


def check_training_step(p: Values) -> None:
    """Refuses a loss beside a training step, which computes the loss."""
    if p["trainingStep"] is not None and (p.is_set("loss") or p["lossParams"]):
        raise ConflictError(
            "trainingStep computes the loss, and loss or lossParams are set",
            hint="set one of them",
            param="trainingStep",
        )


def check_scheduler(p: Values) -> None:
    """Refuses arguments without a scheduler, and steps of one that looks at validations."""
    if p["scheduler"] is None and p["schedulerParams"]:
        raise ConflictError("schedulerParams are given, but no scheduler", param="schedulerParams")
    if p.follows_loss and p["schedulerInterval"] == "step":
        raise ConflictError(
            "ReduceLROnPlateau looks at the loss of an epoch, and schedulerInterval is 'step'",
            hint="set schedulerInterval='epoch'",
            param="schedulerInterval",
        )


def check_validation(p: Values) -> None:
    """Refuses what needs validation rows where there are none, and two ways to choose these rows."""
    if not p.validated:
        if p.follows_loss:
            raise _without_validation("scheduler", "ReduceLROnPlateau looks at the loss")
        if p["earlyStoppingPatience"] is not None:
            raise _without_validation("earlyStoppingPatience", "earlyStoppingPatience looks at a metric")
        if p["earlyStoppingMetric"] != "val_loss":
            raise _without_validation("earlyStoppingMetric", "earlyStoppingMetric looks at a metric")
        if p["metrics"]:
            raise _without_validation("metrics", "metrics are those")
    if p.makes_validation and p["validationIndicatorCol"] is not None:
        raise ConflictError(
            "strategyParams.folds makes the validation rows, and validationIndicatorCol names some",
            hint=_ONE,
            param="validationIndicatorCol",
        )


def _without_validation(name: str, what: str) -> ConfigError:
    """Returns the refusal of a Param that needs validation rows."""
    return ConfigError(
        f"{what} of validation rows, and there are none", hint=_MARK_SOME, param=name, code="ST-NO-VALIDATION"
    )


def check_learning_rate(p: Values) -> None:
    """Refuses a learning rate among the arguments of the optimizer."""
    if "lr" in p["optimizerParams"]:
        raise ConflictError("optimizerParams holds 'lr'", hint="set learningRate", param="optimizerParams")


def check_named_groups(p: Values) -> None:
    """Refuses a ranking without a column of groups."""
    hint = "name the column that is the same in rows which are ordered together, such as that of a query"
    check_set(p, "groupCol", hint)


def check_whole_groups(p: Values) -> None:
    """Refuses a loss, or a strategy, that takes groups apart."""
    if p.brings_its_training or not (p["loss"] or p["trainingStep"]):
        raise ConflictError(
            "the module computes a loss of rows, and with groupCol samples are groups: pass a loss (output, label, "
            "sizes)",
            param="groupCol",
        )
    if p["strategy"] == "mesh":
        raise ConflictError(
            "strategy 'mesh' exchanges rows among workers, and groups stay whole; use 'zero3'", param="strategy"
        )


def check_restarts(p: Values) -> None:
    """Refuses checkpoints, and another number of workers at a restart, of a strategy that cannot go on from them."""
    if p["checkpointDir"] is not None and not p.strategy.resumable:
        raise ConfigError(
            f"checkpointDir is set, and strategy {p['strategy']!r} has state in its workers that no checkpoint holds",
            hint=f"use {resumable()}, or leave checkpointDir out",
            param="checkpointDir",
            code="ST-STRATEGY",
        )
    least, most = p.workers
    if least < most and not p.strategy.resumable:
        raise ConfigError(
            f"numWorkers is from {least} to {most}, and under strategy {p['strategy']!r} another number of workers "
            "trains something else",
            hint=f"use {resumable()}, or set numWorkers to one number, without minWorkers",
            param="numWorkers",
            code="ST-STRATEGY",
        )


def check_model_folder(p: Values) -> None:
    """Refuses a folder in which the workers cannot write the model, and modules that they cannot make in parts."""
    if not os.path.isabs(p["modelDir"]):
        raise ConfigError(
            f"modelDir {p['modelDir']!r} is a URL or a relative path, and the files of a model are mapped into memory",
            hint="name a folder, from '/' on, on a file system that is mounted on all hosts",
            param="modelDir",
            code="ST-MODEL-DIR",
        )
    if p.file_in_the_way:
        raise ConfigError(
            f"modelDir {p['modelDir']!r} cannot be a folder: {p.file_in_the_way!r} is a file",
            hint="name another folder, on a file system that is mounted under the same path on all hosts",
            param="modelDir",
            code="ST-MODEL-DIR",
        )
    if p.brings_its_training:
        raise ConfigError(
            "modelDir is set, and module is a LightningModule, whose steps may take parameters apart",
            hint="pass its network as module, with a loss, or leave modelDir out",
            param="module",
            code="ST-MODEL-DIR",
        )
    if isinstance(p.source, nn.Module):
        raise ConfigError(
            "modelDir is set, and module is an instance, which this process holds already",
            hint="pass a class or function that makes the module, and its arguments as moduleParams",
            param="module",
            code="ST-MODEL-DIR",
        )
