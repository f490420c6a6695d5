"""The plan of a training: what each strategy takes of a worker, from the first row."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING

import torch

from sparktorch.base.batch import Batch
from sparktorch.base.config import Task, above
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.first_row_trial import first_inputs, first_label
from sparktorch.ml.fit.inputs import naming_params
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.spark.frame.prepare import prepare
from sparktorch.train.needs import Plan
from sparktorch.train.plan import plan
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.strategies.registry import check_device

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["check_figures", "plan_of"]


_UNITS = {
    "memory": "MB, such as 8000 for 8 GB",
    "speed": "billions of operations a second, such as 100_000 for 100 TFLOPS",
    "bandwidth": "MB a second, such as 20_000 for 20 GB/s",
}


def check_figures(memory: float | None, speed: float | None, bandwidth: float | None) -> None:
    """Checks what a user says of a worker.

    Raises:
        ConfigError: A figure is no positive number, or only one of `speed` and `bandwidth` is given.
    """
    for name, value in (("memory", memory), ("speed", speed), ("bandwidth", bandwidth)):
        if value is not None and not _is_figure(value):
            raise ConfigError(f"{name} is {value!r}, and must be a number", hint=f"of {_UNITS[name]}", param=name)
        if value is not None:
            above(name, value, 0)
    if (speed is None) != (bandwidth is None):
        raise ConfigError(
            f"{'bandwidth' if speed is None else 'speed'} is given without {'speed' if speed is None else 'bandwidth'}",
            hint="give both, for the time of a step, or neither",
        )


def _is_figure(value: object) -> bool:
    """Whether a value is a number, of NumPy or not, that is finite in the units of the plan."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value) * 10**9)
    except OverflowError:  # of an int
        return False


def plan_of(
    estimator: EstimatorParams,
    task: Task,
    dataset: DataFrame,
    memory: float | None,
    speed: float | None,
    bandwidth: float | None,
) -> Plan:
    """Returns the plan of an estimator's training; see `TorchEstimatorBase.plan`."""
    check_figures(memory, speed, bandwidth)
    if estimator.isSet("modelDir") and not estimator.isSet("strategy"):  # which a plan is asked for
        estimator = estimator.copy({estimator.getParam("strategy"): "zero3"})
    request = translate(estimator, task)
    if request.launch.device == "cpu":  # under "auto", the plan may be for other machines
        check_device(request.config, "cpu")
    with naming_params(estimator):
        frame, inputs = first_inputs(prepare(dataset, task, **request.columns))
    label = first_label(frame)
    weighted = frame.columns.weight is not None or request.config.class_weights is not None
    weight, names, config = torch.ones(2) if weighted else None, frame.columns.arguments, request.config
    run = partial(dry_run, request.recipe, task, config.seed, inputs, label, names=names, weighted=weighted)
    try:
        trial = run(values=False)
    except Exception:  # as in `plan`; with values, the error has hints
        trial = run()
    if label is not None and trial.classes is not None:
        label = torch.zeros_like(label, dtype=torch.int64)
    batch = Batch(tuple(inputs.values()), label, weight, 2, weight, names=names)
    return plan(
        request.recipe,
        config,
        estimator.getNumWorkers(),
        batch,
        memory=None if memory is None else int(float(memory) * 10**6),
        speed=None if speed is None else float(speed) * 10**9,
        bandwidth=None if bandwidth is None else float(bandwidth) * 10**6,
    )
