"""Permutation importance: how much worse a model scores rows among which the values of one column are shuffled.

One job reads the rows once. Its tasks repeat each Arrow batch as it is, and with one column after another shuffled;
`transform` scores all of these variants, and Spark computes the metric of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from sparktorch.base.config import above, one_of
from sparktorch.ml.params.declare import input_names
from sparktorch.ml.scoring.comparison import compared, refuse_rows, weight_column
from sparktorch.ml.scoring.evaluation import no_class
from sparktorch.spark.column_names import ColumnNames, quoted
from sparktorch.spark.session import setting, switched_on

__all__ = ["importance_of"]

_UNSHUFFLED = -1  # This is the number of the variant whose rows are as they came.


def _ratio(part: Column, whole: Column) -> Column:
    """Returns a quotient, null for a zero divisor, where Spark raises an error or not, depending on a setting."""
    return part / F.nullif(whole, F.lit(0.0))


def _metric(name: str) -> Column:
    """Returns a metric, by its name in the summaries, as an expression of the sums of a variant."""
    weight = F.sum("weight")
    if name == "accuracy":
        return _ratio(F.sum("hits"), weight)
    if name == "areaUnderROC":
        return _ratio(F.sum("ordered"), F.sum("positive") * F.sum("negative"))
    if name == "meanAbsoluteError":
        return _ratio(F.sum("differences"), weight)
    if name == "r2":
        return 1 - _ratio(F.sum("squares"), F.sum("label2") - _ratio(F.sum("label1") ** 2, weight))
    mean_squared_error = _ratio(F.sum("squares"), weight)
    return F.sqrt(mean_squared_error) if name == "rootMeanSquaredError" else mean_squared_error


def importance_of(
    model: Any, dataset: DataFrame, label: Column, metric: str, valid: list[str], score: Column, repeats: int, seed: int
) -> pd.DataFrame:
    """Returns `column`, `importance` and `deviation` of each input column, the most important first.

    Args:
        model: A model whose output columns have names.
        dataset: Rows with inputs and labels.
        label: The labels, as numbers.
        metric: Name of the metric.
        valid: Names of the metrics that the model has.
        score: The column of the output of `transform` that is larger for class 1, of a classifier with two classes.
        repeats: How often each column is shuffled (> 0).
        seed: The seed of the shuffling.

    Raises:
        ConfigError: `metric` is none of the model's, or `repeats` is out of range.
        ColumnError: A column is missing, or is of another type than in the fit; there are no rows; a label is no class
            of the model; or the metric needs different labels, and there is one.
    """
    above("repeats", repeats, 0)
    one_of("metric", metric, tuple(valid))
    inputs, names = input_names(model), ColumnNames.of(dataset)
    # Inputs get names of their own: one column may be two inputs, or an input and the label.
    renamed = [f"{model.uid}_{index}" for index in range(len(inputs))]
    columns = dict(zip(renamed, map(names.column, inputs), strict=True))
    columns[model.getLabelCol()] = label
    weight = weight_column(model)
    if weight:
        columns[weight] = names.column(weight)
    rows = dataset.select(*[column.alias(name) for name, column in columns.items()])
    # Rows are shuffled within batches, whose rows must not be alike, as neighbours in a file are: a hash mixes them.
    row_hash = F.xxhash64(F.lit(seed), *map(quoted, columns))
    parts = _partitions(dataset)
    rows = rows.repartition(parts, row_hash) if parts else rows.repartition(row_hash)
    rows = rows.sortWithinPartitions(row_hash)
    variant = f"{model.uid}_variant"
    schema = rows.withColumn(variant, F.lit(_UNSHUFFLED)).schema
    shuffled = partial(_variants, names=schema.names, columns=len(inputs), repeats=repeats, seed=seed)
    variants = rows.mapInArrow(shuffled, schema)
    named = model.copy({model.inputCols: renamed})
    more = (quoted(variant).alias("variant"), score.alias("score"))
    with compared(named, named.transform, variants, *more, persisted=False) as (_, scored):
        complete = scored.where("label is not null and prediction is not null")
        origin = _some_label(dataset.select(label.cast("double"))) if metric == "r2" else 0.0
        classes = getattr(model, "numClasses", None)  # A regressor has none.
        by_variant = {row["variant"]: row for row in _by_variant(complete, metric, origin, classes).collect()}
    hint = "check the filter or the path it comes from"
    refuse_rows((_UNSHUFFLED not in by_variant, None, "no row has a label and a prediction", hint, ""))
    unshuffled = by_variant.pop(_UNSHUFFLED)
    _check(unshuffled, model, metric)
    shuffled_metrics = np.array([by_variant[number]["metric"] for number in sorted(by_variant)]).reshape(-1, repeats)
    # A larger error is worse; for other metrics, a smaller value is.
    sign = -1.0 if metric.endswith("Error") else 1.0
    drops = sign * (unshuffled["metric"] - shuffled_metrics)
    table = pd.DataFrame({"column": inputs, "importance": drops.mean(1), "deviation": drops.std(1)})
    return table.sort_values("importance", ascending=False, kind="stable", ignore_index=True)


def _partitions(dataset: DataFrame) -> int | None:
    """Returns in how many partitions each has a full batch to shuffle; `None` if Spark joins small ones itself."""
    spark = dataset.sparkSession
    if all(switched_on(spark, f"spark.sql.adaptive.{name}") for name in ("enabled", "coalescePartitions.enabled")):
        return None
    batch = int(setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", "10000"))
    return max(1, dataset.count() // max(1, batch))


def _some_label(labels: DataFrame) -> float:
    """Returns any label: where all are large, as times are, they differ less from it than from 0."""
    row = labels.toDF("label").where("label is not null and not isnan(label)").first()
    return float(row["label"]) if row else 0.0


def _check(row: Row, model: Any, metric: str) -> None:
    """Refuses labels that are no classes or of which there is no metric; `row` has the sums of the unshuffled rows."""
    label = model.getLabelCol()
    if row["stranger"] is not None:
        # The index -1 stands for all strings that are no class.
        stranger = None if model.labels and row["stranger"] == -1 else row["stranger"]
        raise no_class(stranger, row["strangers"], model.numClasses, label, model.labels)
    differ = f"{metric!r} compares rows of different labels: take rows that have them"
    refuse_rows(
        (not row["weight"], weight_column(model), "all rows have the weight 0", "unset weightCol", "ST-WEIGHT"),
        (row["metric"] is None, label, "all rows have the same label", differ, "ST-ONE-LABEL"),
    )


def _variants(
    batches: Iterator[pa.RecordBatch], names: list[str], columns: int, repeats: int, seed: int
) -> Iterator[pa.RecordBatch]:
    """Yields each batch as it is, and with each of the first `columns` shuffled, `repeats` times each."""
    context = TaskContext.get()
    draw = np.random.default_rng([seed, context.partitionId() if context else 0])
    for batch in batches:
        for variant in range(_UNSHUFFLED, columns * repeats):
            arrays = list(batch.columns)
            if variant != _UNSHUFFLED:
                index = variant // repeats
                arrays[index] = arrays[index].take(pa.array(draw.permutation(batch.num_rows)))
            arrays.append(pa.array(np.full(batch.num_rows, variant, np.int32)))
            yield pa.RecordBatch.from_arrays(arrays, names=names)


def _by_variant(scored: DataFrame, metric: str, origin: float, classes: int | None) -> DataFrame:
    """Returns `variant`, `metric` and `weight` of each variant, and its labels that are no class.

    Of these labels, `stranger` is the least one, and `strangers` their number. `scored` has `label`, `prediction`,
    `weight`, `score` and `variant`; `origin` is near the labels.
    """
    label, weight, error = F.col("label"), F.col("weight"), F.col("label") - F.col("prediction")
    deviation = label - origin  # Squares of large labels would differ by less than their last digit.
    strange = F.lit(False) if classes is None else (label < 0) | (label >= classes) | (label != F.rint(label))
    sums: Mapping[str, Column] = {
        "weight": weight,
        "hits": F.when(error == 0, weight).otherwise(0.0),
        "positive": F.when(label == 1, weight).otherwise(0.0),
        "negative": F.when(label == 1, 0.0).otherwise(weight),
        "differences": weight * F.abs(error),
        "squares": weight * error * error,
        "label1": weight * deviation,
        "label2": weight * deviation * deviation,
        "strangers": strange.cast("long"),
    }
    stranger = F.min(F.when(strange, label))
    groups = scored.groupBy("variant", "score").agg(
        *[F.sum(column).alias(name) for name, column in sums.items()], stranger.alias("stranger")
    )
    # The area under the curve counts the negative rows below each positive one, and half of those with its score.
    lower = Window.partitionBy("variant").orderBy("score").rowsBetween(Window.unboundedPreceding, -1)
    below = F.coalesce(F.sum("negative").over(lower), F.lit(0.0))
    groups = groups.withColumn("ordered", F.col("positive") * (below + F.col("negative") / 2))
    columns = {"metric": _metric(metric), "weight": F.sum("weight"), "stranger": F.min("stranger")}
    columns["strangers"] = F.sum("strangers")
    return groups.groupBy("variant").agg(*[column.alias(name) for name, column in columns.items()])
