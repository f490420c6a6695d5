"""What the evaluations share: the rows that are compared with their labels, and the base class of the summaries."""

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
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames, quoted

__all__ = ["Summary", "Transform", "compared", "described", "refuse_rows", "totals", "weight_column"]

Transform = Callable[[DataFrame], DataFrame]


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary:
    """Base class of the summaries.

    Attributes:
        predictions: The output of `transform`; not cached, so each action on it scores again.
        predictionCol: Its column of predictions.
        labelCol: Its column of true values.
        weightCol: Its column of weights, used by all metrics; "" for equal weights.
        numInstances: Number of rows.
    """

    predictions: DataFrame
    predictionCol: str
    labelCol: str
    weightCol: str
    numInstances: int

    _shown: ClassVar[tuple[str, ...]] = ("numInstances",)  # the metrics that text and HTML have

    def __repr__(self) -> str:
        """Returns the class with its main metrics."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._metrics.items())})"

    def _repr_html_(self) -> str:
        return html.block(type(self).__name__, "", html.pairs(self._metrics))

    @property
    def _metrics(self) -> dict[str, str]:
        return {name: html.number(getattr(self, name)) for name in self._shown}


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
    kept: bool,
    label: Column | None = None,
) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Yields two DataFrames: the output of `transform`, and its `label`, `prediction` and `weight` as double.

    `more` are further columns of the second, which is persisted until the block ends if `kept`, so that jobs score
    once. `label` is what `labelCol` means, if not the number that it has. Rows without label or weight are left out if
    the model's `nullPolicy` is "drop", as in the fit.
    """
    names, weight = ColumnNames.of(dataset), weight_column(model)
    check_numbers(names, [*([model.getLabelCol()] if label is None else []), *([weight] if weight else [])])
    label = names.column(model.getLabelCol()) if label is None else label
    one_of("nullPolicy", model.getNullPolicy(), ("error", "drop", "fill"))
    if model.getNullPolicy() == "drop":
        for needed in (label, *([names.column(weight)] if weight else [])):
            dataset = dataset.where(_there(needed).isNotNull())
    predictions = transform(dataset)
    rows = predictions.select(
        _there(label).alias("label"),
        _there(quoted(model.getPredictionCol())).alias("prediction"),
        (_there(names.column(weight)) if weight else F.lit(1.0)).alias("weight"),
        *more,
    )
    if kept:
        rows.persist()
    try:
        yield predictions, rows
    finally:
        if kept:
            rows.unpersist()


def _there(column: Column) -> Column:
    """Casts a number to double, and NaN to null."""
    return F.nanvl(column.cast("double"), F.lit(None).cast("double"))


def weight_column(model: ClassificationModelParams | RegressionModelParams) -> str:
    """Returns the name of the column of weights; empty if there is none."""
    return model.getWeightCol() or "" if model.isDefined(model.weightCol) else ""


def refuse_rows(*cases: tuple[Any, str | None, str, str, str]) -> None:
    """Refuses rows by the first case whose condition holds: that, the column, what is wrong, a hint, a code."""
    for refused, column, what, hint, code in cases:
        if refused:
            raise ColumnError(what, hint=hint, column=column, code=code)


def described(
    model: ClassificationModelParams | RegressionModelParams, predictions: DataFrame, totals: list[Row]
) -> dict[str, Any]:
    """Returns the fields of all summaries, from rows that have labels, weights and predictions."""
    label, weight = model.getLabelCol(), weight_column(model)
    or_drop = "leave them out with a filter, or set nullPolicy='drop'"
    rows = sum(row["rows"] for row in totals)
    counted = {name: sum(row[name] or 0 for row in totals) for name in ("labels", "weights", "predictions", "weight")}
    no_label, no_weight, no_prediction = (rows - counted[name] for name in ("labels", "weights", "predictions"))
    out, of_weight = "leave them out with a filter", f"null, NaN, infinite or negative in column {weight!r}"
    refuse_rows(
        (not rows, None, "the DataFrame has no rows", "check the filter or the path it comes from", "ST-NO-ROWS"),
        (no_label, label, f"{no_label} rows are null or NaN in column {label!r}", or_drop, ""),
        (no_weight, weight, f"{no_weight} rows are {of_weight}", out, ""),
        (no_prediction, None, f"{no_prediction} rows are without a prediction", "set handleInvalid='skip'", ""),
        (not counted["weight"], weight, "all rows have the weight 0", "unset weightCol", "ST-WEIGHT"),
    )
    return {
        "predictions": predictions,
        "predictionCol": model.getPredictionCol(),
        "labelCol": label,
        "weightCol": weight,
        "numInstances": rows,
    }
