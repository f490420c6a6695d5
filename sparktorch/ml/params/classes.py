"""The Params of each class, from the tables of subjects."""

from __future__ import annotations

from dataclasses import replace

from sparktorch.ml.params import tables as t
from sparktorch.ml.params import task_tables as tasks
from sparktorch.ml.params.declare import ParamSpec

__all__ = [
    "AUTOMATIC",
    *("CLASSIFICATION_MODEL", "CLASSIFIER", "ESTIMATOR", "FORECASTER", "FORECASTING_MODEL", "GENERIC"),
    *("GENERIC_MODEL", "IMAGE_CLASSIFIER", "IMAGE_MODEL", "MODEL", "RANKER", "RANKING_MODEL", "RECOMMENDER"),
    *("RECOMMENDER_MODEL", "REGRESSION_MODEL", "REGRESSOR", "RUN", "TABULAR_CLASSIFIER", "TABULAR_REGRESSOR"),
    *("TEXT_CLASSIFIER", "TEXT_MODEL"),
]


def _loss_with_default(default: str) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, default=default) if spec.name == "loss" else spec for spec in t.LOSS)


def _unlabelled(table: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, default="", doc="the label column; by default there is none") for spec in table)


# The Params that estimators for one task choose by the rows, as long as their value is "auto".
AUTOMATIC = (
    *("epochs", "batchSize", "learningRate", "scheduler"),
    *("earlyStoppingPatience", "validationInterval", "validationUnit"),
)
_OR_AUTO = {"int": "int | str", "float": "float | str"}


