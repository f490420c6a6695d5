"""Metrics of the order that a ranking model gives the rows of each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from sparktorch.base.config import at_least
from sparktorch.errors import counted
from sparktorch.ml.scoring.comparison import Summary, compared, described, refuse_rows, totals
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.ranking.params import RankingModelParams

__all__ = ["RankingSummary", "evaluate_ranker"]

_DEFAULT_K = 10  # The NDCG of a group's first rows, this number, is always computed.


@dataclass(frozen=True, kw_only=True, repr=False)
class RankingSummary(Summary):
    """The metrics of a ranking, which are means over groups.

    Attributes:
        groupCol: The column that groups rows.
        numGroups: The number of groups.
        meanReciprocalRank: The mean of one over the rank of a group's first row with a label above 0, or of 0 for a
            group without such a row. Rows with the same score and the label 0 count as before it.
    """

    groupCol: str
    numGroups: int
    meanReciprocalRank: float
    _ndcg: dict[int | None, float]
    _compute_ndcg: Callable[[int | None], float]

    def ndcg(self, k: int | None = None) -> float:
        """Returns the mean normalised discounted cumulative gain of the first `k` rows of a group, or of all of them.

        It equals scikit-learn's `ndcg_score`: the gain is the label, rows with equal scores share their gains, and a
        group without labels above 0 has 0. A `k` other than 10 and `None` scores the rows again.
        """
        if k is not None:
            at_least("k", k, 1)
        if k not in self._ndcg:
            self._ndcg[k] = self._compute_ndcg(k)
        return self._ndcg[k]


def evaluate_ranker(
    model: RankingModelParams, transform: Callable[[DataFrame], DataFrame], dataset: DataFrame
) -> RankingSummary:
    """Scores the rows and compares their order with the labels.

    Args:
        model: The model, whose output column has a name.
        transform: The function that scores rows.
        dataset: The rows.

    Raises:
        ColumnError: A column is missing or not numeric, a row has no group, label, weight or prediction, or a label is
            negative.
    """
    group_column = model.getGroupCol()
    label_column = model.getLabelCol()
    group = ColumnNames.of(dataset).column(group_column).alias("group")
    with compared(model, transform, dataset, group, persisted=True) as (predictions, rows):
        with_group = F.count("group").alias("with_group")
        negative_labels = F.sum((F.col("label") < 0).cast("int")).alias("negative")
        (counts,) = rows.agg(*totals(), with_group, negative_labels).collect()
        summary = described(model, predictions, [counts])
        without_group = counts["rows"] - counts["with_group"]
        negative = counts["negative"]
        null_groups = f"{counted(without_group, 'row is', 'rows are')} null in column {group_column!r}"
        labels_below_zero = f"{counted(negative, 'label is', 'labels are')} below 0 in column {label_column!r}"
        refuse_rows(
            (without_group, group_column, null_groups, "leave them out with a filter", ""),
            (negative, label_column, labels_below_zero, "0 is for rows that do not matter", ""),
        )
        metrics = _metrics(rows, [_DEFAULT_K, None])

        def compute_ndcg(k: int | None) -> float:
            return float(_metrics(rows, [k])["ndcg_0"])

        return RankingSummary(
            **summary,
            groupCol=group_column,
            numGroups=metrics["groups"],
            meanReciprocalRank=metrics["mrr"],
            _ndcg={_DEFAULT_K: metrics["ndcg_0"], None: metrics["ndcg_1"]},
            _compute_ndcg=compute_ndcg,
        )


def _metrics(rows: DataFrame, ks: list[int | None]) -> Row:
    """Returns the means over groups: `groups`, `mrr`, and `ndcg_0`, `ndcg_1`, ... for each number of rows in `ks`."""
    group = Window.partitionBy("group")
    ranked = rows.select(
        "*",
        F.row_number().over(group.orderBy(F.desc("prediction"))).alias("rank"),
        F.row_number().over(group.orderBy(F.desc("label"))).alias("ideal_rank"),
        F.avg("label").over(Window.partitionBy("group", "prediction")).alias("gain"),  # Equal scores share their gains.
        F.max(F.when(F.col("label") > 0, F.col("prediction"))).over(group).alias("best_relevant"),
    )

    def discounted_gain(gain: str, rank: str, k: int | None) -> Column:
        counts = F.lit(True) if k is None else F.col(rank) <= k
        return F.sum(F.when(counts, F.col(gain) / F.log2(F.col(rank) + 1)).otherwise(0.0))

    def ndcg(k: int | None) -> Column:
        return F.try_divide(discounted_gain("gain", "rank", k), discounted_gain("label", "ideal_rank", k))

    is_ahead = (F.col("label") <= 0) & (F.col("prediction") >= F.col("best_relevant"))
    metrics = {"mrr": 1 / (1 + F.sum(is_ahead.cast("int")))}
    metrics |= {f"ndcg_{index}": ndcg(k) for index, k in enumerate(ks)}
    # A group without labels above 0 has null, and counts as 0.
    metrics_of_group = [F.coalesce(column, F.lit(0.0)).alias(name) for name, column in metrics.items()]
    by_group = ranked.groupBy("group").agg(F.avg("weight").alias("weight"), *metrics_of_group)
    weight = F.col("weight")
    means = [(F.sum(F.col(name) * weight) / F.sum(weight)).alias(name) for name in metrics]
    (row,) = by_group.agg(F.count(F.lit(1)).alias("groups"), *means).collect()
    return row
