"""What the first row tells before the job: the dry run, on the driver or in one rank, and the plan of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pyspark.sql import DataFrame

from sparktorch.base.batch import Batch
from sparktorch.base.config import Task, above
from sparktorch.data.convert.checks import RowFilter
from sparktorch.data.dataset.rows import windowed
from sparktorch.data.fields.base import Dense, Field
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.preprocess import Preprocess, StepContext
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ModuleError, refusing
from sparktorch.ml.fit.checks import check_layers, check_thresholds, naming_params
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.spark.checks.preflight import check_result_size
from sparktorch.spark.frame.prepare import Frame, prepare
from sparktorch.spark.launch.gpus import has_gpus
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.train.plan.memory import plan
from sparktorch.train.plan.table import Plan
from sparktorch.train.recipe.dry_run import DryRunResult, complete, dry_run
from sparktorch.train.strategies.registry import check_device, check_module
from sparktorch.worker import TrainJob, try_in_rank

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Ready", "as_planned", "first_inputs", "plan_of", "try_out"]

E = TypeVar("E", bound=EstimatorParams)

# What a training needs: the request, complete but for what ranks find out; the rows; and the result of the dry run.
Ready = tuple[Request[TrainJob], DataFrame, DryRunResult]


def try_out(
    estimator: EstimatorParams, request: Request[TrainJob], frame: Frame, in_worker: Callable[..., Results]
) -> Ready:
    """Runs module and loss on the first row, and the checks that need the result.

    `in_worker` runs a body in a worker, if the request asks for it; see `one_rank`.
    """
    config, recipe = request.job.config, request.job.recipe
    frame, run = _trial(frame, request)
    run = partial(run, clips=config.clip_norm is not None or config.clip_value is not None)
    run = partial(run, check=partial(check_module, config, recipe, request.launch.world_size))
    if config.model_folder and request.dry_run == "driver":
        run = partial(run, values=False)
    if request.dry_run == "driver":
        trial = _on_driver(frame, request, run)
    else:  # A worker tries the module on the device that a rank will have.
        trial = DryRunResult.unpacked(*in_worker(partial(try_in_rank, run=run, config=config))[0])
    config.check_classes(trial.classes)
    trial = complete(trial, recipe.metrics, config.task)
    request = request.with_job(
        columns=replace(frame.columns, classes=trial.classes, ignored=trial.ignored),
        recipe=replace(recipe, metrics=trial.metrics),
        config=replace(config, unused_parameters=trial.unused_parameters),
        placeholder=frame.sample,
    )
    if config.model_folder is None:
        check_result_size(frame.data.sparkSession, trial.state_bytes)
    check_thresholds(estimator, trial.classes)
    check_layers(estimator.getOutputLayers(), trial.layers)
    return request, frame.data, trial


def plan_of(estimator: EstimatorParams, task: Task, dataset: DataFrame, memory: float | None) -> Plan:
    """Returns the plan of an estimator's training; see `TorchEstimatorBase.plan`."""
    if memory is not None:
        above("memory", memory, 0)
    estimator = as_planned(estimator)
    request = translate(estimator, task)
    config, recipe = request.job.config, request.job.recipe
    if request.launch.device == "cpu":  # Under "auto", the plan may be for other machines.
        check_device(config, "cpu")
    with naming_params(estimator):
        _, run = _trial(prepare(dataset, task, **request.columns), request)
    try:
        trial = run(values=False)
    except Exception:  # Without values, torch may lack a shape, as in `plan`; and with values, errors have hints.
        trial = run()
    samples, label = run.keywords, run.keywords["label"]
    if label is not None and trial.classes is not None:
        label = torch.zeros_like(label, dtype=torch.int64)
    weight = torch.ones(2) if samples["weighted"] else None
    sizes = torch.ones(2, dtype=torch.int64) if samples["grouped"] else None
    batch = Batch(tuple(samples["inputs"].values()), label, weight, 2, weight, names=samples["names"], sizes=sizes)
    most = None if memory is None else int(memory * 10**6)
    return plan(recipe, config, Values(estimator).workers[1], batch, memory=most)


def as_planned(estimator: E) -> E:
    """Returns the estimator, with a strategy that takes `modelDir` if it has none, which a plan is asked for."""
    if estimator.isSet("modelDir") and not estimator.isSet("strategy"):
        return estimator.copy({estimator.getParam("strategy"): "zero3"})
    return estimator


