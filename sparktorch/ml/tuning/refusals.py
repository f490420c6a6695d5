"""Searches that cannot work, refused before any job."""

from __future__ import annotations

from typing import Any

from pyspark.ml import Pipeline
from pyspark.ml.param import Param
from pyspark.ml.tuning import CrossValidator
from pyspark.ml.util import MetaAlgorithmReadWrite

from sparktorch.errors import ConfigError, nearest
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.translate import translate

__all__ = ["check_search"]


def check_search(search: CrossValidator) -> None:
    """Refuses a search that cannot work.

    Raises:
        ConfigError: It has no estimator, evaluator or param maps, too few folds, a Param of no stage, or checkpoints.
    """
    for name in ("estimator", "evaluator", "estimatorParamMaps"):
        if not search.isDefined(name) or search.getOrDefault(name) is None:
            raise ConfigError(f"{name} is not set", hint=f"set {name}", param=name)
    maps = search.getEstimatorParamMaps()
    if not maps:
        raise ConfigError(
            "estimatorParamMaps is empty", hint="[{}] fits the estimator as it is", param="estimatorParamMaps"
        )
    if search.getNumFolds() < 2:
        raise ConfigError(
            f"numFolds is {search.getNumFolds()}, which leaves no rows to train on",
            hint="set 2 or more",
            param="numFolds",
        )
    estimator = search.getEstimator()
    _check_names(estimator, maps)
    for index, params in enumerate(maps):
        for stage in _stages_of(estimator):
            if isinstance(stage, TorchEstimatorBase):
                _check_stage(stage.copy(params), index)


def _check_names(estimator: Any, maps: Any) -> None:
    nested = MetaAlgorithmReadWrite.getAllNestedStages(estimator)
    known = {stage.uid for stage in nested}
    names = [param.name for stage in nested for param in stage.params]
    for params in maps:
        for param in params:
            if not isinstance(param, Param):
                raise ConfigError(
                    f"a param map has the key {param!r}, a {type(param).__name__}",
                    hint="its keys are Params, such as estimator.learningRate",
                    param="estimatorParamMaps",
                )
            if param.parent not in known:
                raise ConfigError(
                    f"a param map sets {param.name!r} of {param.parent}, which is no stage of the estimator",
                    hint="build the grid with the Params of this estimator"
                    if param.name in names
                    else nearest(param.name, names),
                    param=param.name,
                )


def _stages_of(estimator: Any) -> list[Any]:
    """Returns the stages of a pipeline; otherwise the estimator alone."""
    return list(estimator.getStages()) if isinstance(estimator, Pipeline) else [estimator]


def _check_stage(stage: Any, index: int) -> None:
    request = translate(stage, stage._task)
    if request.checkpoint is not None:
        raise ConfigError(
            f"param map {index} has the checkpointDir {request.checkpoint.directory!r}, and the training of each fold "
            "is one of its own",
            hint="leave checkpointDir unset in a cross-validation",
            param="checkpointDir",
        )
