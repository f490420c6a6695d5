"""ML attributes, the column metadata that later Spark stages read, and checks of columns with numbers and labels.

`VectorAssembler` reads vector sizes from ML attributes without a job, also on streams; `IndexToString` reads labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.errors import ColumnError
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC
from sparktorch.spark.frame.refusals import no_number

__all__ = ["check_numbers", "class_index", "classes_of", "double_or_null", "labels_of", "nominal", "numeric", "vector"]


def check_numbers(names: ColumnNames, columns: Iterable[str]) -> None:
    """Refuses columns that hold neither numbers nor booleans."""
    for column in columns:
        kind = names.type_of(column)
        if not isinstance(kind, NUMERIC):
            raise no_number(kind, column)


def double_or_null(column: Column) -> Column:
    """Returns a column of numbers as double, with null in place of NaN."""
    return F.nanvl(column.cast("double"), F.lit(None).cast("double"))


def labels_of(dataset: DataFrame, column: str) -> tuple[str, ...]:
    """Returns the labels in a column's metadata, as `StringIndexer` writes them; `()` if there are none."""
    return tuple(map(str, _attribute(dataset, column).get("vals", ())))


def classes_of(dataset: DataFrame, column: str) -> int:
    """Returns the number of classes in a column's metadata, as Spark's classifiers take it; 0 if it has none."""
    attribute = _attribute(dataset, column)
    if attribute.get("type") == "binary":
        return 2
    return len(attribute.get("vals", ())) or attribute.get("num_vals", 0)


def _attribute(dataset: DataFrame, column: str) -> dict[str, Any]:
    metadata = [dataset.schema[name].metadata for name in ColumnNames.of(dataset).called(column)]
    return metadata[0].get("ml_attr", {}) if metadata else {}


def class_index(dataset: DataFrame, column: str, labels: Sequence[str]) -> Column:
    """Returns a column of labels as class indices.

    Strings become their indices in `labels`, or -1 if `labels` lacks them; numbers are indices already. A `ColumnError`
    refuses other types, and numbers that stand for other labels by the column's metadata.
    """
    names = ColumnNames.of(dataset)
    kind = names.type_of(column)
    values = names.column(column)
    if labels and isinstance(kind, T.StringType):
        # `array_position` counts from 1, and returns 0 for a string that is not in the array.
        return (F.array_position(F.array(*map(F.lit, labels)), values) - 1).cast("double")
    use_same_indexer = "; transform the rows with the StringIndexerModel that indexed those of the fit"
    if not isinstance(kind, NUMERIC):
        hint = "labels are the numbers 0, 1, ... of their classes"
        if isinstance(kind, T.StringType):
            hint += use_same_indexer
        raise no_number(kind, column, hint)
    for index, (ours, theirs) in enumerate(zip(labels, labels_of(dataset, column), strict=False)):
        if ours != theirs:
            what = f"index {index} of column {column!r} is the label {theirs!r}, the model's class {index} is {ours!r}"
            hint = f"set labelCol to a column of the labels themselves{use_same_indexer}"
            raise ColumnError(what, hint=hint, column=column)
    return values


def nominal(classes: int, labels: Sequence[str]) -> dict[str, Any]:
    """Returns the attribute for class indices, with the labels if there are any."""
    values = {"vals": list(labels)} if labels else {"num_vals": classes}
    return {"ml_attr": {"type": "nominal", **values}}


def numeric() -> dict[str, Any]:
    """Returns the attribute for numbers, without a type, as Spark writes it."""
    return {"ml_attr": {}}


def vector(size: int) -> dict[str, Any]:
    """Returns the attribute for ML vectors with so many elements."""
    return {"ml_attr": {"num_attrs": size}}
