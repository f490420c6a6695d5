"""The model of series: it forecasts the rows to come, and compares forecasts with known rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from sparktorch.base.config import at_least
from sparktorch.data.columns import input_name
from sparktorch.errors import ColumnError, ConfigError, ConflictError
from sparktorch.ml.fit.checks import check_outputs, naming_params
from sparktorch.ml.fit.prepared_data import make_room
from sparktorch.ml.fit.refusals import check_set
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.scoring.column_metadata import check_numbers
from sparktorch.spark.column_names import ColumnNames, quoted
from sparktorch.spark.frame.groups import check_group
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.scoring_udf import scorer_here
from sparktorch.spark.session import is_local, setting
from sparktorch.spark.shipping import send
from sparktorch.tasks.series.evaluation import ForecastSummary, summary_of
from sparktorch.tasks.series.forecasts import Backtest, SeriesColumns, columns_of_quantiles, forecast
from sparktorch.tasks.series.params import ForecastingModelParams

if TYPE_CHECKING:
    from mlflow.models import ModelSignature
    from typing_extensions import Self

__all__ = ["COMPARED", "ForecastingModel", "check_categories", "check_series", "check_windows"]

_ORDERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.DateType, T.TimestampType, T.TimestampNTZType)

COMPARED = ("cutoff", "step", "label", "naive", "scale")  # `evaluate` adds these columns.


class ForecastingModel(TorchModelBase, ForecastingModelParams):
    """A model fitted by `Forecaster`. `transform` is `forecast`: it returns rows to come, and no row of its input."""

    _estimator = "sparktorch.tasks.series.estimator:Forecaster"

    _scores_by_row = False

    def _quality(self, scored: DataFrame, label: str) -> tuple[str, int, float]:
        raise ConfigError("forecasts are of rows yet to come")

    def _mlflow_columns(self) -> dict[str, Any]:
        """Returns what `tracking` writes beside the model; the key "series" says that `SeriesPyFunc` scores it."""
        return {"series": self.columns.to_dict()}

    def _mlflow_signature(self) -> ModelSignature:
        from sparktorch.tasks.series.pyfunc import series_signature

        return series_signature(self.columns)

    def _mlflow_example(self) -> Any:
        from sparktorch.tasks.series.pyfunc import series_example

        return series_example(self.columns)

    @property
    def columns(self) -> SeriesColumns:
        """The columns from which forecasts are made, and the columns of forecasts.

        Raises:
            ConfigError: A Param is out of range.
        """
        p = Values(self)
        check_windows(p)
        _check_forecast(p)
        return SeriesColumns(
            group=p["groupCol"] or "",
            order=p["orderCol"],
            target=p["labelCol"],
            past=p["pastCols"],
            future=p["futureCols"],
            static=p["staticCols"],
            categories=self.trained.params.get("categories", ()),
            context=p["context"],
            horizon=p["horizon"],
            quantiles=p["quantiles"],
            prediction=p["predictionCol"],
            skips=p["handleInvalid"] == "skip",
        )

    def forecast(self, dataset: DataFrame) -> DataFrame:
        """Forecasts the rows after the last one of each series that has a target.

        Args:
            dataset: The last `context` rows of each series, or more, in any order. With `futureCols`, also the next
                `horizon` rows, which have these columns and no target.

        Returns:
            `horizon` rows for each series: `groupCol`, `orderCol`, `predictionCol` (double) and, for each quantile,
            a column such as `prediction_p10`. With quantiles, `predictionCol` is the quantile nearest to 0.5.

        Raises:
            ColumnError: A column is missing or of another type. In the job, a series has fewer than `context` rows,
                nulls in these rows or uneven steps, and `handleInvalid` is not "skip".
        """
        return self._forecast(dataframe_of(dataset, "forecast"), None)

    def evaluate(self, dataset: DataFrame, *, season: int = 1) -> ForecastSummary:
        """Forecasts the last `horizon` rows of each series from the rows before, and compares; see `backtest`."""
        return self.backtest(dataset, season=season)

    def backtest(
        self, dataset: DataFrame, *, origins: int = 1, stride: int | None = None, season: int = 1
    ) -> ForecastSummary:
        """Forecasts known rows from the rows before them, at several times of each series, and compares.

        Args:
            dataset: Rows with a target, in any order.
            origins: Number of forecasts of each series. The last forecast ends with the series' last row.
            stride: Rows from one forecast to the next; by default `horizon`, so that no forecasts overlap.
            season: Rows of a season, for the naive forecast.

        Raises:
            ConfigError: A number is less than 1.
            ColumnError: As from `forecast`.
        """
        stride = self.getHorizon() if stride is None else stride
        for name, value in (("origins", origins), ("stride", stride), ("season", season)):
            at_least(name, value, 1)
        columns = self.columns
        quantiles = dict(zip(columns.quantiles, columns_of_quantiles(columns), strict=True))
        backtest = Backtest(origins=origins, stride=stride, season=season)
        predictions = self._forecast(dataframe_of(dataset, "backtest"), backtest)
        return summary_of(predictions, columns.prediction, quantiles)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self.forecast(dataset)

    def _forecast(self, dataset: DataFrame, backtest: Backtest | None) -> DataFrame:
        """Returns forecasts of the rows to come, or of the known rows that a backtest forecasts."""
        spark = dataset.sparkSession
        columns = self.columns
        scoring = self._scoring()
        if dataset.isStreaming:
            what = "a forecast takes all rows of a series, and the DataFrame is a stream"
            raise ConfigError(what, hint="forecast in foreachBatch, from rows that a table keeps", param="dataset")
        make_room(spark, 1)
        with naming_params(self):
            rows = _input_rows(dataset, columns)
            schema = _forecast_schema(dataset, columns, backtest)
        sent = send(spark, self.trained)
        local = is_local(spark)

        def forecast_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            names = [*columns.keys, *columns.inputs]
            named = (pa.RecordBatch.from_arrays(batch.columns, names) for batch in batches)
            return forecast(named, columns, scorer_here(sent, scoring, local), backtest)

        # All rows of a series have to be in one partition, sorted by time.
        keys = rows.columns[: len(columns.keys)]
        by_series = rows.repartition(keys[0]) if columns.group else rows.repartition(1)
        return by_series.sortWithinPartitions(*keys).mapInArrow(forecast_batches, schema)

    def registerUDF(self, name: str, outputCol: str | None = None, spark: Any = None) -> None:
        """Refuses to register a function: an SQL function takes one row at a time, and a forecast takes many.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a forecast takes the rows of a series", hint="make a view of model.forecast(df)")

    @classmethod
    def fromModule(cls, module: Any, dataset: DataFrame, **params: Any) -> Self:
        """Refuses to make a model without a fit, which learns the scales and categories of windows.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a model of windows comes from fit", hint="fit for an epoch with Forecaster(module=...)")

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the fields of the scores, each of which is a column of forecasts with the same name."""
        columns = self.columns
        names = [columns.prediction, *columns_of_quantiles(columns)]
        return dict.fromkeys(names, "double"), {name: name for name in names}


