"""What a search has found: the best model, and a table and plots of the trials."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.util import MLWritable, MLWriter
from pyspark.sql import DataFrame

from sparktorch.base.optional import optuna
from sparktorch.errors import ConfigError
from sparktorch.ml.tuning.search import CAUSE, EPOCHS

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

    from sparktorch.ml.model import TorchModelBase

__all__ = ["TorchTunerModel"]


class TorchTunerModel(Model, MLWritable):
    """The best model of a search; it transforms with it.

    `save` saves `bestModel`, which is loaded by its own class; the trials stay in the study's storage.

    Attributes:
        bestModel: The model of the best trial.
        bestParams: What this trial set, by the names in the space.
        study: Optuna's study.
    """

    def __init__(self, bestModel: TorchModelBase, bestParams: dict[str, Any], study: Any) -> None:
        super().__init__()
        self.bestModel, self.bestParams, self.study = bestModel, bestParams, study

    def copy(self, extra: ParamMap | None = None) -> TorchTunerModel:
        """Copies the model, with Params of `bestModel` set."""
        that: TorchTunerModel = super().copy()
        that.bestModel = self.bestModel.copy(extra)
        return that

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each trial of the study.

        `number`, `state` (COMPLETE, PRUNED, FAIL; RUNNING for those of a driver that runs, or has died), `value` of the
        metric, for a pruned trial that of its last epoch, `duration`, `epochs` trained, `params_NAME`, and the `cause`
        of a failure.
        """
        trials = self.study.get_trials(deepcopy=False)
        names = dict.fromkeys(name for trial in trials for name in trial.params)
        rows = [
            {
                "number": trial.number,
                "state": trial.state.name,
                "value": trial.value,
                "duration": trial.duration,
                "epochs": trial.user_attrs.get(EPOCHS, 0),
                **{f"params_{name}": trial.params.get(name) for name in names},
                "cause": trial.user_attrs.get(CAUSE, ""),
            }
            for trial in trials
        ]
        return pd.DataFrame(rows)

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
        if not hasattr(model, "evaluate"):
            raise ConfigError(f"a {type(model).__name__} has no evaluate", hint="transform, and use an evaluator")
        return model.evaluate(dataset)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self.bestModel.transform(dataset)

    def _plot(self, name: str) -> Any:
        module = optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", module.exceptions.ExperimentalWarning)
            try:
                import optuna.visualization.matplotlib as plots

                return getattr(plots, name)(self.study)
            except ImportError as error:
                raise ConfigError(
                    "plots are drawn by matplotlib, which is not installed", hint="pip install matplotlib"
                ) from error
