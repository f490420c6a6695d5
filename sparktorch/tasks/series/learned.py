"""What the estimator of series learns from the rows before they train: figures, categories, a season and a start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.errors import ColumnError, ConfigError, counted
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.session import setting
from sparktorch.tasks.series.model import check_categories, check_series
from sparktorch.tasks.series.season import learn_start
from sparktorch.tasks.shared.column_statistics import column_statistics, round_figure

__all__ = ["LearnedSeries", "check_columns", "learn_series"]

_MOST_CATEGORIES = 1000  # A static column has at most this number of categories, its most frequent ones.


class LearnedSeries(NamedTuple):
    """What an estimator has learned from the rows.

    Attributes:
        figures: Mean and standard deviation, by column.
        order: The SQL type of the order, and the time zone.
        season: Rows of a season; `None` if the module is the user's.
        start: Arguments of the network for the forecast from which it starts; empty if the module is the user's.
        categories: The categories of each static column, or `None` for a column of numbers.
    """

    figures: dict[str, tuple[float, float]]
    order: tuple[str, str]
    season: int | None
    start: dict[str, float]
    categories: list[list[Any] | None]


def learn_series(dataset: DataFrame, names: ColumnNames, p: Values, *, starts_from_season: bool) -> LearnedSeries:
    """Learns from the training rows; a season and a start only if the network starts from a seasonal forecast.

    Raises:
        ColumnError: A column is of no type that it can have, or holds nulls that are not dropped.
        ConfigError: A column has two roles.
    """
    columns = _numbers_and_categories(p)
    repeated = names.repeated([*(p[name] for name in ("groupCol", "orderCol") if p[name]), *columns])
    if repeated:
        hint = "name it once: the target's past and what is known ahead are seen in the context, too"
        raise ConfigError(f"column {repeated!r} is named twice", hint=hint)
    texts = check_columns(dataset, names, p)
    zone = setting(dataset.sparkSession, "spark.sql.session.timeZone")
    figures = _figures(dataset, names, p, [name for name in columns if name not in texts])
    season, start = learn_start(dataset, names, p, p["context"]) if starts_from_season else (None, {})
    order = (names.type_of(p["orderCol"]).simpleString(), zone)
    return LearnedSeries(figures, order, season, start, _categories(dataset, names, p, texts))


def check_columns(dataset: DataFrame, names: ColumnNames, p: Values) -> list[str]:
    """Refuses columns of a type that they cannot have; returns the static columns that are categories."""
    texts = [name for name in p["staticCols"] if isinstance(names.type_of(name), T.StringType | T.BooleanType)]
    if p.trained is not None:
        # A training that goes on from a fitted model has the model's categories.
        pairs = zip(p["staticCols"], p.trained.params.get("categories", ()), strict=False)
        vocabulary = {name: categories for name, categories in pairs if categories is not None}
        check_categories(names, vocabulary)
        texts = list(vocabulary)
    numbers = [name for name in _numbers_and_categories(p) if name not in texts]
    check_series(dataset.sparkSession, names, p["groupCol"], p["orderCol"], numbers)
    return texts


def _numbers_and_categories(p: Values) -> list[str]:
    """Returns the columns of numbers and categories, that is, all but the series and the order."""
    return [p["labelCol"], *p["pastCols"], *p["futureCols"], *p["staticCols"]]


def _categories(dataset: DataFrame, names: ColumnNames, p: Values, texts: list[str]) -> list[list[Any] | None]:
    """Returns the most frequent categories of each static column in the training rows; `None` for numbers."""
    if p.trained is not None:
        return list(p.trained.params.get("categories") or [None] * len(p["staticCols"]))
    if not texts:
        return [None] * len(p["staticCols"])
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    columns = {name: F.when(trains, names.column(name).cast("string")) for name in texts}
    statistics = column_statistics(dataset, categories=columns, most_categories=_MOST_CATEGORIES)
    vocabulary: dict[str, list[Any]] = {name: sorted(counts) for name, counts in statistics.categories.items()}
    for name in texts:
        if isinstance(names.type_of(name), T.BooleanType):
            vocabulary[name] = [value == "true" for value in vocabulary[name]]
    return [vocabulary.get(name) for name in p["staticCols"]]


def _figures(
    dataset: DataFrame, names: ColumnNames, p: Values, columns: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of columns in the training rows; refuses nulls unless they are dropped."""
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    aggregates = []
    for index, name in enumerate(columns):
        number = names.column(name).cast("double")
        # NaN is larger than infinity in Spark: this makes nulls of both.
        finite = F.when(F.abs(number) < float("inf"), number)
        trained = F.when(trains, finite)
        aggregates += [
            F.count(finite).alias(f"count_{index}"),
            F.avg(trained).alias(f"mean_{index}"),
            F.stddev_pop(trained).alias(f"deviation_{index}"),
        ]
    (row,) = dataset.agg(F.count(F.lit(1)).alias("rows"), *aggregates).collect()
    figures = {}
    for index, name in enumerate(columns):
        missing = row["rows"] - row[f"count_{index}"]
        if missing and p["nullPolicy"] == "error":
            what = f"column {name!r} has {counted(missing, 'row', 'rows')} with null, NaN or infinity"
            hint = "fill them before fit, leave rows out that are yet to come, or set nullPolicy='drop', which leaves "
            raise ColumnError(what, hint=f"{hint}out windows that hold a null", column=name)
        figures[name] = round_figure(row[f"mean_{index}"]), round_figure(row[f"deviation_{index}"]) or 1.0
    return figures
