"""The columns that a model will add are checked against those of the DataFrame that it is fitted on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as T

from sparktorch import TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ColumnError, ConfigError, SparkTorchError
from sparktorch.ml.fit.checks import check_new_columns

SCHEMA = T.StructType().add("features", T.ArrayType(T.FloatType())).add("prediction", T.DoubleType())


def check(estimator: Any, outputs: int = 1) -> None:
    conf = SimpleNamespace(get=lambda key, *rest: "false")
    dataset: Any = SimpleNamespace(schema=SCHEMA, sparkSession=SimpleNamespace(conf=conf))
    check_new_columns(estimator, dataset, outputs)


@pytest.mark.parametrize(
    ("estimator", "kind", "says"),
    [
        (TorchClassifier(), ColumnError, "already has a column 'prediction'"),
        (TorchRegressor(predictionCol="Features"), ColumnError, "already has a column 'Features'"),
        (TorchEstimator(outputCols=["a", "features"]), ColumnError, "already has a column 'features'"),
        (TorchEstimator(outputCols=["a", "a"]), ConfigError, "two output columns are called 'a'"),
        (TorchClassifier(predictionCol="Probability"), ConfigError, "'probability' and 'Probability', which to Spark"),
    ],
)
def test_output_columns_that_cannot_be_added_are_refused(
    estimator: Any, kind: type[SparkTorchError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        check(estimator)


def test_output_columns_that_are_left_out_or_not_named_yet_are_none() -> None:
    check(TorchRegressor(predictionCol=""))
    check(TorchClassifier(predictionCol="", probabilityCol="", rawPredictionCol=""))
    check(TorchEstimator(outputCols=["a", "b"]), 2)
    check(TorchEstimator(), 2)  # setOutputCols of the model names them
