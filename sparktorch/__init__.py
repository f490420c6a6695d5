"""Train PyTorch modules on Spark DataFrames.

The public names load when they are first used: importing the pure core, for example
`sparktorch.train.loop.loop`, imports neither pyspark nor mlflow.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparktorch.base import moved

if TYPE_CHECKING:
    from sparktorch.adapters.petastorm.dataframes import read_petastorm
    from sparktorch.errors import SparkTorchError
    from sparktorch.ml.classification import TorchClassificationModel, TorchClassifier
    from sparktorch.ml.estimator import TorchEstimator
    from sparktorch.ml.fit.run import collective_map, run
    from sparktorch.ml.model import TorchModel
    from sparktorch.ml.params.mixins import RunParams
    from sparktorch.ml.regression import TorchRegressionModel, TorchRegressor
    from sparktorch.ml.tuning.cross_validator import TorchCrossValidator
    from sparktorch.ml.tuning.tuner import TorchTuner
    from sparktorch.spark.rdd import tensor_rdd, to_dataframe
    from sparktorch.tasks.images.estimator import ImageClassificationModel, ImageClassifier
    from sparktorch.tasks.ranking.estimator import Ranker, RankingModel
    from sparktorch.tasks.recommender.estimator import Recommender
    from sparktorch.tasks.recommender.model import RecommenderModel
    from sparktorch.tasks.series.estimator import Forecaster
    from sparktorch.tasks.series.model import ForecastingModel
    from sparktorch.tasks.tables.estimator import (
        TabularClassificationModel,
        TabularClassifier,
        TabularRegressionModel,
        TabularRegressor,
    )
    from sparktorch.tasks.texts.estimator import TextClassificationModel, TextClassifier
    from sparktorch.train.callbacks import Callback
    from sparktorch.worker.run_context import RunContext

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Forecaster",
    "ForecastingModel",
    "ImageClassificationModel",
    "ImageClassifier",
    "Ranker",
    "RankingModel",
    "Recommender",
    "RecommenderModel",
    "RunContext",
    "RunParams",
    "SparkTorchError",
    "TabularClassificationModel",
    "TabularClassifier",
    "TabularRegressionModel",
    "TabularRegressor",
    "TextClassificationModel",
    "TextClassifier",
    "TorchClassificationModel",
    "TorchClassifier",
    "TorchCrossValidator",
    "TorchEstimator",
    "TorchModel",
    "TorchRegressionModel",
    "TorchRegressor",
    "TorchTuner",
    "__version__",
    "collective_map",
    "read_petastorm",
    "run",
    "tensor_rdd",
    "to_dataframe",
]

_HOMES = {
    "Callback": "sparktorch.train.callbacks",
    "Forecaster": "sparktorch.tasks.series.estimator",
    "ForecastingModel": "sparktorch.tasks.series.model",
    "ImageClassificationModel": "sparktorch.tasks.images.estimator",
    "ImageClassifier": "sparktorch.tasks.images.estimator",
    "Recommender": "sparktorch.tasks.recommender.estimator",
    "RecommenderModel": "sparktorch.tasks.recommender.model",
    "RunContext": "sparktorch.worker.run_context",
    "RunParams": "sparktorch.ml.params.mixins",
    "SparkTorchError": "sparktorch.errors",
    "Ranker": "sparktorch.tasks.ranking.estimator",
    "RankingModel": "sparktorch.tasks.ranking.estimator",
    "TabularClassificationModel": "sparktorch.tasks.tables.estimator",
    "TabularClassifier": "sparktorch.tasks.tables.estimator",
    "TabularRegressionModel": "sparktorch.tasks.tables.estimator",
    "TabularRegressor": "sparktorch.tasks.tables.estimator",
    "TextClassificationModel": "sparktorch.tasks.texts.estimator",
    "TextClassifier": "sparktorch.tasks.texts.estimator",
    "TorchClassificationModel": "sparktorch.ml.classification",
    "TorchClassifier": "sparktorch.ml.classification",
    "TorchCrossValidator": "sparktorch.ml.tuning.cross_validator",
    "TorchEstimator": "sparktorch.ml.estimator",
    "TorchModel": "sparktorch.ml.model",
    "TorchRegressionModel": "sparktorch.ml.regression",
    "TorchRegressor": "sparktorch.ml.regression",
    "TorchTuner": "sparktorch.ml.tuning.tuner",
    "collective_map": "sparktorch.ml.fit.run",
    "read_petastorm": "sparktorch.adapters.petastorm.dataframes",
    "run": "sparktorch.ml.fit.run",
    "tensor_rdd": "sparktorch.spark.rdd",
    "to_dataframe": "sparktorch.spark.rdd",
}


def _refuse_namesake() -> None:
    """Refuses to share the package folder with the unrelated PyPI project of the same name."""
    try:
        installed = version("sparktorch")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'sparktorch' {installed} is installed: an unrelated project, whose files share this "
        "package's folder. Run: pip uninstall -y sparktorch && pip install --force-reinstall sparktorch-estimator"
    )


_refuse_namesake()
moved.install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparktorch' has no attribute {name!r}")
    from sparktorch.base.imports import uncollected

    with uncollected():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