def first_inputs(frame: Frame) -> tuple[Frame, dict[str, torch.Tensor]]:
    """Checks the first row, and makes its inputs.

    Returns the frame with the tensor names of `preprocess`, and two rows of each tensor by a name for messages.
    """
    screen = RowFilter(replace(frame.columns, drop_nulls=False))
    screen.rows_of(frame.sample, first_row=0)
    screen.raise_for_unfit_rows(only_first_row=True)
    preprocess = frame.columns.preprocess
    columns = [
        _twice(kind_of(spec).field(spec, RowStorage()), frame.sample.column(spec.name)) for spec in frame.columns.inputs
    ]
    inputs: dict[str, torch.Tensor] = {}
    if preprocess is not None:
        tensors = _preprocessed(preprocess, columns)
        inputs = {f"preprocess, {name!r}": tensor for name, tensor in tensors.items()}
        preprocess = replace(preprocess, arguments=tuple(tensors))
        return replace(frame, columns=replace(frame.columns, preprocess=preprocess)), inputs
    for spec, parts in zip(frame.columns.inputs, columns, strict=True):
        title = f"column {spec.column!r}"
        if title in inputs:  # The same column is an input once more.
            title = f"input {spec.name[1:]}, {title}"
        # A padded column has a second tensor, which tells where it has elements.
        inputs |= dict(zip((title, f"where {title} has elements"), parts, strict=False))
    return frame, inputs


def _trial(frame: Frame, request: Request[TrainJob]) -> tuple[Frame, partial[DryRunResult]]:
    """Returns the frame as `first_inputs` does, and the dry run on two samples."""
    frame, inputs = first_inputs(frame)
    inputs, label = _sampled(frame, inputs)
    config, columns = request.job.config, frame.columns
    grouped = columns.groups is not None and columns.groups.window is None  # Each sample is the first row.
    weighted = columns.weight is not None or config.class_weights is not None
    run = partial(dry_run, request.job.recipe, config.task, config.seed, inputs=inputs, label=label)
    return frame, partial(run, names=columns.arguments, weighted=weighted, grouped=grouped)


def _sampled(frame: Frame, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Returns inputs and label of two samples, which are the first row; windows are made of it."""
    spec, groups, label = frame.columns.label, frame.columns.groups, None
    if spec is not None:
        (label,) = _twice(Dense(spec, RowStorage()), frame.sample.column(spec.name))
    if groups is None or groups.window is None:
        return inputs, label
    rows = groups.window.rows
    columns = [tensor.repeat_interleave(rows, 0) for tensor in inputs.values()]
    windows, label = windowed(groups.window, columns, None if label is None else label.repeat_interleave(rows, 0))
    return dict(zip(inputs, windows, strict=True)), label


def _on_driver(frame: Frame, request: Request[TrainJob], run: partial[DryRunResult]) -> DryRunResult:
    try:
        return run()
    except ModuleError as error:
        if not has_gpus(frame.data.sparkSession, request.launch.device):
            raise
        other_way = "dryRun='worker' tries the module on a worker's device, and not on the driver's CPU"
        raise ModuleError(error.what, hint=f"{error.hint}\n     {other_way}", code=error.code, **error.where) from error


def _twice(field: Field, column: pa.Array) -> tuple[Any, ...]:
    """Returns the tensors of the first row, repeated to two rows, so that each shape has a row dimension."""
    field.append(column)
    field.finish()
    return field.take(torch.zeros(2, dtype=torch.int64))


def _preprocessed(preprocess: Preprocess, columns: list[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    """Calls `preprocess` on the first row, as in scoring and then as in training; returns the latter's tensors.

    A `ModuleError` says that it returns other tensors in training than in scoring.
    """
    kinds = []
    for name, column in zip(preprocess.names, columns, strict=True):
        kinds.append(f"{name!r}: {' and '.join(type(part).__name__ for part in column)}")
    hint = f"the columns arrive as {', '.join(kinds)}"
    with refusing("preprocess failed on the first row", hint, param="preprocess", code="ST-PREPROCESS"):
        return replace(preprocess, arguments=tuple(preprocess(columns, 2)))(columns, 2, StepContext(0, 0))
