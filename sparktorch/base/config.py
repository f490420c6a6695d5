"""Configuration as frozen dataclasses that check their values on creation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, TypeVar

from sparktorch.base.metric_names import best_by_name
from sparktorch.errors import ConfigError, ConflictError, nearest

__all__ = [
    "INITIAL_WEIGHTS",
    "CheckpointConfig",
    "Device",
    "Invalid",
    "Precision",
    "StorageConfig",
    "Task",
    "TrainConfig",
    "from_dict",
    "one_of",
]

Task = Literal["classification", "regression", "generic"]
Device = str  # It is "auto", "cpu", or a type of accelerator, such as "cuda".
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Invalid = Literal["error", "keep", "skip"]

# `CheckpointConfig.job` names the initial weights by this key. A training that resumes may be given other initial
# weights, because it goes on from the weights in its checkpoint.
INITIAL_WEIGHTS = "initialWeights"

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_TASKS = ("classification", "regression", "generic")

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of the training loop, besides the recipe and the data; each value is checked.

    The Params of the same names say what the fields mean (docs/params.md). The other fields are:

    Attributes:
        shuffle_block: Number of rows in a shuffled block. They are adjacent in key order, and each epoch trains them
            within as many steps; 1 shuffles single rows.
        clip_norm: Largest norm of the gradient of all parameters; a larger gradient is scaled down.
        clip_value: Largest absolute value of a gradient's element; larger elements are clipped.
        patience: Number of validations in a row that are no better than the best one, after which training ends with
            the weights of the best validation; `None` trains all epochs and keeps the last weights.
        validates_untrained: Whether the first validation is before the first step: the weights from before training are
            then the best weights until a validation is better.
        best_metric: The metric by which one validation is better than another.
        best_mode: Whether the smallest value of the metric is the best ("min") or the largest ("max").
        best_delta: By how much the metric of a better validation must at least be better.
        class_weights: Factors of the row weights, one per class, or "balanced"; `None` for no factors.
        unused_parameters: Whether some parameters may get no gradient in a step. The ranks then search for them after
            each forward pass, which costs time.
        model_folder: An absolute path, under which the ranks write the model, and none of them ever holds all of it;
            `None` to return the model.
    """

    task: Task = "generic"
    batch_size: int = 256
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    shuffle_block: int = 1
    strategy: str = "ddp"
    strategy_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accumulation_steps: int = 1
    micro_batch_size: int | Literal["auto"] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: Precision = "fp32"
    schedule_interval: Literal["step", "epoch"] = "epoch"
    warmup_steps: int | None = None
    reference_batch_size: int | None = None
    validation_interval: int = 1
    validation_unit: Literal["epoch", "step"] = "epoch"
    validation_batch_size: int | None = None
    patience: int | None = None
    validates_untrained: bool = False
    best_metric: str = "val_loss"
    best_mode: Literal["auto", "min", "max"] = "auto"
    best_delta: float = 0.0
    max_minutes: float | None = None
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    ema_decay: float | None = None
    non_finite: Literal["error", "skip"] = "error"
    deterministic: bool = False
    compile: bool = False
    channels_last: bool = False
    sync_batch_norm: bool = False
    unused_parameters: bool = False
    model_folder: str | None = None

    def __post_init__(self) -> None:
        one_of("task", self.task, _TASKS)
        one_of("precision", self.precision, _PRECISIONS)
        one_of("schedulerInterval", self.schedule_interval, ("step", "epoch"))
        one_of("validationUnit", self.validation_unit, ("epoch", "step"))
        one_of("nonFiniteLoss", self.non_finite, ("error", "skip"))
        one_of("earlyStoppingMode", self.best_mode, ("auto", "min", "max"))
        for name, value, least in (
            ("batchSize", self.batch_size, 1),
            ("epochs", self.epochs, 1),
            ("shuffleBlock", self.shuffle_block, 1),
            ("earlyStoppingMinDelta", self.best_delta, 0),
            ("accumulationSteps", self.accumulation_steps, 1),
            ("validationInterval", self.validation_interval, 1),
            ("warmupSteps", self.warmup_steps, 0),
            ("validationBatchSize", self.validation_batch_size, 1),
            ("earlyStoppingPatience", self.patience, 1),
            ("referenceBatchSize", self.reference_batch_size, 1),
        ):
            if value is not None:
                at_least(name, value, least)
        if self.micro_batch_size is not None:
            rows_or_auto("microBatchSize", self.micro_batch_size)
        for name, bound in (
            ("gradientClipNorm", self.clip_norm),
            ("gradientClipValue", self.clip_value),
            ("maxMinutes", self.max_minutes),
        ):
            if bound is not None:
                above(name, bound, 0)
        self._check_class_weights()
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"emaDecay must be at least 0 and less than 1, got {self.ema_decay}", param="emaDecay", code="ST-VALUE"
            )
        self._check_micro_batches()

    def _check_class_weights(self) -> None:
        """Refuses class weights that are negative or all zero, and class weights where there are no classes."""
        if isinstance(self.class_weights, tuple):
            for weight in self.class_weights:
                at_least("classWeights", float(weight), 0)
        if self.class_weights is not None and self.task != "classification":
            raise ConflictError("classWeights are given, but the labels are no classes", param="classWeights")
        if self.class_weights is not None and not any(self.class_weights):
            raise ConfigError(
                "classWeights are all zero", hint="give some class a weight", param="classWeights", code="ST-VALUE"
            )

    def _check_micro_batches(self) -> None:
        """Refuses micro-batches whose number is set twice, and micro-batches where statistics need all rows at once."""
        if self.sync_batch_norm and (self.micro_batch_size is not None or self.accumulation_steps != 1):
            raise ConflictError(
                "syncBatchNorm takes the rows of all workers together, and micro-batches keep them apart",
                hint="leave out accumulationSteps and microBatchSize, or syncBatchNorm",
                param="syncBatchNorm",
            )
        if self.micro_batch_size is not None and self.accumulation_steps != 1:
            raise ConflictError(
                "accumulationSteps and microBatchSize are both set", hint="set one of them", param="microBatchSize"
            )

    @property
    def needs_metric(self) -> str | None:
        """The metric that every validation must have; `None` if none is needed."""
        is_asked_for = self.patience is not None or self.best_metric != "val_loss"
        return self.best_metric if is_asked_for else None

    def judged(self, metrics: Mapping[str, Any]) -> float | None:
        """Returns the best metric of a validation, negated if larger is better; `None` if the validation lacks it."""
        if self.best_metric not in metrics:
            return None
        value = float(metrics[self.best_metric])
        return value if self.mode() == "min" else -value

    def mode(self) -> Literal["min", "max"]:
        """Returns whether the smallest value of the best metric is the best; refuses a name that does not say."""
        mode = best_by_name(self.best_metric) if self.best_mode == "auto" else self.best_mode
        if mode is None:
            raise ConfigError(
                f"earlyStoppingMode is 'auto', and {self.best_metric!r} does not say whether smaller values are better",
                hint="set earlyStoppingMode='min' or 'max'",
                param="earlyStoppingMode",
                code="ST-METRIC",
            )
        return mode

    def check_classes(self, classes: int | None) -> None:
        """Refuses class weights unless there is one for each of the `classes` of the module's output.

        `classes` is `None` if labels are not classes.
        """
        weights = self.class_weights
        if weights is not None and weights != "balanced" and len(weights) != classes:
            raise ConfigError(
                f"classWeights holds {len(weights)} weights, and the module tells {classes} classes apart",
                hint="give one weight for each class, in the order of the labels",
                param="classWeights",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and how often checkpoints are saved; each value is checked.

    Attributes:
        directory: A path or URL that every rank can write, on any file system that fsspec supports.
        interval: Number of epochs or steps from one checkpoint to the next.
        unit: Whether `interval` counts epochs or steps.
        keep: Number of latest checkpoints to keep; the checkpoint of the best validation is kept in addition.
        owner: Identifies the fit; another fit cannot write into the directory at the same time.
        restart: Number of earlier starts of the fit.
        job: Settings that identify the training, by name; a training with other settings cannot resume from these
            checkpoints.
    """

    directory: str
    interval: int = 1
    unit: Literal["epoch", "step"] = "epoch"
    keep: int = 2
    owner: str = ""
    restart: int = 0
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("checkpointInterval", self.interval, 1)
        one_of("checkpointUnit", self.unit, ("epoch", "step"))
        at_least("keepCheckpoints", self.keep, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where a rank keeps its rows.

    Attributes:
        kind: "memory", "disk", or "auto", which is memory if all rows fit into the budget, and otherwise disk.
        budget: MB of memory for a rank's rows with "disk" and "auto".
    """

    kind: Literal["memory", "disk", "auto"] = "memory"
    budget: int = 1024

    def __post_init__(self) -> None:
        one_of("storage", self.kind, ("memory", "disk", "auto"))
        at_least("memoryBudget", self.budget, 1)


def at_least(param: str, value: float, least: float) -> None:
    """Refuses a number that is not finite, or not at least `least`."""
    if not (_is_finite(value) and value >= least):
        raise _out_of_range(param, value, f"at least {least}")


def rows_or_auto(param: str, value: int | str) -> None:
    """Refuses a number of rows that is neither at least 1 nor "auto"."""
    if not isinstance(value, str):
        at_least(param, value, 1)
    elif value != "auto":
        raise ConfigError(f"{param} is {value!r}", hint="set a number of rows, or 'auto'", param=param)


def above(param: str, value: float, bound: float) -> None:
    """Refuses a number that is not finite, or not above `bound`."""
    if not (_is_finite(value) and value > bound):
        raise _out_of_range(param, value, f"above {bound}")


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _out_of_range(param: str, value: object, bound: str) -> ConfigError:
    """Returns the refusal of a value that is no number within a bound."""
    kind = "" if isinstance(value, Real) else "a number "
    return ConfigError(f"{param} must be {kind}{bound}, got {value}", param=param, code="ST-VALUE")


def one_of(param: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuses an unknown name; the hint names the nearest valid one."""
    if value not in valid:
        raise ConfigError(
            f"{param} {value!r} is unknown", hint=nearest(str(value), valid), param=param, code="ST-UNKNOWN-NAME"
        )


def from_dict(kind: type[C], values: Mapping[str, Any], *, where: str = "") -> C:
    """Builds a configuration dataclass from a mapping, which `where` names as a section of a file.

    A `ConfigError` names an unknown key, with the nearest valid key, a missing key, or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in fields:
            raise ConfigError(
                f"unknown key {prefix}{name}",
                hint=nearest(str(name), fields),
                section=where or "top level",
                code="ST-UNKNOWN-NAME",
            )
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"missing key {prefix}{name}", section=where or "top level", code="ST-NOT-SET")
        if name in values:
            _check_type(f"{prefix}{name}", values[name], str(field.type))
    return kind(**values)


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "dict": (dict,),
    "list": (list,),
}


