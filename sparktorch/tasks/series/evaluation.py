"""Metrics that compare forecasts with known rows, for each step of the horizon and as means over all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.ml.scoring.comparison import refuse_rows
from sparktorch.spark.column_names import quoted

__all__ = ["ForecastSummary", "summary_of"]


@dataclass(frozen=True, kw_only=True)
class ForecastSummary:
    """The metrics of forecasts. A metric by step has one value for each row of the horizon.

    Attributes:
        predictions: A row for each forecast value, with the columns of the series and of the order, `cutoff` (the time
            of the last row that the forecast knows), `step` (from 1 on), `label`, `naive` (the seasonal naive forecast,
            which is the value one season before), `scale` and the model's columns. It is not cached: each action on it
            scores again.
        numForecasts: The number of forecasts, of all series and origins.
        meanAbsoluteErrorByStep: The mean of the absolute errors.
        rootMeanSquaredErrorByStep: The root of the mean of the squared errors.
        meanAbsoluteScaledErrorByStep: The mean of the absolute errors, each divided by `scale`. The scale is the mean
            absolute error of seasonal naive forecasts of the series' rows before the forecast. Series without such
            rows, or whose scale is 0, are left out; NaN if all are left out.
        quantileLossByStep: The mean of the pinball losses of all quantiles; without quantiles, of the median's.
        naiveScaledErrorByStep: `meanAbsoluteScaledErrorByStep` of the seasonal naive forecast.
    """

    predictions: DataFrame
    numForecasts: int
    meanAbsoluteErrorByStep: list[float]
    rootMeanSquaredErrorByStep: list[float]
    meanAbsoluteScaledErrorByStep: list[float]
    quantileLossByStep: list[float]
    naiveScaledErrorByStep: list[float]

    @property
    def meanAbsoluteError(self) -> float:
        """The mean over all steps."""
        return _mean(self.meanAbsoluteErrorByStep)

    @property
    def rootMeanSquaredError(self) -> float:
        """The root of the mean of the squared errors of all steps."""
        return math.sqrt(_mean([error**2 for error in self.rootMeanSquaredErrorByStep]))

    @property
    def meanAbsoluteScaledError(self) -> float:
        """MASE, the mean over all steps."""
        return _mean(self.meanAbsoluteScaledErrorByStep)

    @property
    def quantileLoss(self) -> float:
        """The mean over all steps."""
        return _mean(self.quantileLossByStep)

    @property
    def naiveScaledError(self) -> float:
        """MASE, over all steps, of the seasonal naive forecast."""
        return _mean(self.naiveScaledErrorByStep)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def summary_of(predictions: DataFrame, prediction: str, quantiles: dict[float, str]) -> ForecastSummary:
    """Compares forecasts with labels in one job; `quantiles` has the column of each quantile."""
    label = F.col("label")
    error = F.abs(label - quoted(prediction))
    naive_error = F.abs(label - F.col("naive"))
    columns = quantiles or {0.5: prediction}  # Without quantiles, the forecast is taken as the median.
    losses = [_pinball(label - quoted(name), quantile) for quantile, name in columns.items()]
    by_step = {
        "meanAbsoluteErrorByStep": F.avg(error),
        "rootMeanSquaredErrorByStep": F.sqrt(F.avg(error * error)),
        "meanAbsoluteScaledErrorByStep": F.avg(error / F.col("scale")),
        "quantileLossByStep": F.avg(sum(losses[1:], losses[0]) / len(losses)),
        "naiveScaledErrorByStep": F.avg(naive_error / F.col("scale")),
    }
    rows = predictions.groupBy("step").agg(
        F.count(F.lit(1)).alias("rows"), *[value.alias(name) for name, value in by_step.items()]
    )
    steps = sorted(rows.collect(), key=lambda row: row["step"])
    what = "no series has rows enough for a forecast and the rows to compare with"
    refuse_rows((not steps, None, what, "they are left out because handleInvalid is 'skip'", ""))
    metrics = {name: [math.nan if row[name] is None else float(row[name]) for row in steps] for name in by_step}
    return ForecastSummary(predictions=predictions, numForecasts=steps[0]["rows"], **metrics)


def _pinball(error: Column, quantile: float) -> Column:
    """Returns the pinball loss; an error is positive if the label is above the forecast."""
    return F.greatest(error * quantile, error * (quantile - 1))
