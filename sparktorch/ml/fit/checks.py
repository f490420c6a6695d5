"""Checks of the Params, before any other step of a fit."""

from __future__ import annotations

import marshal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from pyspark import SparkContext, cloudpickle
from pyspark.ml.param import Params
from pyspark.sql import DataFrame
from torch import nn

from sparktorch.base.config import TrainConfig, above, at_least, one_of, rows_or_auto
from sparktorch.base.imports import import_path, load_object
from sparktorch.errors import ColumnError, ConfigError, ModuleError, nearest
from sparktorch.ml.fit import refusals
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.ml.scoring.output_fields import check_apart
from sparktorch.spark.column_names import ColumnNames
from sparktorch.train.callbacks import check_callback
from sparktorch.train.recipe.metrics import has_metric
from sparktorch.train.recipe.recipe import Recipe

__all__ = [
    "check_best_metric",
    "check_job",
    "check_layers",
    "check_new_columns",
    "check_outputs",
    "check_param_names",
    "check_params",
    "check_scoring",
    "check_ships",
    "check_thresholds",
    "check_version",
    "naming_params",
]

_INSTEAD = {"featuresCol": "inputCols", "labelCol": "labelCols"}  # The second Param takes the place of the first.
# The code of modules as of their first fit is here by application and module.
_first: dict[tuple[str, str], dict[str, bytes]] = {}
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
    refusals.check_module(p)
    check_version(p.source)
    if p.brings_its_training:
        check_brought(p)
    above("learningRate", p["learningRate"], 0)
    one_of("dryRun", p["dryRun"], ("driver", "worker"))
    check_job(p)
    check_scoring(p)
    refusals.check_instances(p)
    refusals.check_epochs(p)
    refusals.check_training_step(p)
    refusals.check_scheduler(p)
    refusals.check_validation(p)
    refusals.check_learning_rate(p)
    for callback in p["callbacks"]:
        check_callback(callback)
        hint = "it holds something that stays in this process (a lock, a file, a session): make that in on_fit_start"
        check_ships(callback, type(callback).__qualname__, param="callbacks", hint=hint)


def check_brought(p: Values) -> None:
    """Refuses Params of what a LightningModule brings, and those that would call its hooks twice."""
    for spec in p.specs:
        if spec.brought and p.is_set(spec.name):
            raise ConfigError(
                f"{spec.name} is set, and the module is a LightningModule, which brings its own",
                hint=f"leave it out: {spec.brought}",
                param=spec.name,
                code="ST-LIGHTNING",
            )
    if p["microBatchSize"] == "auto":
        raise ConfigError(
            "microBatchSize is 'auto', which may repeat a step, and with it the hooks of a LightningModule",
            hint="set microBatchSize to a number, or set accumulationSteps",
            param="microBatchSize",
            code="ST-LIGHTNING",
        )


def check_job(p: Values) -> None:
    """Checks the Params of a job: columns, workers, timeouts, batches and storage."""
    at_least("numWorkers", p.workers[0], 1)
    at_least("maxRestarts", p["maxRestarts"], 0)
    for name in ("startTimeout", "stallTimeout", "driverTimeout", "growAfter"):
        above(name, p[name], 0)
    for name, valid in _VALID.items():
        one_of(name, p[name], valid)
    refusals.check_number_of_workers(p)
    refusals.check_device(p)
    refusals.check_batches(p)
    refusals.check_split(p)
    refusals.check_memory_budget(p)
    refusals.check_columns(p)


def check_scoring(p: Values) -> None:
    """Checks the Params of scoring."""
    rows_or_auto("predictBatchSize", p["predictBatchSize"])
    one_of("handleInvalid", p["handleInvalid"], ("error", "keep", "skip"))
    one_of("predictPrecision", p["predictPrecision"], ("fp32", "bf16", "fp16"))
    refusals.check_device(p)
    refusals.check_signs_of_thresholds(p)
    refusals.check_columns(p)


def check_thresholds(instance: Params, classes: int | None) -> None:
    """Checks that `thresholds`, if set, has one value per class."""
    thresholds = Values(instance)["thresholds"]
    if None not in (classes, thresholds) and len(thresholds) != classes:
        raise ConfigError(
            f"thresholds has {len(thresholds)} values, and the model {classes} classes",
            hint="give one for each class",
            param="thresholds",
        )


def check_layers(output_layers: Mapping[str, str], layers: Sequence[str] | None) -> None:
    """Checks that a module has the layers of `outputLayers`; a graph has none, and `layers` is `None`."""
    name = next((name for name in output_layers.values() if name not in (layers or ())), None)
    if name is not None:
        what, hint = f"the module has no layer {name!r}", nearest(name, layers or ())
        if layers is None:
            what, hint = "a graph has no layers that outputLayers could name", "make the model of the module"
        raise ConfigError(what, hint=hint, param="outputLayers")


