"""Train PyTorch modules on Spark DataFrames.

The public names load when they are first used: importing the pure core, for example
`sparktorch.train.loop.loop`, imports neither pyspark nor mlflow.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparktorch.base import moved

# A public name has two lines: one here, for type checkers and editors, and one below, by which it is loaded.
if TYPE_CHECKING:
    from sparktorch.adapters.petastorm.dataframes import read_petastorm as read_petastorm
    from sparktorch.errors import SparkTorchError as SparkTorchError
    from sparktorch.ml.classification import TorchClassificationModel as TorchClassificationModel
    from sparktorch.ml.classification import TorchClassifier as TorchClassifier
    from sparktorch.ml.estimator import TorchEstimator as TorchEstimator
    from sparktorch.ml.fit.run import collective_map as collective_map
    from sparktorch.ml.fit.run import run as run
    from sparktorch.ml.model import TorchModel as TorchModel
    from sparktorch.ml.params.mixins import RunParams as RunParams
    from sparktorch.ml.regression import TorchRegressionModel as TorchRegressionModel
    from sparktorch.ml.regression import TorchRegressor as TorchRegressor
    from sparktorch.ml.tuning.cross_validator import TorchCrossValidator as TorchCrossValidator
    from sparktorch.ml.tuning.tuner import TorchTuner as TorchTuner
    from sparktorch.spark.rdd import tensor_rdd as tensor_rdd
    from sparktorch.spark.rdd import to_dataframe as to_dataframe
    from sparktorch.tasks.images.estimator import ImageClassificationModel as ImageClassificationModel
    from sparktorch.tasks.images.estimator import ImageClassifier as ImageClassifier
    from sparktorch.tasks.ranking.estimator import Ranker as Ranker
    from sparktorch.tasks.ranking.estimator import RankingModel as RankingModel
    from sparktorch.tasks.recommender.estimator import Recommender as Recommender
    from sparktorch.tasks.recommender.model import RecommenderModel as RecommenderModel
    from sparktorch.tasks.series.estimator import Forecaster as Forecaster
    from sparktorch.tasks.series.model import ForecastingModel as ForecastingModel
    from sparktorch.tasks.tables.estimator import TabularClassificationModel as TabularClassificationModel
    from sparktorch.tasks.tables.estimator import TabularClassifier as TabularClassifier
    from sparktorch.tasks.tables.estimator import TabularRegressionModel as TabularRegressionModel
    from sparktorch.tasks.tables.estimator import TabularRegressor as TabularRegressor
    from sparktorch.tasks.texts.estimator import TextClassificationModel as TextClassificationModel
    from sparktorch.tasks.texts.estimator import TextClassifier as TextClassifier
    from sparktorch.train.callbacks import Callback as Callback
    from sparktorch.worker.run_context import RunContext as RunContext

__version__ = "0.1.0"

_HOMES = {
    "Callback": "sparktorch.train.callbacks",
    "Forecaster": "sparktorch.tasks.series.estimator",
    "ForecastingModel": "sparktorch.tasks.series.model",
    "ImageClassificationModel": "sparktorch.tasks.images.estimator",
    "ImageClassifier": "sparktorch.tasks.images.estimator",
    "Ranker": "sparktorch.tasks.ranking.estimator",
    "RankingModel": "sparktorch.tasks.ranking.estimator",
    "Recommender": "sparktorch.tasks.recommender.estimator",
    "RecommenderModel": "sparktorch.tasks.recommender.model",
    "RunContext": "sparktorch.worker.run_context",
    "RunParams": "sparktorch.ml.params.mixins",
    "SparkTorchError": "sparktorch.errors",
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
__all__ = sorted([*_HOMES, "__version__"])


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
