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

_SHOWN = 10  # The NDCG of so many rows of a group is computed unasked.


@dataclass(frozen=True, kw_only=True, repr=False)
class RankingSummary(Summary):
    """The metrics of a ranking, means over groups.

    Attributes:
        groupCol: The column that groups rows.
        numGroups: Number of groups.
        meanReciprocalRank: The mean of one over the rank of a group's first row with a label above 0; 0 where there is
            none. Rows with the same score and the label 0 come before it.
    """

    groupCol: str
    numGroups: int
    meanReciprocalRank: float
    _ndcg: dict[int | None, float]
    _ndcg_of: Callable[[int | None], float]

    def ndcg(self, k: int | None = None) -> float:
        """Returns the mean normalised discounted cumulative gain of the first `k` rows of a group, or of all of them.

        It equals scikit-learn's `ndcg_score`: the gain is the label, rows with equal scores share theirs, and a group
        without labels above 0 has 0. Other `k` than 10 and `None` score the rows again.
        """
        if k is not None:
            at_least("k", k, 1)
        if k not in self._ndcg:
            self._ndcg[k] = self._ndcg_of(k)
        return self._ndcg[k]


def evaluate_ranker(
    model: RankingModelParams, transform: Callable[[DataFrame], DataFrame], dataset: DataFrame
) -> RankingSummary:
    """Scores the rows and compares their order with the labels; the model's output column has a name.

    A `ColumnError` refuses columns that are missing or not numeric, rows without group, label, weight or prediction,
    and negative labels.
    """
    name = model.getGroupCol()
    group = ColumnNames.of(dataset).column(name).alias("group")
    with compared(model, transform, dataset, group, persisted=True) as (predictions, rows):
        grouped = F.count("group").alias("groups"), F.sum((F.col("label") < 0).cast("int")).alias("negative")
        (counts,) = rows.agg(*totals(), *grouped).collect()
        summary = described(model, predictions, [counts])
        missing, below, label = counts["rows"] - counts["groups"], counts["negative"], model.getLabelCol()
        of_group = f"{counted(missing, 'row is', 'rows are')} null in column {name!r}"
        of_label = f"{counted(below, 'label is', 'labels are')} below 0 in column {label!r}"
        refuse_rows(
            (missing, name, of_group, "leave them out with a filter", ""),
            (below, label, of_label, "0 is for rows that do not matter", ""),
        )
        measured = _measured(rows, [_SHOWN, None])

        def ndcg_of(k: int | None) -> float:
            return float(_measured(rows, [k])["ndcg_0"])

        return RankingSummary(
            **summary,
            groupCol=name,
            numGroups=measured["groups"],
            meanReciprocalRank=measured["mrr"],
            _ndcg={_SHOWN: measured["ndcg_0"], None: measured["ndcg_1"]},
            _ndcg_of=ndcg_of,
        )


def _measured(rows: DataFrame, ks: list[int | None]) -> Row:
    """Returns the means over groups: `groups`, `mrr`, and `ndcg_0`, ... for each number of rows."""
    group = Window.partitionBy("group")
    ranked = rows.select(
        "*",
        F.row_number().over(group.orderBy(F.desc("prediction"))).alias("position"),
        F.row_number().over(group.orderBy(F.desc("label"))).alias("ideal"),
        F.avg("label").over(Window.partitionBy("group", "prediction")).alias("gain"),  # Equal scores share their gains.
        F.max(F.when(F.col("label") > 0, F.col("prediction"))).over(group).alias("best"),
    )

    def gained(gain: str, position: str, k: int | None) -> Column:
        counts_in = F.lit(True) if k is None else F.col(position) <= k
        return F.sum(F.when(counts_in, F.col(gain) / F.log2(F.col(position) + 1)).otherwise(0.0))

    def ndcg(k: int | None) -> Column:
        return F.try_divide(gained("gain", "position", k), gained("label", "ideal", k))

    ahead = F.sum(((F.col("label") <= 0) & (F.col("prediction") >= F.col("best"))).cast("int"))
    metrics = {"mrr": 1 / (1 + ahead)} | {f"ndcg_{index}": ndcg(k) for index, k in enumerate(ks)}
    of_group = [F.coalesce(column, F.lit(0.0)).alias(name) for name, column in metrics.items()]
    by_group = ranked.groupBy("group").agg(F.avg("weight").alias("weight"), *of_group)
    weight = F.col("weight")
    means = [(F.sum(F.col(name) * weight) / F.sum(weight)).alias(name) for name in metrics]
    (row,) = by_group.agg(F.count(F.lit(1)).alias("groups"), *means).collect()
    return row
