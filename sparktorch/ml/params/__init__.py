"""The Params of estimators and models, by subject. Camel case lives here and nowhere below.

Every Param has a setter and a getter that are written out, as in `pyspark.ml`: editors complete them, type checkers
and `help` know them, and each says in its own words what it takes.
"""

from __future__ import annotations

from typing import Any

from sparktorch.ml.params.inputs import INPUT_DEFAULTS, InputParams, LabelColumns
from sparktorch.ml.params.launch import LAUNCH_DEFAULTS, CheckpointParams, LaunchParams, TrackingParams
from sparktorch.ml.params.module import MODULE_DEFAULTS, ClassWeightParams, ModuleParams
from sparktorch.ml.params.numerics import NUMERICS_DEFAULTS, NumericsParams
from sparktorch.ml.params.scoring import SCORING_DEFAULTS, ClassifierColumns, OutputColumns, ScoringParams, TrueColumns
from sparktorch.ml.params.storage import STORAGE_DEFAULTS, StorageParams
from sparktorch.ml.params.training import TRAINING_DEFAULTS, TrainingParams
from sparktorch.ml.params.validation import VALIDATION_DEFAULTS, ValidationParams

__all__ = [
    "DEFAULTS",
    "SCORING_DEFAULTS",
    "CheckpointParams",
    "ClassWeightParams",
    "ClassifierColumns",
    "InputParams",
    "LabelColumns",
    "LaunchParams",
    "ModuleParams",
    "NumericsParams",
    "OutputColumns",
    "ScoringParams",
    "StorageParams",
    "TrackingParams",
    "TrainingParams",
    "TrueColumns",
    "ValidationParams",
]

# Of every estimator; the constructors repeat them where a reader looks for them.
DEFAULTS: dict[str, Any] = {
    **SCORING_DEFAULTS,
    **INPUT_DEFAULTS,
    **LAUNCH_DEFAULTS,
    **MODULE_DEFAULTS,
    **NUMERICS_DEFAULTS,
    **STORAGE_DEFAULTS,
    **TRAINING_DEFAULTS,
    **VALIDATION_DEFAULTS,
    "featuresCol": "features",
    "predictionCol": "prediction",
}