def _input_rows(dataset: DataFrame, columns: SeriesColumns) -> DataFrame:
    """Returns the columns of keys and inputs, numbers as doubles.

    They have new names, because `mapInArrow` would take a name with a dot for a path into a struct.
    """
    names = ColumnNames.of(dataset)
    check_series(dataset.sparkSession, names, columns.group, columns.order, columns.numbers)
    check_categories(names, columns.vocabulary)
    inputs = {name: names.column(name) for name in columns.inputs}
    inputs |= {name: names.column(name).cast("double") for name in columns.numbers}
    read = [*map(names.column, columns.keys), *(inputs[name] for name in columns.inputs)]
    return dataset.select(*(column.alias(input_name(index)) for index, column in enumerate(read)))


def _forecast_schema(dataset: DataFrame, columns: SeriesColumns, backtest: Backtest | None) -> T.StructType:
    """Returns the schema of forecasts; refuses two columns with the same name."""
    names = ColumnNames.of(dataset)
    double = T.DoubleType()
    added: list[tuple[str, T.DataType]] = []
    if backtest is not None:
        compared_types = (names.type_of(columns.order), T.IntegerType(), double, double, double)
        added += zip(COMPARED, compared_types, strict=True)
    added += [(name, double) for name in (columns.prediction, *columns_of_quantiles(columns))]
    keys = dataset.select(*map(names.column, columns.keys)).schema.names
    check_outputs(ColumnNames.of(dataset.select(*map(quoted, keys))), [name for name, _ in added])
    key_fields = [T.StructField(name, names.type_of(name)) for name in columns.keys]
    return T.StructType([*key_fields, *(T.StructField(name, kind) for name, kind in added)])


