"""The Params of each class, from the tables of subjects."""

from __future__ import annotations

from dataclasses import replace

from sparktorch.ml.params.declare import ParamSpec
from sparktorch.ml.params.tables import (
    CHECKPOINTS,
    CLASS_WEIGHTS,
    CLASSIFIED,
    COLUMNS,
    DEVICE,
    EPOCHS,
    GROUPS,
    INPUTS,
    LABEL,
    LABELS,
    LAUNCH,
    LOSS,
    MODULE,
    NUMERICS,
    OPTIMIZER,
    OUTPUTS,
    PATIENCE,
    PREDICTION,
    RESULT,
    ROWS,
    SAMPLING,
    SCORING,
    STEPS,
    STORAGE,
    STRATEGY,
    TRACKING,
    WEIGHT,
)
from sparktorch.ml.params.task_tables import (
    COLD_START,
    FACTORS,
    IMAGE,
    PAIR,
    PRETRAINED,
    RATING,
    SERIES,
    TABLE,
    TEXT,
    WINDOWS,
)

__all__ = [
    *("CLASSIFICATION_MODEL", "CLASSIFIER", "ESTIMATOR", "FORECASTER", "FORECASTING_MODEL", "GENERIC"),
    *("GENERIC_MODEL", "IMAGE_CLASSIFIER", "IMAGE_MODEL", "MODEL", "RANKER", "RANKING_MODEL", "RECOMMENDER"),
    *("RECOMMENDER_MODEL", "REGRESSION_MODEL", "REGRESSOR", "RUN", "TABULAR_CLASSIFIER", "TABULAR_REGRESSOR"),
    *("TEXT_CLASSIFIER", "TEXT_MODEL"),
]


def _loss_of(default: str) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, default=default) if spec.name == "loss" else spec for spec in LOSS)


def _unlabelled(table: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, default="", doc="the label column; by default there is none") for spec in table)


_BEFORE_LABELS = (*MODULE, *COLUMNS, *INPUTS, *LABEL)
_BEFORE_LOSS = (*PREDICTION, *WEIGHT, *ROWS)
_AFTER_LOSS = (
    *(*OPTIMIZER, *STEPS, *NUMERICS, *EPOCHS, *STORAGE, *SAMPLING, *STRATEGY, *DEVICE, *LAUNCH),
    *(*RESULT, *CHECKPOINTS, *PATIENCE, *SCORING, *TRACKING),
)

# In the order of the constructors.
ESTIMATOR = (*_BEFORE_LABELS, *_BEFORE_LOSS, *LOSS, *_AFTER_LOSS)
GENERIC = (
    *(*_BEFORE_LABELS, *LABELS, *PREDICTION, *OUTPUTS, *WEIGHT, *ROWS, *GROUPS),
    *(*LOSS, *_AFTER_LOSS),
)
REGRESSOR = (*_BEFORE_LABELS, *LABELS, *_BEFORE_LOSS, *_loss_of("MSELoss"), *_AFTER_LOSS)
_GROUP = tuple(replace(spec, doc="the column that groups rows, such as a query") for spec in GROUPS[:1])
_RANKING = (
    "'listnet', 'ranknet' or 'lambdarank', or a callable (scores, labels, sizes) -> loss per group, or its import path"
)
RANKER = (
    *(*_BEFORE_LABELS, *_GROUP, *_BEFORE_LOSS),
    *(replace(spec, doc=_RANKING) if spec.name == "loss" else spec for spec in _loss_of("listnet")),
    *_AFTER_LOSS,
)
CLASSIFIER = (
    *(*_BEFORE_LABELS, *PREDICTION, *CLASSIFIED, *WEIGHT, *ROWS),
    *(*_loss_of("CrossEntropyLoss"), *CLASS_WEIGHTS, *_AFTER_LOSS),
)

_FROM_FOLDER = tuple(
    spec for spec in CLASSIFIER if spec not in (*MODULE, *COLUMNS, *INPUTS) or spec.name == "nullPolicy"
)
TEXT_CLASSIFIER = (*PRETRAINED, *TEXT, *_FROM_FOLDER)
IMAGE_CLASSIFIER = (*PRETRAINED, *IMAGE, *_FROM_FOLDER)


def _tabular(table: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    unused = [spec for spec in (COLUMNS[0], *INPUTS) if spec.name != "nullPolicy"]
    return (*TABLE, *(spec for spec in table if spec not in unused))


TABULAR_CLASSIFIER, TABULAR_REGRESSOR = _tabular(CLASSIFIER), _tabular(REGRESSOR)

_OTHERWISE = {"optimizer": "Adagrad", "learningRate": 0.1}
RECOMMENDER = (
    *(*PAIR, *RATING, *FACTORS, *COLD_START, MODULE[1], *PREDICTION, *ROWS),
    *(spec for spec in INPUTS if spec.name == "nullPolicy"),
    *(
        replace(spec, default=_OTHERWISE.get(spec.name, spec.default))
        for spec in _AFTER_LOSS
        if spec.name != "trainingStep"
    ),
)

_KEPT = ("nullPolicy", "validationIndicatorCol")
_OF_SERIES = {
    "groupCol": "the column that tells series apart; without it, all rows are one",
    "orderCol": "the column that orders the rows of a series in even steps: whole numbers, dates or timestamps",
}
_SERIES = (*(replace(spec, doc=_OF_SERIES[spec.name]) for spec in GROUPS), *SERIES)
FORECASTER = (
    *(*_SERIES, *WINDOWS),
    *(*MODULE, *LABEL, *PREDICTION, *WEIGHT, *(spec for spec in (*INPUTS, *ROWS) if spec.name in _KEPT)),
    *(*_loss_of("L1Loss"), *_AFTER_LOSS),
)

# Of `run`, whose function has a loop of its own.
RUN = (
    *(*COLUMNS, *INPUTS, *_unlabelled(LABEL), *LABELS, *WEIGHT, *ROWS),
    *(spec for spec in (*STEPS, *EPOCHS) if spec.name in ("batchSize", "epochs")),
    *(*STORAGE, *SAMPLING, *STRATEGY, *DEVICE),
    *(spec for spec in LAUNCH if spec.name != "dryRun"),
    *(spec for spec in CHECKPOINTS if spec.name not in ("checkpointInterval", "checkpointUnit")),
    *(*PATIENCE, *TRACKING),
)

MODEL = (*COLUMNS, *PREDICTION, *DEVICE, *SCORING)
GENERIC_MODEL = (*MODEL, *OUTPUTS)
REGRESSION_MODEL = (*MODEL, *LABEL, *WEIGHT)
RANKING_MODEL = (*REGRESSION_MODEL, *_GROUP)
CLASSIFICATION_MODEL = (*MODEL, *CLASSIFIED, *LABEL, *WEIGHT)
TEXT_MODEL = (*CLASSIFICATION_MODEL, PRETRAINED[0], TEXT[0])
IMAGE_MODEL = (*CLASSIFICATION_MODEL, PRETRAINED[0], IMAGE[0])
RECOMMENDER_MODEL = (*MODEL, *PAIR, *COLD_START)
FORECASTING_MODEL = (*_SERIES, *MODEL, *LABEL)
