"""The result of a search: the best model, and a table and plots of the trials. `discard` deletes other models."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.util import MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparktorch.base.imports import optuna
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import PersistenceError

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

    from sparktorch.ml.model import TorchModelBase

__all__ = ["CAUSE", "EPOCHS", "TorchTunerModel", "discard"]

# Trials have these user attributes of Optuna's.
CAUSE = "sparktorch.cause"
EPOCHS = "sparktorch.epochs"

_LOG = logging.getLogger(__name__)


class TorchTunerModel(Model, MLWritable):
    """The result of a search, which transforms with the best model.

    `save` saves `bestModel`, which is loaded by its own class; the trials stay in the study's storage.

    Attributes:
        bestModel: The model of the best trial.
        bestParams: The values that this trial set, by the names in the space.
        study: Optuna's study.
    """

    def __init__(self, bestModel: TorchModelBase, bestParams: dict[str, Any], study: Any) -> None:
        super().__init__()
        self.bestModel = bestModel
        self.bestParams = bestParams
        self.study = study

    def copy(self, extra: ParamMap | None = None) -> TorchTunerModel:
        """Copies the model, with Params of `bestModel` set."""
        copied: TorchTunerModel = super().copy()
        copied.bestModel = self.bestModel.copy(extra)
        return copied

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each trial of the study, with these columns.

        - `number`
        - `state`: COMPLETE, PRUNED or FAIL; RUNNING if the trial's driver still runs, or has died.
        - `value`: The metric; for a pruned trial, from its last epoch.
        - `duration`
        - `params_NAME`: The value of each Param.
        - `epochs`: The number of epochs that were trained.
        - `cause`: Why the trial failed.
        """
        table: pd.DataFrame = self.study.trials_dataframe(("number", "state", "value", "duration", "params"))
        trials = self.study.get_trials(deepcopy=False)
        return table.assign(
            epochs=[trial.user_attrs.get(EPOCHS, 0) for trial in trials],
            cause=[trial.user_attrs.get(CAUSE, "") for trial in trials],
        )

    def plotHistory(self) -> Any:
        """Plots the value of every trial, and the best so far; returns matplotlib's axes."""
        return self._plot("plot_optimization_history")

    def plotEpochs(self) -> Any:
        """Plots the metric of every trial by epoch; returns matplotlib's axes."""
        return self._plot("plot_intermediate_values")

    def plotParams(self) -> Any:
        """Plots the value of the trials by each Param; returns matplotlib's axes, one or several."""
        return self._plot("plot_slice")

    def write(self) -> MLWriter:
        """Returns the writer of the best model."""
        return self.bestModel.write()

    def evaluate(self, dataset: DataFrame) -> Any:
        """Evaluates the best model; see its own `evaluate`."""
        model: Any = self.bestModel
        return model.evaluate(dataset)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self.bestModel.transform(dataset)

    def _plot(self, name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
            return getattr(import_module("optuna.visualization.matplotlib"), name)(self.study)


def discard(model: TorchModelBase) -> None:
    """Deletes the folder of a model that a search does not return, if it was fitted with `modelDir`.

    A model that MLflow logs is left alone, because the logged model names the folder.
    """
    if not isinstance(model.trained.weights, WeightsFolder) or hasattr(model, "_mlflow_logged"):
        return
    try:
        model.deleteWeights()
    except PersistenceError as error:
        _LOG.warning("a model that the search does not return stays: %s", error)
