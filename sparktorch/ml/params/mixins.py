"""Base classes with the Params of each estimator and model. Editors read them in the generated `mixins.pyi`."""

from __future__ import annotations

from sparktorch.ml.params import tables
from sparktorch.ml.params.declare import params_class, with_constructor

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

EstimatorParams = params_class("EstimatorParams", tables.ESTIMATOR, "The Params that all estimators share.")
ModelParams = params_class("ModelParams", tables.MODEL, "The Params that all models share.")


def _estimator(name: str, table: tuple[tables.ParamSpec, ...], what: str) -> type:
    kind = params_class(name, table, f"The Params of {what}.", EstimatorParams)
    return with_constructor(kind, table, arguments=True)


def _model(name: str, table: tuple[tables.ParamSpec, ...], what: str) -> type:
    kind = params_class(name, table, f"The Params of {what}.", ModelParams)
    return with_constructor(kind, table, arguments=False)


GenericParams = _estimator("GenericParams", tables.GENERIC, "`TorchEstimator`")
ClassifierParams = _estimator("ClassifierParams", tables.CLASSIFIER, "`TorchClassifier`")
RegressorParams = _estimator("RegressorParams", tables.REGRESSOR, "`TorchRegressor`")
GenericModelParams = _model("GenericModelParams", tables.GENERIC_MODEL, "`TorchModel`")
ClassificationModelParams = _model(
    "ClassificationModelParams", tables.CLASSIFICATION_MODEL, "`TorchClassificationModel`"
)
RegressionModelParams = _model("RegressionModelParams", tables.REGRESSION_MODEL, "`TorchRegressionModel`")

RunParams = with_constructor(params_class("RunParams", tables.RUN, "The Params of `run`."), tables.RUN, arguments=True)
