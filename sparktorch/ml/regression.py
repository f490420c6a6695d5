"""Regression: one number a row, or a row of numbers."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from sparktorch.errors import ConfigError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import RegressionModelParams, RegressorParams
from sparktorch.ml.scoring.evaluation import RegressionSummary, evaluate_regressor

__all__ = ["TorchRegressionModel", "TorchRegressor"]


class TorchRegressionModel(TorchModelBase, RegressionModelParams):
    """A module fitted by `TorchRegressor`.

    `transform` adds `predictionCol`: double for one value a row, an array of double for several. An empty name leaves
    it out.
    """

    def predict(self, value: Any) -> Any:
        """Predicts for one row, in this process: no Spark job runs.

        Args:
            value: The input, a vector or a (nested) list; for several input columns a `Row` or dict that has them.

        Returns:
            A number, or a list of several; `None` for a row with a null in it, if `handleInvalid` is "keep".

        Raises:
            ColumnError: The row lacks an input, or has one of another type or shape than the model was fitted on.
        """
        return self._score_row(value, "prediction")

    def evaluate(self, dataset: DataFrame) -> RegressionSummary:
        """Scores rows whose values are known, in `labelCol`, and weighs them by `weightCol`, if that is set.

        Raises:
            ColumnError: A column is missing or no number, or a row has no weight, no prediction or no true value.
            ConfigError: The model predicts several values a row.
        """
        if self._kind != "double":
            raise ConfigError(
                "evaluate compares one value a row, and the model predicts several",
                hint="give Spark's RegressionEvaluator one at a time, prediction[0], prediction[1], ...",
            )
        unnamed = {self.predictionCol: f"{self.uid}_prediction"}
        named = self if self.getPredictionCol() else self.copy(unnamed)
        return evaluate_regressor(named, named.transform, dataset)

    @property
    def _kind(self) -> str:
        return "double" if self.trained.outputs[0].shape in ((), (1,)) else "array<double>"

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        name = self.getPredictionCol()
        return ({"prediction": self._kind}, {name: "prediction"}) if name else ({}, {})


class TorchRegressor(TorchEstimatorBase[TorchRegressionModel], RegressorParams):
    """Trains a PyTorch module to predict numbers.

    The module returns shape `(rows,)` or `(rows, 1)` for a number as label, `(rows, values)` for
    an array.

    Example:
        >>> rows = [([float(i % 7), float(i % 5)], float(2 * (i % 7) - i % 5)) for i in range(70)]
        >>> data = spark.createDataFrame(rows, "features array<float>, label float")
        >>> regressor = TorchRegressor(
        ...     module="torch.nn:Linear",
        ...     moduleParams={"in_features": 2, "out_features": 1},
        ...     batchSize=7,
        ...     epochs=20,
        ...     learningRate=0.1,
        ...     progress=False,
        ... )
        >>> model = regressor.fit(data)
        >>> abs(model.predict([3.0, 1.0]) - 5.0) < 0.5
        True

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "regression"
    _model_class = TorchRegressionModel
