"""ML attributes: column metadata for the Spark stages that follow.

`VectorAssembler` reads vector sizes from them without a job, also on streams; `IndexToString` reads the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from sparktorch.spark.column_names import ColumnNames

__all__ = ["labels_of", "nominal", "numeric", "vector"]


def labels_of(dataset: DataFrame, column: str) -> tuple[str, ...]:
    """Returns the labels in a column's metadata, as `StringIndexer` writes them; `()` if there are none."""
    found = [dataset.schema[name].metadata for name in ColumnNames.of(dataset).called(column)]
    attribute = found[0].get("ml_attr", {}) if found else {}
    return tuple(map(str, attribute.get("vals", ())))


def nominal(classes: int, labels: Sequence[str]) -> dict[str, Any]:
    """Returns the attribute of class indices, with labels if known."""
    values = {"vals": list(labels)} if labels else {"num_vals": classes}
    return {"ml_attr": {"type": "nominal", **values}}


def numeric() -> dict[str, Any]:
    """Returns the attribute of numbers; Spark omits the type."""
    return {"ml_attr": {}}


def vector(size: int) -> dict[str, Any]:
    """Returns the attribute of ML vectors of this size."""
    return {"ml_attr": {"num_attrs": size}}
