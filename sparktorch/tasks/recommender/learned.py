"""What the recommender learns of the rows before they train: users, items, and figures of the ratings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch.errors import ColumnError, ConfigError
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import table_of
from sparktorch.tasks.recommender.pairs import PairColumns, id_type, structs
from sparktorch.tasks.shared.column_statistics import check_rows
from sparktorch.tasks.shared.held_out import free_name

__all__ = ["LEAST_OF_EACH", "LearnedPairs", "learn_pairs"]

LEAST_OF_EACH = 3  # Users and items with fewer rows have none held out.


class LearnedPairs(NamedTuple):
    """What an estimator has learned of the rows.

    Attributes:
        users: The users: structs of the id and of each feature.
        items: The items, likewise.
        mean: The mean of the ratings.
        deviation: The standard deviation of the ratings; 0 if they are equal.
        group: The column that tells apart what a user has chosen in training and in validation.
        weight: The column of weights.
        rows: The number of rows.
        rare: The number of rows of users and items that have too few to hold some out.
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
    """Learns of the rows that train, all but those in which the column `marks` is true, in two jobs.

    Raises:
        ColumnError: A column is of no type that it can have, ratings of choices are negative, or no rows train.
        ConfigError: A column has two roles.
    """
    names = ColumnNames.of(dataset)
    repeated = names.repeated(columns.with_rating)
    if repeated:
        raise ConfigError(f"column {repeated!r} has two roles", hint="name another one for each", param="userCol")
    check_numbers(names, columns.with_rating[2:])
    complete = dataset.where(columns.complete(names))  # The ranks refuse other rows, or leave them out.
    rows = complete.where(~names.column(marks)) if marks else complete
    rating = columns.rating
    score = names.column(rating).cast("double") if rating else F.lit(0.0)
    tables: list[pa.StructArray] = []
    rare = 0
    for name, features in ((columns.user, columns.user_features), (columns.item, columns.item_features)):
        groups = rows.groupBy(names.column(name).cast(id_type(names, name)).alias("id"))
        figures = [
            F.max(names.column(feature).cast("double")).alias(f"f{index}") for index, feature in enumerate(features)
        ]
        of_ratings = [F.avg(score).alias("mean"), F.var_pop(score).alias("variance")]
        extremes = [F.min(score).alias("least"), F.max(score).alias("most")]
        groups_table = table_of(groups.agg(*figures, F.count(F.lit(1)).alias("rows"), *of_ratings, *extremes))
        check_rows(groups_table.num_rows)
        features_table = groups_table.sort_by("id").select([0, *range(1, 1 + len(features))])
        tables.append(structs(features_table, [name, *features]))
        count = pc.sum(groups_table["rows"]).as_py()
        mean, deviation = _moments(*(groups_table[name].to_numpy() for name in ("rows", "mean", "variance")))
        least, most = pc.min(groups_table["least"]).as_py(), pc.max(groups_table["most"]).as_py()
        rare += pc.sum(groups_table["rows"].filter(pc.less(groups_table["rows"], LEAST_OF_EACH))).as_py() or 0
    if implicit and rating and marks:
        least = complete.agg(F.min(score)).collect()[0][0]  # Rows for validation are weighed, too.
    if implicit and rating and least < 0:
        what, hint = f"column {rating!r} has ratings below 0", "leave these rows out, or learn what users rate"
        raise ColumnError(what, hint=hint, column=rating, code="ST-WEIGHT")
    users, items = tables
    group = free_name(names, "_chosen_by") if implicit else ""
    weight = free_name(names, "_weight") if implicit else ""
    if least == most:  # What rounding leaves of equal ratings is no deviation.
        deviation = 0.0
    return LearnedPairs(users, items, mean, deviation, group, weight, count, rare)


def _moments(rows: Any, means: Any, variances: Any) -> tuple[float, float]:
    """Returns mean and standard deviation of ratings by the number of rows, mean and variance of each group.

    The last digits, which depend on the order in which Spark adds up, are left out.
    """
    mean = np.average(means, weights=rows)
    variance = np.average(variances + np.square(means - mean), weights=rows)
    return float(f"{mean:.8g}"), float(f"{variance**0.5:.6g}")
