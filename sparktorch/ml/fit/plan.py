"""The plan of a training: what each strategy takes of a worker, from the first row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from sparktorch.base.batch import Batch
from sparktorch.base.config import Task, above
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.first_row_trial import first_inputs, first_label
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.params.mixins import EstimatorParams
from sparktorch.spark.frame.prepare import prepare
from sparktorch.train.needs import Plan
from sparktorch.train.plan import plan
from sparktorch.train.recipe.dry_run import dry_run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["plan_of"]


def plan_of(
    estimator: EstimatorParams,
    task: Task,
    dataset: DataFrame,
    memory: float | None,
    speed: float | None,
    bandwidth: float | None,
) -> Plan:
    """Returns the plan of an estimator's training; see `TorchEstimatorBase.plan`."""
    for name, value in (("memory", memory), ("speed", speed), ("bandwidth", bandwidth)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{name} is {value!r}, and must be a number", param=name)
        if value is not None:
            above(name, value, 0)
    if (speed is None) != (bandwidth is None):
        raise ConfigError(
            f"{'bandwidth' if speed is None else 'speed'} is given without {'speed' if speed is None else 'bandwidth'}",
            hint="give both, for the time of a step, or neither",
        )
    request = translate(estimator, task)
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
        memory=None if memory is None else int(memory * 10**6),
        speed=None if speed is None else speed * 10**9,
        bandwidth=None if bandwidth is None else bandwidth * 10**6,
    )
