"""What all evaluations share: the comparison of scored rows with their labels, and the summaries' base class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from sparktorch.base.config import one_of
from sparktorch.errors import ColumnError
from sparktorch.ml.params.mixins import ClassificationModelParams, RegressionModelParams
from sparktorch.ml.scoring import html
from sparktorch.ml.scoring.column_metadata import check_numbers, double_or_null
from sparktorch.spark.column_names import ColumnNames, quoted

__all__ = ["Summary", "Transform", "compared", "described", "refuse_rows", "totals", "weight_column"]

Transform = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary:
    """Base class of the summaries.

    Attributes:
        predictions: The output of `transform`. It is not cached, so each action on it scores the rows again.
        predictionCol: The column of predictions in `predictions`.
        labelCol: The column of true values in `predictions`.
        weightCol: The column of weights in `predictions`, which all metrics use; "" for equal weights.
        numInstances: Number of rows.
    """

    predictions: DataFrame
    predictionCol: str
    labelCol: str
    weightCol: str
    numInstances: int

    # The text and the HTML of a summary have these metrics.
    _main_metrics: ClassVar[tuple[str, ...]] = ("numInstances",)

    def __repr__(self) -> str:
        """Returns the class with its main metrics."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._metrics.items())})"

    def _repr_html_(self) -> str:
        return html.block(type(self).__name__, "", html.pairs(self._metrics))

    @property
    def _metrics(self) -> dict[str, str]:
        return {name: html.number(getattr(self, name)) for name in self._main_metrics}


def totals() -> list[Column]:
    """Returns aggregates: the weight, all rows, and the rows with a label, a prediction and a valid weight."""
    return [
        F.sum("weight").alias("weight"),
        F.count(F.lit(1)).alias("rows"),
        F.count("label").alias("labels"),
        F.count("prediction").alias("predictions"),
        F.sum(F.col("weight").between(0, F.lit(float(np.finfo(np.float64).max))).cast("int")).alias("weights"),
    ]


@contextmanager
def compared(
    model: ClassificationModelParams | RegressionModelParams,
    transform: Transform,
    dataset: DataFrame,
    *more: Column,
    persisted: bool,
    label: Column | None = None,
) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Yields two DataFrames: the output of `transform`, and its `label`, `prediction` and `weight` as double.

    Rows without label or weight are left out if the model's `nullPolicy` is "drop", as in the fit.

    Args:
        model: A model whose output columns have names.
        transform: The model's `transform`.
        dataset: Rows with inputs and labels.
        more: Further columns of the second DataFrame.
        persisted: Whether the second DataFrame is persisted until the block ends, so that several jobs score rows once.
        label: The class index that `labelCol` stands for; by default `labelCol` has numbers.
    """
    names = ColumnNames.of(dataset)
    weight_name = weight_column(model)
    if label is None:
        check_numbers(names, [model.getLabelCol()])
        label = names.column(model.getLabelCol())
    weight = F.lit(1.0)
    if weight_name:
        check_numbers(names, [weight_name])
        weight = double_or_null(names.column(weight_name))
    one_of("nullPolicy", model.getNullPolicy(), ("error", "drop", "fill"))
    if model.getNullPolicy() == "drop":
        dataset = dataset.where(double_or_null(label).isNotNull() & weight.isNotNull())
    predictions = transform(dataset)
    rows = predictions.select(
        double_or_null(label).alias("label"),
        double_or_null(quoted(model.getPredictionCol())).alias("prediction"),
        weight.alias("weight"),
        *more,
    )
    if persisted:
        rows.persist()
    try:
        yield predictions, rows
    finally:
        if persisted:
            rows.unpersist()


def weight_column(model: ClassificationModelParams | RegressionModelParams) -> str:
    """Returns the name of the column of weights; empty if there is none."""
    if not model.isDefined(model.weightCol):
        return ""
    return model.getWeightCol() or ""


def refuse_rows(*cases: tuple[Any, str | None, str, str, str]) -> None:
    """Raises a `ColumnError` for the first case whose condition holds.

    A case is a condition, the column, what is wrong, a hint and a code.
    """
    for refused, column, what, hint, code in cases:
        if refused:
            raise ColumnError(what, hint=hint, column=column, code=code)


def described(
    model: ClassificationModelParams | RegressionModelParams, predictions: DataFrame, totals: list[Row]
) -> dict[str, Any]:
    """Returns the fields that all summaries have; refuses rows without label, valid weight or prediction.

    `totals` are the rows that the aggregates of the function `totals` return, one for each group of scored rows.
    """
    label = model.getLabelCol()
    weight = weight_column(model)
    rows = sum(row["rows"] for row in totals)
    no_label = rows - sum(row["labels"] for row in totals)
    # A group without any valid weight has null as the sum.
    no_weight = rows - sum(row["weights"] or 0 for row in totals)
    no_prediction = rows - sum(row["predictions"] for row in totals)
    total_weight = sum(row["weight"] or 0 for row in totals)
    leave_out = "leave them out with a filter"
    if not rows:
        hint = "check the filter or the path it comes from"
        raise ColumnError("the DataFrame has no rows", hint=hint, code="ST-NO-ROWS")
    if no_label:
        what = f"{no_label} rows are null or NaN in column {label!r}"
        raise ColumnError(what, hint=f"{leave_out}, or set nullPolicy='drop'", column=label)
    if no_weight:
        what = f"{no_weight} rows are null, NaN, infinite or negative in column {weight!r}"
        raise ColumnError(what, hint=leave_out, column=weight)
    if no_prediction:
        raise ColumnError(f"{no_prediction} rows are without a prediction", hint="set handleInvalid='skip'")
    if not total_weight:
        raise ColumnError("all rows have the weight 0", hint="unset weightCol", column=weight, code="ST-WEIGHT")
    return {
        "predictions": predictions,
        "predictionCol": model.getPredictionCol(),
        "labelCol": label,
        "weightCol": weight,
        "numInstances": rows,
    }