def _check_type(key: str, value: Any, annotation: str) -> None:
    """Checks a value against a plain annotation, such as `int` or `list[str] | None`; other annotations pass."""
    names = [name.strip() for name in annotation.split("|")]
    if value is None and "None" in names:
        return
    expected = [name for name in names if name != "None"]
    if not all(name.split("[")[0] in _PLAIN for name in expected):
        return
    for name in expected:
        base, _, inner = name.partition("[")
        is_bool_as_number = isinstance(value, bool) and base != "bool"
        if isinstance(value, _PLAIN[base]) and not is_bool_as_number:
            _check_elements(key, value, inner.removesuffix("]"))
            return
    hint = f"give its name, {value.__name__!r}" if isinstance(value, type) and "str" in expected else ""
    raise ConfigError(
        f"{key} must be {annotation}, got {value!r} ({type(value).__name__})", hint=hint, key=key, code="ST-VALUE"
    )


def _check_elements(key: str, value: Any, annotations: str) -> None:
    """Checks the elements of a list or dict against the annotations between the brackets of its annotation."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            _check_type(f"{key}[{number}]", item, annotations)
    elif isinstance(value, dict):
        key_annotation, _, value_annotation = annotations.partition(",")
        for name, item in value.items():
            _check_type(f"{key}.keys()", name, key_annotation)
            _check_type(f"{key}[{name!r}]", item, value_annotation.strip())
