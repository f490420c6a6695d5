"""The rows that a training holds out, to see when it no longer improves, are marked by a hash of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.shared.settings import TaskSettings

__all__ = [
    "MOST_HELD_OUT",
    "Sample",
    "free_name",
    "hashable",
    "in_share",
    "marked",
    "too_few",
    "without_nulls",
]

MOST_HELD_OUT = 50_000  # This number of samples measures a loss to less than a hundredth of its deviation.
_PARTS = 1 << 20  # The hash divides the rows into this number of parts.
_SALT = "sparktorch: held out"  # It makes the hash independent of the hash by which rows go to workers.


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The samples of a training: rows, groups or windows.

    Attributes:
        trained: Number of samples that train.
        held_out: Number of samples that are held out, as far as it is known before the training.
        chosen_by: By what the held-out samples were chosen; empty if the estimator has held none out itself.
    """

    trained: int
    held_out: int = 0
    chosen_by: str = ""


def too_few(trained: int, held_out: int, task: TaskSettings) -> bool:
    """Whether the held-out samples are too few, or leave too few to train.

    They also leave too few if very many samples are equal: a hash cannot divide equal samples.
    """
    return trained < task.least_trained or not task.least_held_out <= held_out <= trained


def free_name(names: ColumnNames, name: str = "_held_out") -> str:
    """Returns a name that no column has: `name`, with as many underscores before it as that takes."""
    taken = {name.lower() for name in names.schema.names}
    while name in taken:
        name = f"_{name}"
    return name


def hashable(names: ColumnNames, columns: Iterable[str]) -> list[Column]:
    """Returns the columns whose type Spark can hash."""
    return [names.column(name) for name in columns if _has_hash(names.type_of(name))]


def in_share(columns: Sequence[Column], share: float) -> Column:
    """Returns the condition that a row is in a share of all rows, by a hash of its values in the columns.

    It chooses the same rows in any partitioning.
    """
    return F.pmod(F.xxhash64(F.lit(_SALT), *columns), F.lit(_PARTS)) < F.lit(round(share * _PARTS))


def _has_hash(kind: T.DataType) -> bool:
    if isinstance(kind, T.ArrayType):
        return _has_hash(kind.elementType)
    if isinstance(kind, T.StructType):
        return all(_has_hash(field.dataType) for field in kind.fields)
    return not isinstance(kind, T.MapType) and kind.typeName() != "variant"


def marked(dataset: DataFrame, held_out: Column, name: str) -> DataFrame:
    """Returns the rows with another column, which says whether a row is held out; null becomes false."""
    return dataset.select("*", F.coalesce(held_out, F.lit(False)).alias(name))


def without_nulls(dataset: DataFrame, columns: Iterable[str]) -> DataFrame:
    """Returns the rows in which none of the columns is null or NaN."""
    names = ColumnNames.of(dataset)
    for name in columns:
        column = names.column(name)
        dataset = dataset.where(column.isNotNull())
        if isinstance(names.type_of(name), T.FloatType | T.DoubleType):
            dataset = dataset.where(~F.isnan(column))
    return dataset
