"""Base classes with the Params of each estimator and model. Editors read them in the generated `mixins.pyi`."""

from __future__ import annotations

from pyspark.ml.param import Params

from sparktorch.ml.params import classes
from sparktorch.ml.params.declare import ParamSpec, params_class, with_constructor

__all__ = [
    *("ClassificationModelParams", "ClassifierParams", "EstimatorParams", "ForecasterParams"),
    *("ForecastingModelParams", "GenericModelParams", "GenericParams", "ImageClassificationModelParams"),
    *("ImageClassifierParams", "ModelParams", "RankerParams", "RankingModelParams", "RecommenderModelParams"),
    *("RecommenderParams", "RegressionModelParams", "RegressorParams", "RunParams", "TabularClassifierParams"),
    *("TabularRegressorParams", "TextClassificationModelParams", "TextClassifierParams"),
]

EstimatorParams = params_class("EstimatorParams", classes.ESTIMATOR, "The Params that all estimators share.")
ModelParams = params_class("ModelParams", classes.MODEL, "The Params that all models share.")


def _estimator(
    name: str, table: tuple[ParamSpec, ...], what: str, base: type[Params] = EstimatorParams
) -> type[Params]:
    kind = params_class(name, table, f"The Params of {what}.", base)
    return with_constructor(kind, table, arguments=True)


def _model(name: str, table: tuple[ParamSpec, ...], what: str, base: type[Params] = ModelParams) -> type[Params]:
    kind = params_class(name, table, f"The Params of {what}.", base)
    return with_constructor(kind, table, arguments=False)


GenericParams = _estimator("GenericParams", classes.GENERIC, "`TorchEstimator`")
ClassifierParams = _estimator("ClassifierParams", classes.CLASSIFIER, "`TorchClassifier`")
RegressorParams = _estimator("RegressorParams", classes.REGRESSOR, "`TorchRegressor`")
GenericModelParams = _model("GenericModelParams", classes.GENERIC_MODEL, "`TorchModel`")
ClassificationModelParams = _model(
    "ClassificationModelParams", classes.CLASSIFICATION_MODEL, "`TorchClassificationModel`"
)
RegressionModelParams = _model("RegressionModelParams", classes.REGRESSION_MODEL, "`TorchRegressionModel`")

RankerParams = _estimator("RankerParams", classes.RANKER, "`Ranker`")
RankingModelParams = _model("RankingModelParams", classes.RANKING_MODEL, "`RankingModel`", RegressionModelParams)

_TEXT, _IMAGE = classes.TEXT_CLASSIFIER, classes.IMAGE_CLASSIFIER
TextClassifierParams = _estimator("TextClassifierParams", _TEXT, "`TextClassifier`", ClassifierParams)
ImageClassifierParams = _estimator("ImageClassifierParams", _IMAGE, "`ImageClassifier`", ClassifierParams)
TextClassificationModelParams = _model(
    "TextClassificationModelParams", classes.TEXT_MODEL, "`TextClassificationModel`", ClassificationModelParams
)
ImageClassificationModelParams = _model(
    "ImageClassificationModelParams", classes.IMAGE_MODEL, "`ImageClassificationModel`", ClassificationModelParams
)
_CLASSIFIER, _REGRESSOR = classes.TABULAR_CLASSIFIER, classes.TABULAR_REGRESSOR
TabularClassifierParams = _estimator("TabularClassifierParams", _CLASSIFIER, "`TabularClassifier`", ClassifierParams)
TabularRegressorParams = _estimator("TabularRegressorParams", _REGRESSOR, "`TabularRegressor`", RegressorParams)
RecommenderParams = _estimator("RecommenderParams", classes.RECOMMENDER, "`Recommender`", GenericParams)
RecommenderModelParams = _model("RecommenderModelParams", classes.RECOMMENDER_MODEL, "`RecommenderModel`")
ForecasterParams = _estimator("ForecasterParams", classes.FORECASTER, "`Forecaster`", RegressorParams)
ForecastingModelParams = _model("ForecastingModelParams", classes.FORECASTING_MODEL, "`ForecastingModel`")

RunParams = with_constructor(
    params_class("RunParams", classes.RUN, "The Params of `run`."), classes.RUN, arguments=True
)
