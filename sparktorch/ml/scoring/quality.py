"""One number that says how good scored rows are: of those that have both a prediction and a label."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.ml.scoring.column_metadata import check_numbers, class_index
from sparktorch.spark.column_names import ColumnNames

__all__ = ["accuracy", "rmse"]


def accuracy(scored: DataFrame, prediction: str, label: str, labels: Sequence[str]) -> tuple[str, int, float]:
    """Returns "accuracy", the number of rows with a prediction and a label, and the share of them that are right."""
    names = ColumnNames.of(scored)
    check_numbers(names, [prediction])
    error = _number(class_index(scored, label, labels)) - _number(names.column(prediction))
    rows, mean = _mean(scored, F.when(error.isNotNull(), (error == 0).cast("double")))
    return "accuracy", rows, mean


def rmse(scored: DataFrame, prediction: str, label: str) -> tuple[str, int, float]:
    """Returns "rmse", the number of rows with a prediction and a label, and the root of their mean squared error."""
    names = ColumnNames.of(scored)
    check_numbers(names, [prediction, label])
    error = _number(names.column(label)) - _number(names.column(prediction))
    rows, mean = _mean(scored, error**2)
    return "rmse", rows, math.sqrt(mean)


def _number(column: Column) -> Column:
    """Returns a column as doubles, null in place of NaN."""
    return F.nanvl(column.cast("double"), F.lit(None).cast("double"))


def _mean(scored: DataFrame, measured: Column) -> tuple[int, float]:
    """Returns how many rows are measured, and their mean; 0 of none."""
    (row,) = scored.agg(F.count(measured).alias("rows"), F.avg(measured).alias("mean")).collect()
    return row["rows"], row["mean"] or 0.0
