"""One metric of scored rows, over the rows that have both a prediction and a label."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.ml.scoring.column_metadata import check_numbers, class_index, double_or_null
from sparktorch.spark.column_names import ColumnNames

__all__ = ["accuracy", "rmse"]


def accuracy(scored: DataFrame, prediction: str, label: str, labels: Sequence[str]) -> tuple[str, int, float]:
    """Returns "accuracy", the number of rows with a prediction and a label, and the share of right predictions."""
    names = ColumnNames.of(scored)
    check_numbers(names, [prediction])
    error = double_or_null(class_index(scored, label, labels)) - double_or_null(names.column(prediction))
    rows, mean = _mean(scored, F.when(error.isNotNull(), (error == 0).cast("double")))
    return "accuracy", rows, mean


def rmse(scored: DataFrame, prediction: str, label: str) -> tuple[str, int, float]:
    """Returns "rmse", the number of rows with a prediction and a label, and the root of the mean squared error."""
    names = ColumnNames.of(scored)
    check_numbers(names, [prediction, label])
    error = double_or_null(names.column(label)) - double_or_null(names.column(prediction))
    rows, mean = _mean(scored, error**2)
    return "rmse", rows, math.sqrt(mean)


def _mean(scored: DataFrame, values: Column) -> tuple[int, float]:
    """Returns how many rows have a value, and the mean of the values; the mean is 0 if no row has a value."""
    (row,) = scored.agg(F.count(values).alias("rows"), F.avg(values).alias("mean")).collect()
    return row["rows"], row["mean"] or 0.0
