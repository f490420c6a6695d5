"""The Params of each class, from the tables of subjects; those of a task are in its folder, made of what is here."""

from __future__ import annotations

from sparktorch.ml.params import tables as t
from sparktorch.ml.params.declare import changed, only, without

__all__ = [
    "AFTER_LOSS",
    "BEFORE_LABELS",
    "BEFORE_LOSS",
    "CLASSIFICATION_MODEL",
    "CLASSIFIER",
    "ESTIMATOR",
    "GENERIC",
    "GENERIC_MODEL",
    "MODEL",
    "REGRESSION_MODEL",
    "REGRESSOR",
    "RUN",
]


# Tables stand in the order of the constructors' arguments.
BEFORE_LABELS = (*t.MODULE, *t.COLUMNS, *t.INPUTS, *t.LABEL)
BEFORE_LOSS = (*t.PREDICTION, *t.WEIGHT, *t.ROWS)
AFTER_LOSS = (
    *(*t.OPTIMIZER, *t.STEPS, *t.NUMERICS, *t.EPOCHS, *t.STORAGE, *t.SAMPLING, *t.STRATEGY, *t.DEVICE, *t.LAUNCH),
    *(*t.RESULT, *t.CHECKPOINTS, *t.PATIENCE, *t.SCORING, *t.TRACKING),
)

ESTIMATOR = (*BEFORE_LABELS, *BEFORE_LOSS, *t.LOSS, *AFTER_LOSS)
GENERIC = (
    *(*BEFORE_LABELS, *t.LABELS, *t.PREDICTION, *t.OUTPUTS, *t.WEIGHT, *t.ROWS, *t.GROUPS),
    *(*t.LOSS, *AFTER_LOSS),
)
REGRESSOR = (*BEFORE_LABELS, *t.LABELS, *BEFORE_LOSS, *changed(t.LOSS, "loss", default="MSELoss"), *AFTER_LOSS)
CLASSIFIER = (
    *(*BEFORE_LABELS, *t.PREDICTION, *t.CLASSIFIED, *t.WEIGHT, *t.ROWS),
    *(*changed(t.LOSS, "loss", default="CrossEntropyLoss"), *t.CLASS_WEIGHTS, *AFTER_LOSS),
)

_UNLABELLED = "the label column; by default there is none"
# The function that `run` calls has a loop of its own, so the Params of training are left out.
RUN = (
    *(*t.COLUMNS, *t.INPUTS, *changed(t.LABEL, "labelCol", default="", doc=_UNLABELLED), *t.LABELS, *t.WEIGHT, *t.ROWS),
    *(*only(t.STEPS, "batchSize"), *only(t.EPOCHS, "epochs")),
    *(*t.STORAGE, *t.SAMPLING, *t.STRATEGY, *t.DEVICE, *without(t.LAUNCH, "dryRun")),
    *without(t.CHECKPOINTS, "checkpointInterval", "checkpointUnit"),
    *(*t.PATIENCE, *t.TRACKING),
)

MODEL = (*t.COLUMNS, *t.PREDICTION, *t.DEVICE, *t.SCORING)
GENERIC_MODEL = (*MODEL, *t.OUTPUTS)
_EVALUATED = changed(
    only(t.INPUTS, "nullPolicy"),
    "nullPolicy",
    doc="what evaluate does with rows whose label or weight is null or NaN: 'error' or 'drop' the row",
)
REGRESSION_MODEL = (*MODEL, *t.LABEL, *t.WEIGHT, *_EVALUATED)
CLASSIFICATION_MODEL = (*MODEL, *t.CLASSIFIED, *t.LABEL, *t.WEIGHT, *_EVALUATED)
