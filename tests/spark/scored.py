"""Scores in an order that tests can compare, and models that they compare."""

from __future__ import annotations

from typing import Any

import torch
from pyspark.sql import DataFrame, Row

__all__ = ["same_weights", "sorted_rows"]


def sorted_rows(scored: DataFrame, column: str = "target") -> list[Row]:
    """The rows in the order of a column; Spark would score them twice, once to find out where to divide them."""
    return sorted(scored.collect(), key=lambda row: row[column])


def same_weights(one: Any, other: Any) -> bool:
    """Whether two fitted models have the same weights, to the last bit."""
    first, second = one.module.state_dict(), other.module.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
