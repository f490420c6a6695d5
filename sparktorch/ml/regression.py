"""The regressor and its model: one or several values per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch.errors import ConfigError, shortens
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import RegressionModelParams, RegressorParams
from sparktorch.ml.scoring.evaluation import RegressionSummary, evaluate_regressor
from sparktorch.ml.scoring.importance import importance_of
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.rdd import dataframe_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchRegressionModel", "TorchRegressor", "ValueModel"]


class ValueModel(TorchModelBase, RegressionModelParams):
    """Base class of models that predict numbers.

    `transform` adds `predictionCol`: double for one value per row, array of double for several. An empty name omits it.
    """

    def predict(self, value: Any) -> Any:
        """Predicts one row in this process, without a Spark job.

        Args:
            value: The input: a vector or a (nested) list; for several input columns, a `Row` or dict.

        Returns:
            A number, or a list for several values; `None` for an invalid row that `handleInvalid` keeps or skips.

        Raises:
            ColumnError: An input is missing, or has another type or shape than in the fit.
        """
        return self._score_row(value, "prediction")

    def _named(self) -> Self:
        """Returns a copy whose output column has a name, or the model itself."""
        if self.getPredictionCol():
            return self
        return self.copy({self.predictionCol: f"{self.uid}_prediction".replace(".", "_")})

    @property
    def _kind(self) -> str:
        return "double" if self.trained.outputs[0].shape in ((), (1,)) else "array<double>"


class TorchRegressionModel(ValueModel):
    """A module fitted by `TorchRegressor`.

    `transform` adds `predictionCol`: double for one value per row, array of double for several. An empty name omits it.
    """

    _estimator = "sparktorch.ml.regression:TorchRegressor"

    @shortens
    def evaluate(self, dataset: DataFrame) -> RegressionSummary:
        """Scores rows and compares the predictions with `labelCol`, weighted by `weightCol` if that Param is set.

        Raises:
            ColumnError: A column is missing or not numeric, or a row has no weight, prediction or label.
            ConfigError: The model predicts several values per row.
        """
        named = self._single("evaluate")
        return evaluate_regressor(named, named.transform, dataframe_of(dataset, "evaluate"))

    @shortens
    def importance(self, dataset: DataFrame, metric: str = "r2", repeats: int = 5, seed: int = 0) -> pd.DataFrame:
        """Returns how much each input column matters; see `TorchClassificationModel.importance`.

        `metric` is "r2", "rootMeanSquaredError", "meanSquaredError" or "meanAbsoluteError". For an error, the
        importance is its increase.
        """
        valid = ["r2", "rootMeanSquaredError", "meanSquaredError", "meanAbsoluteError"]
        named = self._single("importance")
        rows = dataframe_of(dataset, "importance")
        label = ColumnNames.of(rows).column(self.getLabelCol())
        return importance_of(named, rows, label, metric, valid, F.lit(0.0), repeats, seed)

    def _single(self, method: str) -> Self:
        """Returns the model, with a name for its output column; refuses `method` for several values per row."""
        if self._kind != "double":
            raise ConfigError(
                f"{method} compares one value a row, and the model predicts several",
                hint="give Spark's RegressionEvaluator one at a time, prediction[0], prediction[1], ...",
            )
        return self._named()


class TorchRegressor(TorchEstimatorBase[TorchRegressionModel], RegressorParams):
    """Trains a PyTorch module to predict numbers.

    The module returns shape `(rows,)` or `(rows, 1)` for a scalar label, `(rows, values)` for an array.

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
