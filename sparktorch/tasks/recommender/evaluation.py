"""Metrics of lists of recommendations."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.ml.scoring.comparison import refuse_rows

__all__ = ["RankingMetrics", "ranking_metrics"]


class RankingMetrics(NamedTuple):
    """Metrics, each of which is a mean over users as Spark's `RankingEvaluator` defines it.

    Attributes:
        ndcgAtK: Normalised discounted cumulative gain of the lists.
        precisionAtK: Share of the `k` recommended items that are relevant.
        recallAtK: Share of the relevant items that are recommended.
        users: Number of users.
    """

    ndcgAtK: float
    precisionAtK: float
    recallAtK: float
    users: int


def ranking_metrics(lists: DataFrame, user: str, item: str, k: int) -> RankingMetrics:
    """Compares the `k` recommended items of each user with the relevant ones.

    Args:
        lists: A row for each user: `recommendations`, an array of structs with the field `item`, and `relevant`, an
            array of items.
        user: The column of users, which the error names.
        item: The field of `recommendations` that has the items.
        k: The number of recommendations.

    Raises:
        ColumnError: There are no rows.
    """
    hits = F.transform(F.col("recommendations"), lambda entry: F.array_contains("relevant", entry[item]))
    hit_count = _sum(F.transform(hits, lambda hit: hit.cast("double")))
    gains = F.transform(hits, lambda hit, position: F.when(hit, _gain(position)).otherwise(0.0))
    last_position = F.least(F.size("relevant"), F.lit(k)) - 1
    ideal_gains = F.transform(F.sequence(F.lit(0), last_position), _gain)
    ndcg = _sum(gains) / _sum(ideal_gains)
    precision = hit_count / k
    recall = hit_count / F.size("relevant")
    (row,) = lists.agg(F.avg(ndcg), F.avg(precision), F.avg(recall), F.count(F.lit(1))).collect()
    metrics = RankingMetrics(*row)
    what = f"column {user!r} has no user that the fit had, with an item to compare with"
    refuse_rows((not metrics.users, user, what, "check the filter, and that ids are those of the fit", "ST-NO-ROWS"))
    return metrics


def _sum(values: Column) -> Column:
    return F.aggregate(values, F.lit(0.0), lambda total, value: total + value)


def _gain(position: Column) -> Column:
    """Returns the gain of a relevant item at a position, which counts from 0."""
    return F.lit(1.0) / F.log2(position + 2)
