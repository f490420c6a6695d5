"""Permutation importance: how much worse a model scores rows among which the values of one column are shuffled.

One job reads the rows once. Its tasks repeat each Arrow batch as it is, and with one column after another shuffled;
`transform` scores all of these variants, and Spark computes the metric of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from sparktorch.base.config import above, one_of
from sparktorch.errors import ColumnError
from sparktorch.ml.params.declare import input_names
from sparktorch.ml.scoring.comparison import compared, weight_column
from sparktorch.spark.column_names import ColumnNames, quoted

__all__ = ["importance_of"]

_AS_IT_IS = -1
_LARGEST = 20.0  # scores beyond are alike; with two decimals, a curve has 4,001 thresholds at most

# What a metric is, by its name in the summaries, of sums by variant: functions, as an expression needs a session.
_METRICS: dict[str, Callable[[], Column]] = {
    "accuracy": lambda: F.sum("hits") / F.sum("weight"),
    "areaUnderROC": lambda: F.sum("ordered") / (F.sum("positive") * F.sum("negative")),
    "meanAbsoluteError": lambda: F.sum("differences") / F.sum("weight"),
    "meanSquaredError": lambda: F.sum("squares") / F.sum("weight"),
    "rootMeanSquaredError": lambda: F.sqrt(F.sum("squares") / F.sum("weight")),
    "r2": lambda: 1 - F.sum("squares") / (F.sum("label2") - F.sum("label1") * F.sum("label1") / F.sum("weight")),
}


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
        ColumnError: A column is missing, or is of another type than in the fit; or there are no rows.
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
    rows = rows.repartition(mixed).sortWithinPartitions(mixed)
    variant = f"{model.uid}_variant"
    schema = rows.withColumn(variant, F.lit(_AS_IT_IS)).schema
    shuffled = partial(_variants, names=schema.names, columns=len(inputs), repeats=repeats, seed=seed)
    variants = rows.mapInArrow(shuffled, schema)
    scores = F.round(F.greatest(F.lit(-_LARGEST), F.least(F.lit(_LARGEST), score)), 2).alias("score")
    named = model.copy({model.inputCols: renamed})
    also = (quoted(variant).alias("variant"), scores)
    with compared(named, named.transform, variants, *also, kept=False) as (_, scored):
        known = scored.where("label is not null and prediction is not null")
        found = {row["variant"]: row["metric"] for row in _by_variant(known, metric).collect()}
    if not found:
        raise ColumnError("no row has a label and a prediction", hint="check the filter or the path it comes from")
    worse = -1.0 if metric.endswith("Error") else 1.0
    drops = worse * (found.pop(_AS_IT_IS) - np.array([found[at] for at in sorted(found)]).reshape(-1, repeats))
    table = pd.DataFrame({"column": inputs, "importance": drops.mean(1), "deviation": drops.std(1)})
    return table.sort_values("importance", ascending=False, kind="stable", ignore_index=True)


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


def _by_variant(scored: DataFrame, metric: str) -> DataFrame:
    """Returns `variant` and `metric` of rows with `label`, `prediction`, `weight`, `score` and `variant`."""
    label, weight, error = F.col("label"), F.col("weight"), F.col("label") - F.col("prediction")
    sums: Mapping[str, Column] = {
        "weight": weight,
        "hits": F.when(error == 0, weight).otherwise(0.0),
        "positive": F.when(label == 1, weight).otherwise(0.0),
        "negative": F.when(label == 1, 0.0).otherwise(weight),
        "differences": weight * F.abs(error),
        "squares": weight * error * error,
        "label1": weight * label,
        "label2": weight * label * label,
    }
    groups = scored.groupBy("variant", "score").agg(*[F.sum(column).alias(name) for name, column in sums.items()])
    lower = Window.partitionBy("variant").orderBy("score").rowsBetween(Window.unboundedPreceding, -1)
    below = F.coalesce(F.sum("negative").over(lower), F.lit(0.0))
    groups = groups.withColumn("ordered", F.col("positive") * (below + F.col("negative") / 2))
    return groups.groupBy("variant").agg(_METRICS[metric]().alias("metric"))