def check_new_columns(estimator: EstimatorParams, dataset: DataFrame, outputs: int) -> None:
    """Checks that the model will add columns that the DataFrame of the fit has not, each under a name of its own.

    `outputs` is the number of tensors that the module returns.
    """
    p = Values(estimator)
    names = p["outputCols"] or [p[name] for name in _OUTPUTS]
    if outputs > 1 and estimator.hasParam("outputCols") and not p["outputCols"]:  # The model asks for names.
        names = []
    check_outputs(ColumnNames.of(dataset), [name for name in (*names, *estimator.getOutputLayers()) if name])


def check_outputs(columns: ColumnNames, names: Sequence[str]) -> None:
    """Refuses output columns that the DataFrame has, and two that have the same name to Spark."""
    existing = [name for name in names if columns.called(name)]
    if existing:
        raise ColumnError(
            f"the DataFrame already has a column {existing[0]!r}",
            hint="drop it, or name the model's output columns otherwise",
            column=existing[0],
            code="ST-COLUMN-TAKEN",
        )
    check_apart(names, columns)


def check_param_names(instance: Params, names: Iterable[str]) -> None:
    """Refuses names that are not Params of the instance; the hint suggests the nearest Param."""
    valid = [param.name for param in instance.params]
    for name in names:
        if name not in valid:
            raise ConfigError(
                f"{type(instance).__name__} has no Param {name!r}",
                hint=nearest(name, valid),
                param=name,
                code="ST-UNKNOWN-NAME",
            )


def check_best_metric(config: TrainConfig, recipe: Recipe) -> None:
    """Checks that validations will have the metric of early stopping, as far as that is known, and its best value."""
    name = config.needs_metric
    measured = name in (None, "val_loss") or has_metric(name, config.task, recipe.metrics) or recipe.steps_itself
    has_metrics = recipe.training_step is not None and getattr(recipe.training_step, "has_metrics", True)
    if name and not measured and not (has_metrics and name.startswith("val_")):
        standard = ["val_loss", *(["val_accuracy"] if config.task == "classification" else [])]
        raise ConfigError(
            f"earlyStoppingMetric is {name!r}, which no validation of this fit has",
            hint=nearest(name, [*standard, *(f"val_{metric}" for metric in recipe.metrics)]),
            param="earlyStoppingMetric",
            code="ST-METRIC",
        )
    config.mode()


def check_ships(value: Any, name: str, *, param: str, hint: str) -> None:
    """Checks that a value can be sent to the ranks, with Spark's cloudpickle; the message gives `param` and `hint`."""
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]  # pyspark's is untyped
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be shipped to the ranks: {error}", hint=hint, param=param, code="ST-SHIP"
        ) from error


@contextmanager
def naming_params(instance: Any, *, fits: bool = True) -> Iterator[None]:
    """Context that adds, to an error about a column, the Param that names the column, if it is only one.

    With `fits`, columns besides the inputs are read, too.
    """
    try:
        yield
    except ColumnError as error:
        p = Values(instance)
        columns = {spec.name: p[spec.name] for spec in p.specs if spec.columns and p[spec.name] is not None}
        naming = [
            spec.name
            for spec in p.specs
            if spec.name in columns
            and (fits or spec.columns == "inputs")
            and _INSTEAD.get(spec.name) not in columns
            and error.where.get("column") in _listed(columns[spec.name])
        ]
        if len(naming) != 1:
            raise
        with_param = error.at(param=naming[0])
        if naming == ["featuresCol"] and not instance.isSet("featuresCol"):
            with_param.hint = f"{error.hint}; featuresCol is not set: inputCols names other columns".removeprefix("; ")
        raise with_param.with_traceback(error.__traceback__) from error.__cause__


def _listed(value: str | Sequence[str]) -> Sequence[str]:
    """Returns the columns that a Param names: one or several."""
    return [value] if isinstance(value, str) else value


def check_version(source: Any) -> None:
    """Refuses a class or function whose Python module was edited and imported again since its first fit."""
    try:
        factory = load_object(source) if isinstance(source, str) else source
    except ModuleError:  # It is a folder, or cannot be imported, which other checks say.
        return
    kind = type(factory) if isinstance(factory, nn.Module) else factory
    if import_path(kind) is None:  # Spark sends its code with each fit.
        return
    application = getattr(SparkContext._active_spark_context, "applicationId", "")
    code = _code_of(kind.__module__)
    first = _first.setdefault((application, kind.__module__), code)
    if any(first[name] != code[name] for name in first.keys() & code.keys()):
        raise ConfigError(
            f"Python module {kind.__module__!r} has other code than in an earlier fit, and Python workers keep what "
            "they have imported",
            hint="start the Spark session again; or, while you edit it, define the class in the notebook, whose code "
            "is sent with each fit",
            param="module",
            code="ST-CODE-CHANGED",
        )


def _code_of(module: str) -> dict[str, bytes]:
    """Returns the code of a module's functions and methods by name, without line numbers."""
    codes = {}
    for value in list(vars(sys.modules[module]).values()):
        if getattr(value, "__module__", None) != module:
            continue
        for part in list(vars(value).values()) if isinstance(value, type) else [value]:
            code = getattr(part, "__code__", None)
            if isinstance(code, CodeType):
                codes[part.__qualname__] = marshal.dumps(code.replace(co_firstlineno=1, co_linetable=b""), 2)
    return codes
