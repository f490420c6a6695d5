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


def _declared(name: str, table: tuple[ParamSpec, ...], what: str, base: type[Params] = EstimatorParams) -> type[Params]:
    kind = params_class(name, table, f"The Params of {what}.", base)
    return with_constructor(kind, table, arguments=issubclass(base, EstimatorParams))


GenericParams = _declared("GenericParams", classes.GENERIC, "`TorchEstimator`")
ClassifierParams = _declared("ClassifierParams", classes.CLASSIFIER, "`TorchClassifier`")
RegressorParams = _declared("RegressorParams", classes.REGRESSOR, "`TorchRegressor`")
GenericModelParams = _declared("GenericModelParams", classes.GENERIC_MODEL, "`TorchModel`", ModelParams)
ClassificationModelParams = _declared(
    "ClassificationModelParams", classes.CLASSIFICATION_MODEL, "`TorchClassificationModel`", ModelParams
)
RegressionModelParams = _declared(
    "RegressionModelParams", classes.REGRESSION_MODEL, "`TorchRegressionModel`", ModelParams
)

RankerParams = _declared("RankerParams", classes.RANKER, "`Ranker`")
RankingModelParams = _declared("RankingModelParams", classes.RANKING_MODEL, "`RankingModel`", RegressionModelParams)

_TEXT, _IMAGE = classes.TEXT_CLASSIFIER, classes.IMAGE_CLASSIFIER
TextClassifierParams = _declared("TextClassifierParams", _TEXT, "`TextClassifier`", ClassifierParams)
ImageClassifierParams = _declared("ImageClassifierParams", _IMAGE, "`ImageClassifier`", ClassifierParams)
TextClassificationModelParams = _declared(
    "TextClassificationModelParams", classes.TEXT_MODEL, "`TextClassificationModel`", ClassificationModelParams
)
ImageClassificationModelParams = _declared(
    "ImageClassificationModelParams", classes.IMAGE_MODEL, "`ImageClassificationModel`", ClassificationModelParams
)
_CLASSIFIER, _REGRESSOR = classes.TABULAR_CLASSIFIER, classes.TABULAR_REGRESSOR
TabularClassifierParams = _declared("TabularClassifierParams", _CLASSIFIER, "`TabularClassifier`", ClassifierParams)
TabularRegressorParams = _declared("TabularRegressorParams", _REGRESSOR, "`TabularRegressor`", RegressorParams)
RecommenderParams = _declared("RecommenderParams", classes.RECOMMENDER, "`Recommender`", GenericParams)
RecommenderModelParams = _declared(
    "RecommenderModelParams", classes.RECOMMENDER_MODEL, "`RecommenderModel`", ModelParams
)
ForecasterParams = _declared("ForecasterParams", classes.FORECASTER, "`Forecaster`", RegressorParams)
ForecastingModelParams = _declared(
    "ForecastingModelParams", classes.FORECASTING_MODEL, "`ForecastingModel`", ModelParams
)

RunParams = with_constructor(
    params_class("RunParams", classes.RUN, "The Params of `run`."), classes.RUN, arguments=True
)
