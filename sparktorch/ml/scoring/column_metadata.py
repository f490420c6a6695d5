"""ML attributes: what a column says of its numbers to the Spark stages behind it.

With them `VectorAssembler` knows sizes without a job, on streams too, and `IndexToString` knows the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from sparktorch.spark.column_names import ColumnNames

__all__ = ["labels_of", "nominal", "numeric", "vector"]


def labels_of(dataset: DataFrame, column: str) -> tuple[str, ...]:
    """Returns what the classes in a column are called, as `StringIndexer` notes it; `()` where nothing does."""
    found = [dataset.schema[name].metadata for name in ColumnNames.of(dataset).called(column)]
    attribute = found[0].get("ml_attr", {}) if found else {}
    return tuple(map(str, attribute.get("vals", ())))


def nominal(classes: int, labels: Sequence[str]) -> dict[str, Any]:
    """Returns the attribute of classes, with their labels where these are known."""
    values = {"vals": list(labels)} if labels else {"num_vals": classes}
    return {"ml_attr": {"type": "nominal", **values}}


def numeric() -> dict[str, Any]:
    """Returns the attribute of numbers, which Spark writes without a type."""
    return {"ml_attr": {}}


def vector(size: int) -> dict[str, Any]:
    """Returns the attribute of ML vectors of one size."""
    return {"ml_attr": {"num_attrs": size}}
