"""Metrics of lists of recommendations."""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.ml.scoring.comparison import refuse_rows

__all__ = ["RankingMetrics", "ranking_metrics"]


class RankingMetrics(NamedTuple):
    """Means over users, each as Spark's `RankingEvaluator` defines it.

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
    """Compares the `k` items of each row's `recommendations`, structs with `item`, with its array `relevant`.

    A `ColumnError` says that there are no rows, each of which is one of `user`.
    """
    hits = F.transform(F.col("recommendations"), lambda entry: F.array_contains("relevant", entry[item]))
    right = _sum(F.transform(hits, lambda hit: hit.cast("double")))
    gains = F.transform(hits, lambda hit, position: F.when(hit, _gain(position)).otherwise(0.0))
    last = F.least(F.size("relevant"), F.lit(k)) - 1
    ideal = F.transform(F.sequence(F.lit(0), last), _gain)
    means = (_sum(gains) / _sum(ideal), right / k, right / F.size("relevant"))
    metrics = RankingMetrics(*lists.agg(*map(F.avg, means), F.count(F.lit(1))).collect()[0])
    what = f"column {user!r} has no user that the fit had, with an item to compare with"
    refuse_rows((not metrics.users, user, what, "check the filter, and that ids are those of the fit", "ST-NO-ROWS"))
    return metrics


def _sum(values: Column) -> Column:
    return F.aggregate(values, F.lit(0.0), lambda total, value: total + value)


def _gain(position: Column) -> Column:
    return F.lit(1.0) / F.log2(position + 2)
