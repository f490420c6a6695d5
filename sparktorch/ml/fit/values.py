"""The values of Params by name, and the tables of those that exclude each other: which Param, when, what, a hint."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch
from pyspark.ml.param import Params
from torch import nn

from sparktorch.base.devices import is_kind
from sparktorch.base.imports import load_object
from sparktorch.errors import Refusal
from sparktorch.model.export import Program, Script
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.adapter import Adapter, adapter_of
from sparktorch.train.recipe.loss import TrainingStep
from sparktorch.train.strategies.base import Kind
from sparktorch.train.strategies.registry import resumable, strategy_for, strategy_type

__all__ = [
    *("COLUMNS", "FIT", "JOB", "MODEL_FOLDER", "MODULE", "NAMED_GROUPS", "RESTARTS", "SCORING", "WHOLE_GROUPS"),
    *("Values", "not_set"),
]

_ONE = "leave one of them out"


class Values:
    """Param values by name; `None` if the Param does not exist, or has neither value nor default."""

    resumable = property(lambda self: resumable())  # the strategies, as text

    def __init__(self, instance: Params) -> None:
        self._instance = instance

    def __getitem__(self, name: str) -> Any:
        instance = self._instance
        return instance.getOrDefault(name) if instance.hasParam(name) and instance.isDefined(name) else None

    def is_set(self, name: str) -> bool:
        """Whether a Param exists and was set by the user."""
        return bool(self._instance.hasParam(name) and self._instance.isSet(name))

    @property
    def source(self) -> Any:
        """What makes the module; of a fitted model, what made its module."""
        return getattr(getattr(self["module"], "trained", None), "source", self["module"])

    @property
    def trained(self) -> TrainedModule | None:
        """The fitted model to go on from, if `module` is one."""
        trained = getattr(self["module"], "trained", None)
        return trained if isinstance(trained, TrainedModule) else None

    @property
    def adapter(self) -> Adapter:
        """What the module, or that of a fitted model, has beyond torch's conventions."""
        return adapter_of(self.source)

    @property
    def own_loss(self) -> TrainingStep | None:
        """The training step for the loss that the module has itself; `None` if it has none."""
        return self.adapter.loss_step(self.source)

    @property
    def brings_its_training(self) -> bool:
        """Whether the module brings its loss, optimizer and schedule."""
        return self.adapter.brings_training

    @property
    def validates_untrained(self) -> bool:
        """Whether the weights from before the first step are to be judged, too."""
        return bool(getattr(self._instance, "_validates_untrained", False))

    @property
    def file_in_the_way(self) -> str | None:
        """The file that stands where `modelDir` or a folder above it should."""
        wanted = PurePath(self["modelDir"])
        return next((str(path) for path in (wanted, *wanted.parents) if os.path.isfile(path)), None)

    @property
    def strategy(self) -> Kind:
        """What is known of the strategy."""
        return strategy_type(self["strategy"])

    @cached_property
    def makes_validation(self) -> bool:
        """Whether the strategy chooses the validation rows."""
        strategy, options = strategy_for(self["strategy"], self["strategyParams"])
        return strategy.makes_validation(options)

    @property
    def validated(self) -> bool:
        """Whether there are validation rows, marked or chosen by the strategy."""
        return self["validationIndicatorCol"] is not None or self.makes_validation

    @property
    def workers(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        given, least = self["numWorkers"], self["minWorkers"]
        return given if isinstance(given, tuple) else (given if least is None else least, given)

    @property
    def sharing(self) -> int:
        """Number of workers that share a batch."""
        return 1 if self.strategy.own_batches else self.workers[1]

    @property
    def rows_are_divided_by(self) -> int:
        """Number of models that divide the rows among them: 1 unless each worker trains one on its share alone."""
        return self.workers[1] if self.strategy.own_batches and not self.makes_validation else 1

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers of the strategy take steps without waiting for each other."""
        strategy, options = strategy_for(self["strategy"], self["strategyParams"])
        return strategy.asynchronous(options)

    @property
    def share(self) -> float:
        """Rows of a worker in a batch."""
        return float(self["batchSize"] / self.sharing)

    @property
    def follows_loss(self) -> bool:
        """Whether the schedule looks at the loss of validation rows."""
        scheduler = self["scheduler"]
        if isinstance(scheduler, str) and ":" in scheduler:
            scheduler = load_object(scheduler)
        return bool(getattr(scheduler, "__name__", scheduler) == "ReduceLROnPlateau")


def not_set(name: str, hint: str) -> Refusal:
    """Returns the refusal of a Param without a value, or with an empty name of a column."""
    return Refusal(name, lambda p: p[name] is None or p[name] == "", f"{name} is not set", hint, "ST-NOT-SET")


DEVICE = Refusal(
    "device",
    lambda p: p["device"] not in ("auto", "cpu") and not is_kind(p["device"]),
    "device {p[device]!r} is unknown",
    "it is 'auto', 'cpu', or an accelerator's type without a number: 'cuda' (of NVIDIA's and AMD's GPUs), 'xpu' (of "
    "Intel's); which one a worker gets is for Spark to say",
    "ST-UNKNOWN-NAME",
)

JOB = (
    Refusal(
        "minWorkers",
        lambda p: p["minWorkers"] is not None and isinstance(p["numWorkers"], tuple),
        "minWorkers is {p[minWorkers]}, and numWorkers is {p[numWorkers]}, whose first number says the same",
        _ONE,
    ),
    Refusal(
        "numWorkers",
        lambda p: p.workers[0] > p.workers[1],
        "the fewest workers are {p.workers[0]}, more than the most, {p.workers[1]}",
        "numWorkers=(2, 4) are 2 to 4, and so are minWorkers=2 and numWorkers=4",
    ),
    DEVICE,
    Refusal(
        "batchSize",
        lambda p: 0 < p["batchSize"] < p.sharing,
        "batchSize is {p[batchSize]}, to be shared by {p.sharing} workers",
        "set it to numWorkers at least: it counts the rows of all workers together",
        "ST-BATCH-SIZE",
    ),
    Refusal(
        "accumulationSteps",
        lambda p: (p["accumulationSteps"] or 1) > 1 and p["accumulationSteps"] > p.share,
        "accumulationSteps is {p[accumulationSteps]}, and each of {p.sharing} workers has {p.share:.3g} rows "
        "of a batch",
        "set it to batchSize / numWorkers at most",
        "ST-BATCH-SIZE",
    ),
    Refusal(
        "split",
        lambda p: p["split"] == "keep" and p.makes_validation,
        "strategyParams.folds gives every worker all the rows, and split is 'keep'",
        _ONE,
    ),
    Refusal(
        "split",
        lambda p: p["split"] == "keep" and p.workers[0] < p.workers[1],
        "the number of workers may change, and split='keep' makes one of each partition",
        _ONE,
    ),
    Refusal(
        "memoryBudget",
        lambda p: p["storage"] == "memory" and p.is_set("memoryBudget"),
        "memoryBudget is set, and storage is 'memory', which takes what the rows need",
        "set storage='auto' or 'disk'",
    ),
)

MODULE = (
    not_set("module", "pass module=... to the constructor"),
    Refusal(
        "loss",
        lambda p: p["loss"] is None and not (p["trainingStep"] or p.brings_its_training or p.own_loss),
        "loss is not set",
        "pass loss=... to the constructor",
        "ST-NOT-SET",
    ),
    Refusal(
        "module",
        lambda p: isinstance(p["module"], torch.jit.ScriptModule | torch.export.ExportedProgram),
        "module is a program of TorchScript or torch.export, which cannot be sent to the workers to be trained",
        "pass the class that it was made of; to score with it as it is, there is fromModule of the models",
    ),
    Refusal(
        "module",
        lambda p: p.trained is not None and isinstance(p.trained.source, Program | Script),
        "the model to go on from was loaded from its graph, which is that of evaluation mode",
        "pass the module's class, and load the weights of model.module.state_dict() in it",
    ),
    Refusal(
        "moduleParams",
        lambda p: p.trained is not None and p["moduleParams"],
        "moduleParams are given, but module is a fitted model",
    ),
)

NAMED_GROUPS = (
    not_set("groupCol", "name the column that is the same in rows which are ordered together, such as that of a query"),
)

WHOLE_GROUPS = (
    Refusal(
        "groupCol",
        lambda p: p.brings_its_training or not (p["loss"] or p["trainingStep"]),
        "the module computes a loss of rows, and with groupCol samples are groups: pass a loss (output, label, sizes)",
    ),
    Refusal(
        "strategy",
        lambda p: p["strategy"] == "mesh",
        "strategy 'mesh' exchanges rows among workers, and groups stay whole; use 'zero3'",
    ),
)

FIT = (
    *(
        Refusal(
            name,
            lambda p, name=name, kind=kind: isinstance(p[name], kind),  # type: ignore[misc]
            f"{name} is an instance, which has the parameters of one module on the driver",
            f"pass its class, with {options}: each worker makes its own",
        )
        for name, kind, options in (
            ("optimizer", torch.optim.Optimizer, "learningRate and optimizerParams"),
            ("scheduler", torch.optim.lr_scheduler.LRScheduler, "schedulerParams"),
        )
    ),
    Refusal(
        "epochs",
        lambda p: p["epochs"] < 1,
        "epochs must be at least 1, got {p[epochs]}",
        "a module that was trained elsewhere scores without a fit: see fromModule of the models",
        "ST-VALUE",
    ),
    Refusal(
        "trainingStep",
        lambda p: p["trainingStep"] is not None and (p.is_set("loss") or p["lossParams"]),
        "trainingStep computes the loss, and loss or lossParams are set",
        "set one of them",
    ),
    Refusal(
        "schedulerParams",
        lambda p: p["scheduler"] is None and p["schedulerParams"],
        "schedulerParams are given, but no scheduler",
    ),
    Refusal(
        "schedulerInterval",
        lambda p: p.follows_loss and p["schedulerInterval"] == "step",
        "ReduceLROnPlateau looks at the loss of an epoch, and schedulerInterval is 'step'",
        "set schedulerInterval='epoch'",
    ),
    *(
        Refusal(
            name,
            lambda p, when=when: when(p) and not p.validated,  # type: ignore[misc]
            f"{what.format(name)} of validation rows, and there are none",
            "mark some with validationIndicatorCol; estimators for one task hold some out with validationFraction",
            "ST-NO-VALIDATION",
        )
        for name, when, what in (
            ("scheduler", lambda p: p.follows_loss, "ReduceLROnPlateau looks at the loss"),
            ("earlyStoppingPatience", lambda p: p["earlyStoppingPatience"] is not None, "{} looks at a metric"),
            ("earlyStoppingMetric", lambda p: p["earlyStoppingMetric"] != "val_loss", "{} looks at a metric"),
            ("metrics", lambda p: p["metrics"], "metrics are those"),
        )
    ),
    Refusal(
        "validationIndicatorCol",
        lambda p: p.makes_validation and p["validationIndicatorCol"] is not None,
        "strategyParams.folds makes the validation rows, and validationIndicatorCol names some",
        _ONE,
    ),
    Refusal(
        "optimizerParams", lambda p: "lr" in p["optimizerParams"], "optimizerParams holds 'lr'", "set learningRate"
    ),
)

SCORING = (
    DEVICE,
    Refusal(
        "thresholds",
        lambda p: p["thresholds"] and (min(p["thresholds"]) < 0 or p["thresholds"].count(0) > 1),
        "thresholds are {p[thresholds]}",
        "each must be > 0, but for one at most, which may be 0",
    ),
)

COLUMNS = (
    Refusal(
        "fillValue",
        lambda p: p.is_set("fillValue") and p["nullPolicy"] != "fill",
        "fillValue is set, and nullPolicy is {p[nullPolicy]!r}",
        "set nullPolicy='fill'",
    ),
    *(
        Refusal(
            name,
            lambda p, name=name, other=other: p[name] is not None and p.is_set(other),  # type: ignore[misc]
            f"{other} and {name} are both set",
            "set one of them",
        )
        for name, other in (("inputCols", "featuresCol"), ("labelCols", "labelCol"))
    ),
    Refusal("inputCols", lambda p: p["inputCols"] == [], "inputCols is empty", code="ST-NOT-SET"),
    Refusal(
        "labelCols",
        lambda p: p["labelCols"] == [],
        "labelCols is empty",
        "for no label at all, set labelCol=''",
        "ST-NOT-SET",
    ),
)

RESTARTS = (
    Refusal(
        "checkpointDir",
        lambda p: p["checkpointDir"] is not None and not p.strategy.resumable,
        "checkpointDir is set, and strategy {p[strategy]!r} has state in its workers that no checkpoint holds",
        "use {p.resumable}, or leave checkpointDir out",
        "ST-STRATEGY",
    ),
    Refusal(
        "numWorkers",
        lambda p: p.workers[0] < p.workers[1] and not p.strategy.resumable,
        "numWorkers is from {p.workers[0]} to {p.workers[1]}, and under strategy {p[strategy]!r} another number of "
        "workers trains something else",
        "use {p.resumable}, or set numWorkers to one number, without minWorkers",
        "ST-STRATEGY",
    ),
)

MODEL_FOLDER = (
    Refusal(
        "modelDir",
        lambda p: not os.path.isabs(p["modelDir"]),
        "modelDir {p[modelDir]!r} is a URL or a relative path, and the files of a model are mapped into memory",
        "name a folder, from '/' on, on a file system that is mounted on all hosts",
        "ST-MODEL-DIR",
    ),
    Refusal(
        "modelDir",
        lambda p: p.file_in_the_way,
        "modelDir {p[modelDir]!r} cannot be a folder: {p.file_in_the_way!r} is a file",
        "name another folder, on a file system that is mounted under the same path on all hosts",
        "ST-MODEL-DIR",
    ),
    Refusal(
        "module",
        lambda p: p.brings_its_training,
        "modelDir is set, and module is a LightningModule, whose steps may take parameters apart",
        "pass its network as module, with a loss, or leave modelDir out",
        "ST-MODEL-DIR",
    ),
    Refusal(
        "module",
        lambda p: isinstance(p.source, nn.Module),
        "modelDir is set, and module is an instance, which this process holds already",
        "pass a class or function that makes the module, and its arguments as moduleParams",
        "ST-MODEL-DIR",
    ),
)
