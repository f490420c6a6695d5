"""What the recommender learns from the rows before it trains: users, items, and the mean and deviation of ratings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.errors import ColumnError, ConfigError
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import table_of
from sparktorch.tasks.recommender.pairs import PairColumns, id_type, structs
from sparktorch.tasks.shared.column_statistics import check_rows
from sparktorch.tasks.shared.held_out import free_name

__all__ = ["FEWEST_ROWS", "LearnedPairs", "learn_pairs"]

FEWEST_ROWS = 3  # No row is held out whose user or item has fewer rows than this.


class LearnedPairs(NamedTuple):
    """What an estimator has learned from the rows.

    Attributes:
        users: The users: structs of the id and of each feature.
        items: The items, likewise.
        mean: The mean of the ratings.
        deviation: The standard deviation of the ratings; 0 if they are equal.
        group: The column that groups the rows of a user, with one group for training and one for validation.
        weight: The column of weights.
        rows: The number of rows.
        rare: The number of rows whose user has too few rows to hold some out, plus the number whose item has.
    """

    users: pa.StructArray
    items: pa.StructArray
    mean: float
    deviation: float = 1.0
    group: str = ""
    weight: str = ""
    rows: int = 0
    rare: int = 0


def learn_pairs(dataset: DataFrame, columns: PairColumns, *, implicit: bool, marks: str | None) -> LearnedPairs:
    """Learns from the training rows, in a job for users and one for items.

    Args:
        dataset: The rows.
        columns: The columns of pairs.
        implicit: Whether the rows are what users have chosen.
        marks: The column that is true in validation rows; without it, all rows are training rows.

    Raises:
        ColumnError: A column is of no type that it can have, no row trains, or ratings of what users have chosen are
            negative.
        ConfigError: A column has two roles.
    """
    names = ColumnNames.of(dataset)
    if repeated := names.repeated(columns.read_by_fit):
        raise ConfigError(f"column {repeated!r} has two roles", hint="name another one for each", param="userCol")
    check_numbers(names, columns.numbers)
    complete = dataset.where(columns.is_complete(names))  # The ranks refuse other rows, or leave them out.
    rows = complete.where(~names.column(marks)) if marks else complete
    rating = columns.rating
    score = names.column(rating).cast("double") if rating else F.lit(0.0)
    score_figures = [
        F.avg(score).alias("mean"),
        F.var_pop(score).alias("variance"),
        F.min(score).alias("least"),
        F.max(score).alias("most"),
    ]
    users = _grouped_by_id(rows, names, columns.user, columns.user_features)
    # The figures of all ratings follow from the figures of each item's ratings.
    items = _grouped_by_id(rows, names, columns.item, columns.item_features, score_figures)
    mean, deviation = _moments(*(items[name].to_numpy() for name in ("rows", "mean", "variance")))
    least = pc.min(items["least"]).as_py()
    if least == pc.max(items["most"]).as_py():
        deviation = 0.0  # Rounding can leave a deviation of equal ratings.
    if implicit and rating:
        if marks:
            least = complete.agg(F.min(score)).collect()[0][0]  # Validation rows have weights, too.
        if least < 0:
            what = f"column {rating!r} has ratings below 0"
            hint = "leave these rows out, or learn what users rate"
            raise ColumnError(what, hint=hint, column=rating, code="ST-WEIGHT")
    return LearnedPairs(
        users=_id_structs(users, columns.user, columns.user_features),
        items=_id_structs(items, columns.item, columns.item_features),
        mean=mean,
        deviation=deviation,
        group=free_name(names, "_chosen_by") if implicit else "",
        weight=free_name(names, "_weight") if implicit else "",
        rows=pc.sum(items["rows"]).as_py(),
        rare=_rare_rows(users) + _rare_rows(items),
    )


def _grouped_by_id(
    rows: DataFrame, names: ColumnNames, name: str, features: Sequence[str], figures: Sequence[Column] = ()
) -> pa.Table:
    """Returns a row for each user or item, by their ids: `id`, `f0`, `f1` ... for features, `rows`, and the figures.

    If an id has several values of a feature, it gets the largest one.
    """
    groups = rows.groupBy(names.column(name).cast(id_type(names, name)).alias("id"))
    largest = [F.max(names.column(feature).cast("double")).alias(f"f{index}") for index, feature in enumerate(features)]
    table = table_of(groups.agg(*largest, F.count(F.lit(1)).alias("rows"), *figures))
    check_rows(table.num_rows)
    return table.sort_by("id")


def _id_structs(table: pa.Table, name: str, features: Sequence[str]) -> pa.StructArray:
    """Returns ids and features, from the columns that `_grouped_by_id` returns, as structs with the users' names."""
    columns = ["id", *(f"f{index}" for index in range(len(features)))]
    return structs(table.select(columns), [name, *features])


def _rare_rows(table: pa.Table) -> int:
    """Returns the number of rows whose user or item has too few rows to hold some out."""
    is_rare = pc.less(table["rows"], FEWEST_ROWS)
    return pc.sum(table["rows"].filter(is_rare)).as_py() or 0  # A sum of nothing is null.


def _moments(rows: Any, means: Any, variances: Any) -> tuple[float, float]:
    """Returns mean and standard deviation of all ratings, from the number, mean and variance of each group's ratings.

    The last digits, which depend on the order in which Spark adds up, are left out.
    """
    mean = np.average(means, weights=rows)
    variance = np.average(variances + np.square(means - mean), weights=rows)
    return float(f"{mean:.8g}"), float(f"{variance**0.5:.6g}")
