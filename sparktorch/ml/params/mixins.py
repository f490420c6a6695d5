"""Base classes with the Params of each estimator and model. Editors read them in the generated `mixins.pyi`."""

from __future__ import annotations

from sparktorch.ml.params import classes
from sparktorch.ml.params.declare import declared, params_class, with_constructor

__all__ = [
    "ClassificationModelParams",
    "ClassifierParams",
    "EstimatorParams",
    "GenericModelParams",
    "GenericParams",
    "ModelParams",
    "RegressionModelParams",
    "RegressorParams",
    "RunParams",
]

EstimatorParams = params_class(__name__, "EstimatorParams", classes.ESTIMATOR, "The Params that all estimators share.")
ModelParams = params_class(__name__, "ModelParams", classes.MODEL, "The Params that all models share.")

GenericParams = declared(__name__, "GenericParams", classes.GENERIC, EstimatorParams, of="TorchEstimator")
ClassifierParams = declared(__name__, "ClassifierParams", classes.CLASSIFIER, EstimatorParams, of="TorchClassifier")
RegressorParams = declared(__name__, "RegressorParams", classes.REGRESSOR, EstimatorParams, of="TorchRegressor")
GenericModelParams = declared(__name__, "GenericModelParams", classes.GENERIC_MODEL, ModelParams, of="TorchModel")
ClassificationModelParams = declared(
    __name__, "ClassificationModelParams", classes.CLASSIFICATION_MODEL, ModelParams, of="TorchClassificationModel"
)
RegressionModelParams = declared(
    __name__, "RegressionModelParams", classes.REGRESSION_MODEL, ModelParams, of="TorchRegressionModel"
)

RunParams = with_constructor(
    params_class(__name__, "RunParams", classes.RUN, "The Params of `run`."), classes.RUN, arguments=True
)
