"""The plan of a training: what each strategy takes of a worker, from the first row."""

from __future__ import annotations

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
from sparktorch.train.plan.memory import Plan, plan
from sparktorch.train.recipe.dry_run import dry_run
from sparktorch.train.strategies.registry import check_device

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["plan_of"]


def plan_of(estimator: EstimatorParams, task: Task, dataset: DataFrame, memory: float | None) -> Plan:
    """Returns the plan of an estimator's training; see `TorchEstimatorBase.plan`."""
    if memory is not None:
        if not isinstance(memory, Real):
            hint = "of MB, such as 8000 for 8 GB"
            raise ConfigError(f"memory is {memory!r}, and must be a number", hint=hint, param="memory")
        above("memory", float(memory), 0)
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
    most = None if memory is None else int(float(memory) * 10**6)
    return plan(request.recipe, config, estimator.getNumWorkers(), batch, memory=most)
