"""Scores in an order that tests can compare."""

from __future__ import annotations

from pyspark.sql import DataFrame, Row

__all__ = ["sorted_rows"]


def sorted_rows(scored: DataFrame, column: str = "target") -> list[Row]:
    """The rows in the order of a column; Spark would score them twice, once to find out where to divide them."""
    return sorted(scored.collect(), key=lambda row: row[column])