def check_windows(p: Values) -> None:
    """Refuses windows without an order or a target, and sizes and quantiles that no window can have."""
    check_set(p, "orderCol", "name the column of the rows' times")
    check_set(p, "labelCol", "name the column to forecast")
    if p["context"] is not None and p["context"] < 2:
        raise ConfigError(
            f"context is {p['context']}, and the time between rows is known from two rows on",
            hint="set it to 2 or more, or leave it out",
            param="context",
            code="ST-VALUE",
        )
    check_set(p, "horizon", "set it to the rows to forecast")
    if p["horizon"] < 1:
        raise ConfigError(f"horizon is {p['horizon']}", hint="set it to 1 or more", param="horizon", code="ST-VALUE")
    if p["quantiles"] != sorted({quantile for quantile in p["quantiles"] if 0 < quantile < 1}):
        raise ConfigError(
            f"quantiles are {p['quantiles']}",
            hint="give them in ascending order, each between 0 and 1",
            param="quantiles",
            code="ST-VALUE",
        )


def _check_forecast(p: Values) -> None:
    """Refuses a forecast without a context, and rows for series that have none."""
    check_set(p, "context", "set it to some seasons' rows")
    if p["handleInvalid"] == "keep":
        raise ConflictError(
            "handleInvalid is 'keep', and a series without a context has no times to forecast",
            hint="set 'skip', which leaves it out, or 'error'",
            param="handleInvalid",
        )


def check_series(
    spark: SparkSession, names: ColumnNames, group: str | None, order: str, numbers: Sequence[str]
) -> None:
    """Refuses columns that are missing or of an unsuitable type, and time zones that Arrow does not know."""
    if group:
        check_group(names, group)
    kind = names.type_of(order)
    if not isinstance(kind, _ORDERS):
        what = f"column {order!r} is {kind.simpleString()}, and rows are ordered by an integer, a date or a timestamp"
        raise ColumnError(what, hint=f"cast it, as to_timestamp({order}) does with text", column=order)
    if isinstance(kind, T.TimestampType):
        _check_zone(setting(spark, "spark.sql.session.timeZone"))
    check_numbers(names, numbers)


def check_categories(names: ColumnNames, vocabulary: Mapping[str, Sequence[Any]]) -> None:
    """Refuses columns whose type is not the type of their known categories."""
    for name, categories in vocabulary.items():
        kind = names.type_of(name)
        learned = "boolean" if isinstance(next(iter(categories), ""), bool) else "string"
        if kind.typeName() not in (learned, "varchar", "char"):
            what = f"column {name!r} is {kind.simpleString()}, and the fit has learned the categories of {learned}s"
            raise ColumnError(what, hint=f"cast it to {learned}", column=name)


def _check_zone(zone: str) -> None:
    """Refuses a time zone that Spark knows and Arrow does not: forecasts go through Arrow."""
    try:
        pc.local_timestamp(pa.array([0], pa.timestamp("us", zone)))
    except pa.ArrowInvalid as error:
        what = f"spark.sql.session.timeZone is {zone!r}, a short form that Arrow does not know"
        hint = "set a region, such as 'America/Los_Angeles', 'UTC', or an offset, such as '+08:00'"
        raise ConfigError(what, hint=hint) from error
