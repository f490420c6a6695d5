"""The rows that a training holds out to see when it no longer improves: marked by a hash of each, in the JVM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import Window
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
    "windows_held_out",
    "without_nulls",
]

MOST_HELD_OUT = 50_000  # So many samples measure a loss to less than a hundredth of its deviation.
_PARTS = 1 << 20  # The hash divides the rows into so many parts.
_SALT = "sparktorch: held out"  # Rows go to workers by another hash, which this one must not follow.


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The samples of a training: rows, groups or windows.

    Attributes:
        trained: Number of samples that train.
        held_out: Number of samples that are held out, as far as it is known before the training.
        chosen_by: What has decided which these are, empty where the training holds none out itself.
    """

    trained: int
    held_out: int = 0
    chosen_by: str = ""


def too_few(trained: int, held_out: int, task: TaskSettings) -> bool:
    """Whether the samples are too few to hold some out, or equal ones are so many that the hash cannot divide them."""
    return trained < task.least_trained or not task.least_held_out <= held_out <= trained


def windows_held_out(
    rows: int, window: Window, share: float, most: float = 1.0, *, few: bool = False
) -> tuple[int, int, int]:
    """Returns of a series how many windows train and are held out, and how many of its last rows are marked for that.

    No row that is forecast in a window which is held out is forecast in one that trains: windows between them do
    neither. Fewer windows than a horizon has rows forecast much the same rows, and say too little of others: where the
    share has no more, or would leave less than half of the windows to train, none are held out; with `few`, as where a
    user asks for validation, one is enough. `most` is the largest share, whatever that says.
    """
    windows = max(0, (rows - window.rows) // window.step + 1)
    alike = -(-window.horizon // window.step)
    tried = [int(windows * share), alike] if windows * share >= alike else []
    if few and share and windows:
        tried += [int(windows * share), 1]
    for count in tried:
        held_out = max(1, min(count, int(windows * most)))
        trained = windows - held_out + 1 - alike
        if 2 * trained >= windows:
            return trained, held_out, (held_out - 1) * window.step + window.horizon
    return windows, 0, 0


def free_name(names: ColumnNames, name: str = "_held_out") -> str:
    """Returns a name that no column has."""
    existing = {name.lower() for name in names.schema.names}
    while name in existing:
        name = f"_{name}"
    return name


def hashable(names: ColumnNames, columns: Iterable[str]) -> list[Column]:
    """Returns those of the columns whose type Spark can hash."""
    return [names.column(name) for name in columns if _has_hash(names.type_of(name))]


def in_share(columns: Sequence[Column], share: float) -> Column:
    """Returns whether a row is in a share of all rows, by the hash of its values: the same in any partitioning."""
    return F.pmod(F.xxhash64(F.lit(_SALT), *columns), F.lit(_PARTS)) < F.lit(round(share * _PARTS))


def _has_hash(kind: T.DataType) -> bool:
    if isinstance(kind, T.ArrayType):
        return _has_hash(kind.elementType)
    if isinstance(kind, T.StructType):
        return all(_has_hash(field.dataType) for field in kind.fields)
    return not isinstance(kind, T.MapType) and kind.typeName() != "variant"


def marked(dataset: DataFrame, held_out: Column, name: str) -> DataFrame:
    """Returns the rows with a boolean column of that name."""
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
