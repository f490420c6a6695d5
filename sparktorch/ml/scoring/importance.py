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

_AS_IT_IS = -1


def _ratio(part: Column, whole: Column) -> Column:
    """Returns a quotient, null for a zero divisor: Spark raises there, or not, by a setting."""
    return part / F.nullif(whole, F.lit(0.0))


def _metric(name: str) -> Column:
    """Returns what a metric is, by its name in the summaries, of sums by variant."""
    mean_square = _ratio(F.sum("squares"), F.sum("weight"))
    metrics = {
        "accuracy": _ratio(F.sum("hits"), F.sum("weight")),
        "areaUnderROC": _ratio(F.sum("ordered"), F.sum("positive") * F.sum("negative")),
        "meanAbsoluteError": _ratio(F.sum("differences"), F.sum("weight")),
        "meanSquaredError": mean_square,
        "rootMeanSquaredError": F.sqrt(mean_square),
        "r2": 1 - _ratio(F.sum("squares"), F.sum("label2") - _ratio(F.sum("label1") ** 2, F.sum("weight"))),
    }
    return metrics[name]


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
        score: Of a classifier with two classes: what is larger for class 1, of the output of `transform`.
        repeats: How often each column is shuffled (> 0).
        seed: Of the shuffling.

    Raises:
        ConfigError: `metric` is none of the model's, or `repeats` is out of range.
        ColumnError: A column is missing, or is of another type than in the fit; there are no rows; a label is no class
            of the model; or the metric needs different labels, and there is one.
    """
    above("repeats", repeats, 0)
    one_of("metric", metric, tuple(valid))
    inputs, names = input_names(model), ColumnNames.of(dataset)
    renamed = [f"{model.uid}_{place}" for place in range(len(inputs))]
    weight = weight_column(model)
    kept = {model.getLabelCol(): label} | ({weight: names.column(weight)} if weight else {})
    taken = dict(zip(renamed, map(names.column, inputs), strict=True)) | kept
    rows = dataset.select(*[column.alias(name) for name, column in taken.items()])
    mixed = F.xxhash64(F.lit(seed), *map(quoted, taken))  # not in the order of files
    parts = _partitions(dataset)
    rows = (rows.repartition(parts, mixed) if parts else rows.repartition(mixed)).sortWithinPartitions(mixed)
    variant = f"{model.uid}_variant"
    schema = rows.withColumn(variant, F.lit(_AS_IT_IS)).schema
    shuffled = partial(_variants, names=schema.names, columns=len(inputs), repeats=repeats, seed=seed)
    variants = rows.mapInArrow(shuffled, schema)
    named = model.copy({model.inputCols: renamed})
    also = (quoted(variant).alias("variant"), score.alias("score"))
    with compared(named, named.transform, variants, *also, kept=False) as (_, scored):
        known = scored.where("label is not null and prediction is not null")
        origin = _some_label(dataset.select(kept[model.getLabelCol()].cast("double"))) if metric == "r2" else 0.0
        classes = getattr(model, "numClasses", None)  # a regressor has none
        by_variant = {row["variant"]: row for row in _by_variant(known, metric, origin, classes).collect()}
    hint = "check the filter or the path it comes from"
    refuse_rows((_AS_IT_IS not in by_variant, None, "no row has a label and a prediction", hint, ""))
    _check(by_variant[_AS_IT_IS], model, metric)
    found = {variant: row["metric"] for variant, row in by_variant.items()}
    worse = -1.0 if metric.endswith("Error") else 1.0
    drops = worse * (found.pop(_AS_IT_IS) - np.array([found[at] for at in sorted(found)]).reshape(-1, repeats))
    table = pd.DataFrame({"column": inputs, "importance": drops.mean(1), "deviation": drops.std(1)})
    return table.sort_values("importance", ascending=False, kind="stable", ignore_index=True)


def _partitions(dataset: DataFrame) -> int | None:
    """Returns how many partitions have rows enough to shuffle; `None` where Spark joins small ones itself."""
    spark = dataset.sparkSession
    if all(switched_on(spark, f"spark.sql.adaptive.{name}") for name in ("enabled", "coalescePartitions.enabled")):
        return None
    batch = int(setting(spark, "spark.sql.execution.arrow.maxRecordsPerBatch", "10000"))
    return max(1, dataset.count() // max(1, batch))


def _some_label(labels: DataFrame) -> float:
    """Returns a label, from which the others differ by less than from 0 where all are large, as times are."""
    found = labels.toDF("label").where("label is not null and not isnan(label)").first()
    return float(found["label"]) if found else 0.0


def _check(row: Row, model: Any, metric: str) -> None:
    """Refuses labels that are no classes, and those of which there is no metric, by the row of the unchanged rows."""
    label = model.getLabelCol()
    if row["stranger"] is not None:
        given = None if model.labels and row["stranger"] == -1 else row["stranger"]
        raise no_class(given, row["strangers"], model.numClasses, label, model.labels)
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
        for variant in range(_AS_IT_IS, columns * repeats):
            arrays = list(batch.columns)
            if variant != _AS_IT_IS:
                place = variant // repeats
                arrays[place] = arrays[place].take(pa.array(draw.permutation(batch.num_rows)))
            arrays.append(pa.array(np.full(batch.num_rows, variant, np.int32)))
            yield pa.RecordBatch.from_arrays(arrays, names=names)


def _by_variant(scored: DataFrame, metric: str, origin: float, classes: int | None) -> DataFrame:
    """Returns `variant`, `metric`, `weight` and of labels that are no class the least, `stranger`, and their number.

    `scored` has `label`, `prediction`, `weight`, `score` and `variant`; `origin` is near the labels.
    """
    label, weight, error = F.col("label"), F.col("weight"), F.col("label") - F.col("prediction")
    apart = label - origin  # squares of large labels would differ by less than their last digit
    strange = F.lit(False) if classes is None else (label < 0) | (label >= classes) | (label != F.rint(label))
    sums: Mapping[str, Column] = {
        "weight": weight,
        "hits": F.when(error == 0, weight).otherwise(0.0),
        "positive": F.when(label == 1, weight).otherwise(0.0),
        "negative": F.when(label == 1, 0.0).otherwise(weight),
        "differences": weight * F.abs(error),
        "squares": weight * error * error,
        "label1": weight * apart,
        "label2": weight * apart * apart,
        "strangers": strange.cast("long"),
    }
    stranger = F.min(F.when(strange, label))
    groups = scored.groupBy("variant", "score").agg(
        *[F.sum(column).alias(name) for name, column in sums.items()], stranger.alias("stranger")
    )
    lower = Window.partitionBy("variant").orderBy("score").rowsBetween(Window.unboundedPreceding, -1)
    below = F.coalesce(F.sum("negative").over(lower), F.lit(0.0))
    groups = groups.withColumn("ordered", F.col("positive") * (below + F.col("negative") / 2))
    columns = {"metric": _metric(metric), "weight": F.sum("weight"), "stranger": F.min("stranger")}
    columns["strangers"] = F.sum("strangers")
    return groups.groupBy("variant").agg(*[column.alias(name) for name, column in columns.items()])