def _automatic(table: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    """Returns a table whose Params of `AUTOMATIC` are "auto" by default, and adds the Param of rows to hold out."""
    changed = []
    for spec in table:
        if spec.name in AUTOMATIC:
            kind, doc = _OR_AUTO.get(spec.type, spec.type), f"{spec.doc}; 'auto' chooses by the number of rows"
            spec = replace(spec, type=kind, default="auto", doc=doc)
        changed.append(spec)
        if spec.name == "validationIndicatorCol":
            changed += tasks.HELD_OUT
    return tuple(changed)


_BEFORE_LABELS = (*t.MODULE, *t.COLUMNS, *t.INPUTS, *t.LABEL)
_BEFORE_LOSS = (*t.PREDICTION, *t.WEIGHT, *t.ROWS)
_AFTER_LOSS = (
    *(*t.OPTIMIZER, *t.STEPS, *t.NUMERICS, *t.EPOCHS, *t.STORAGE, *t.SAMPLING, *t.STRATEGY, *t.DEVICE, *t.LAUNCH),
    *(*t.RESULT, *t.CHECKPOINTS, *t.PATIENCE, *t.SCORING, *t.TRACKING),
)

# Tables stand in the order of the constructors' arguments.
ESTIMATOR = (*_BEFORE_LABELS, *_BEFORE_LOSS, *t.LOSS, *_AFTER_LOSS)
GENERIC = (
    *(*_BEFORE_LABELS, *t.LABELS, *t.PREDICTION, *t.OUTPUTS, *t.WEIGHT, *t.ROWS, *t.GROUPS),
    *(*t.LOSS, *_AFTER_LOSS),
)
REGRESSOR = (*_BEFORE_LABELS, *t.LABELS, *_BEFORE_LOSS, *_loss_with_default("MSELoss"), *_AFTER_LOSS)
_GROUP = tuple(replace(spec, doc="the column that groups rows, such as a query") for spec in t.GROUPS[:1])
_RANKING = (
    "'listnet', 'ranknet' or 'lambdarank', or a callable (scores, labels, sizes) -> loss per group, or its import path"
)
RANKER = _automatic(
    (
        *(*_BEFORE_LABELS, *_GROUP, *_BEFORE_LOSS, *tasks.TABLE),
        *(replace(spec, doc=_RANKING) if spec.name == "loss" else spec for spec in _loss_with_default("listnet")),
        *_AFTER_LOSS,
    )
)
CLASSIFIER = (
    *(*_BEFORE_LABELS, *t.PREDICTION, *t.CLASSIFIED, *t.WEIGHT, *t.ROWS),
    *(*_loss_with_default("CrossEntropyLoss"), *t.CLASS_WEIGHTS, *_AFTER_LOSS),
)

_FROM_FOLDER = tuple(
    spec for spec in CLASSIFIER if spec not in (*t.MODULE, *t.COLUMNS, *t.INPUTS) or spec.name == "nullPolicy"
)
TEXT_CLASSIFIER = _automatic((*tasks.PRETRAINED, *tasks.TEXT, *_FROM_FOLDER))
_SHAPES = tuple(spec for spec in t.INPUTS if spec.name == "inputShapes")
IMAGE_CLASSIFIER = _automatic((*tasks.PRETRAINED, *tasks.IMAGE, *_SHAPES, *_FROM_FOLDER))


def _tabular(table: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
    unused = [spec for spec in (t.COLUMNS[0], *t.INPUTS) if spec.name != "nullPolicy"]
    return _automatic((*tasks.TABLE, *(spec for spec in table if spec not in unused)))


TABULAR_CLASSIFIER, TABULAR_REGRESSOR = _tabular(CLASSIFIER), _tabular(REGRESSOR)

RECOMMENDER = _automatic(
    (
        *(*tasks.PAIR, *tasks.RATING, *tasks.FACTORS, *tasks.COLD_START, t.MODULE[1], *t.PREDICTION, *t.ROWS),
        *(spec for spec in t.INPUTS if spec.name == "nullPolicy"),
        *(
            replace(spec, default="Adagrad") if spec.name == "optimizer" else spec
            for spec in _AFTER_LOSS
            if spec.name != "trainingStep"
        ),
    )
)

_ROW_PARAMS = ("nullPolicy", "validationIndicatorCol")
_SERIES_DOCS = {
    "groupCol": "the column that tells series apart; without it, all rows are one",
    "orderCol": "the column that orders the rows of a series in even steps: whole numbers, dates or timestamps",
}
_SERIES = (*(replace(spec, doc=_SERIES_DOCS[spec.name]) for spec in t.GROUPS), *tasks.SERIES)
FORECASTER = _automatic(
    (
        *(*_SERIES, *tasks.WINDOWS),
        *(
            *t.MODULE,
            *t.LABEL,
            *t.PREDICTION,
            *t.WEIGHT,
            *(spec for spec in (*t.INPUTS, *t.ROWS) if spec.name in _ROW_PARAMS),
        ),
        *(*_loss_with_default("L1Loss"), *_AFTER_LOSS),
    )
)

# The function that `run` calls has a loop of its own, so the Params of training are left out.
RUN = (
    *(*t.COLUMNS, *t.INPUTS, *_unlabelled(t.LABEL), *t.LABELS, *t.WEIGHT, *t.ROWS),
    *(spec for spec in (*t.STEPS, *t.EPOCHS) if spec.name in ("batchSize", "epochs")),
    *(*t.STORAGE, *t.SAMPLING, *t.STRATEGY, *t.DEVICE),
    *(spec for spec in t.LAUNCH if spec.name != "dryRun"),
    *(spec for spec in t.CHECKPOINTS if spec.name not in ("checkpointInterval", "checkpointUnit")),
    *(*t.PATIENCE, *t.TRACKING),
)

MODEL = (*t.COLUMNS, *t.PREDICTION, *t.DEVICE, *t.SCORING)
GENERIC_MODEL = (*MODEL, *t.OUTPUTS)
_EVALUATED = tuple(
    replace(spec, doc="what evaluate does with rows whose label or weight is null or NaN: 'error' or 'drop' the row")
    for spec in t.INPUTS
    if spec.name == "nullPolicy"
)
REGRESSION_MODEL = (*MODEL, *t.LABEL, *t.WEIGHT, *_EVALUATED)
RANKING_MODEL = (*REGRESSION_MODEL, *_GROUP)
CLASSIFICATION_MODEL = (*MODEL, *t.CLASSIFIED, *t.LABEL, *t.WEIGHT, *_EVALUATED)
TEXT_MODEL = (*CLASSIFICATION_MODEL, tasks.PRETRAINED[0], tasks.TEXT[0])
IMAGE_MODEL = (*CLASSIFICATION_MODEL, tasks.PRETRAINED[0], tasks.IMAGE[0])
RECOMMENDER_MODEL = (*MODEL, *tasks.PAIR, *tasks.COLD_START)
FORECASTING_MODEL = (*_SERIES, *MODEL, *t.LABEL)
