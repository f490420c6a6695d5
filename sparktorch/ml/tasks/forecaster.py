"""The estimator of series: it trains on windows of their rows, and its model forecasts the rows that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.ml import Estimator
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.base.config import one_of
from sparktorch.base.imports import import_path
from sparktorch.data.columns import Window
from sparktorch.errors import ColumnError, ConfigError, Refusal, counted, refuse
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.checks import check_outputs, naming_params
from sparktorch.ml.fit.prepared_data import PreparedData, Source, make_room
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.fit.values import Values
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import ForecasterParams, ForecastingModelParams
from sparktorch.ml.scoring.backtest import ForecastSummary, summary_of
from sparktorch.model.series.forecasts import Backtest, SeriesColumns, columns_of_quantiles, forecast
from sparktorch.model.series.module import SeriesModule, SeriesNetwork
from sparktorch.model.series.training import QuantileLoss, SeriesStep
from sparktorch.spark.column_names import ColumnNames, quoted
from sparktorch.spark.frame.encoding import NUMERIC
from sparktorch.spark.frame.refusals import no_number
from sparktorch.spark.rdd import dataframe_of
from sparktorch.spark.scoring_udf import scorer_here
from sparktorch.spark.session import is_local, setting
from sparktorch.spark.shipping import send

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

    from sparktorch.model.trained_module import TrainedModule

__all__ = ["Forecaster", "ForecastingModel"]

_ORDERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.DateType, T.TimestampType, T.TimestampNTZType)
# The columns of windows, which are arrays; messages name them.
_PAST, _FUTURE, _STATIC = "past values", "values known ahead", "static values"
_LEARNS_FROM = ("labelCol", "pastCols", "futureCols", "staticCols", "validationIndicatorCol", "nullPolicy")


class _Seen(NamedTuple):
    """What an estimator has learned of rows."""

    figures: dict[str, tuple[float, float]]  # mean and standard deviation by column
    order: tuple[str, str]  # SQL type and time zone


def _named(p: Values) -> list[str]:
    """Returns the columns of numbers."""
    return [p["labelCol"], *p["pastCols"], *p["futureCols"], *p["staticCols"]]


_PARAMS = (
    Refusal("orderCol", lambda p: not p["orderCol"], "orderCol is not set", "name the column of the rows' times"),
    Refusal("labelCol", lambda p: not p["labelCol"], "labelCol is empty", "name the column to forecast"),
    Refusal("context", lambda p: p["context"] is None, "context is not set", "set it to some seasons' rows"),
    Refusal("context", lambda p: p["context"] < 2, "context is {p[context]}, and steps are seen from two rows on"),
    Refusal("horizon", lambda p: p["horizon"] is None, "horizon is not set", "set it to the rows to forecast"),
    Refusal("horizon", lambda p: p["horizon"] < 1, "horizon is {p[horizon]}", "set it to 1 or more"),
    Refusal(
        "quantiles",
        lambda p: p["quantiles"] != sorted({q for q in p["quantiles"] if 0 < q < 1}),
        "quantiles are {p[quantiles]}",
        "give them in ascending order, each between 0 and 1",
    ),
)
_TRAINING = (
    *_PARAMS,
    Refusal("step", lambda p: p["step"] < 1, "step is {p[step]}", "set it to 1 or more"),
    Refusal(
        "scaling", lambda p: p["scaling"] not in ("window", "none"), "scaling is {p[scaling]!r}", "'window', 'none'"
    ),
    Refusal(
        "loss",
        lambda p: p["quantiles"] and (p.is_set("loss") or p.is_set("lossParams")),
        "loss is set, and quantiles have a loss of their own",
        "leave one of them out",
    ),
    Refusal(
        "nullPolicy",
        lambda p: p["nullPolicy"] == "fill",
        "nullPolicy is 'fill', and what stands for a null depends on its series",
        "fill in what you know before fit, or set nullPolicy='drop', which leaves out windows with nulls",
    ),
    Refusal(
        "module",
        lambda p: p.brings_its_training,
        "module is a LightningModule, whose training_step takes batches of its own",
        "pass its network, which is called as forward(past, ...)",
    ),
)


class ForecastingModel(TorchModelBase, ForecastingModelParams):
    """A model fitted by `Forecaster`. `transform` is `forecast`: it returns rows to come, and none of its input."""

    _estimator = "sparktorch.ml.tasks.forecaster:Forecaster"

    @property
    def columns(self) -> SeriesColumns:
        """The columns that forecasts are made from, and those that they have.

        Raises:
            ConfigError: A Param is out of range.
        """
        p = Values(self)
        refuse(_PARAMS, p)
        if p["handleInvalid"] == "keep":
            what = "handleInvalid is 'keep', and a series without a context has no times to forecast"
            raise ConfigError(what, hint="set 'skip', which leaves it out, or 'error'", param="handleInvalid")
        return SeriesColumns(
            group=p["groupCol"] or "",
            order=p["orderCol"],
            target=p["labelCol"],
            past=p["pastCols"],
            future=p["futureCols"],
            static=p["staticCols"],
            context=p["context"],
            horizon=p["horizon"],
            quantiles=p["quantiles"],
            prediction=p["predictionCol"],
            skips=p["handleInvalid"] == "skip",
        )

    def forecast(self, dataset: DataFrame) -> DataFrame:
        """Forecasts the rows after the last one of each series that has a target.

        Args:
            dataset: The last `context` rows of each series, or more, in any order. With `futureCols`, also `horizon`
                rows with these and without a target.

        Returns:
            `horizon` rows for each series: `groupCol`, `orderCol`, `predictionCol` (double) and, of each quantile,
            a column such as `prediction_p10`. Without one at 0.5, `predictionCol` is the quantile nearest to it.

        Raises:
            ColumnError: A column is missing or mistyped. Also, in the job, where a series has less than `context` rows,
                nulls in them or uneven steps, unless `handleInvalid` is "skip".
        """
        return self._forecast(dataframe_of(dataset, "forecast"), None)

    def evaluate(self, dataset: DataFrame, *, season: int = 1) -> ForecastSummary:
        """Forecasts the last `horizon` rows of each series from those before, and compares; see `backtest`."""
        return self.backtest(dataset, season=season)

    def backtest(
        self, dataset: DataFrame, *, origins: int = 1, stride: int | None = None, season: int = 1
    ) -> ForecastSummary:
        """Forecasts rows that are known from those before them, at several times of each series, and compares.

        Args:
            dataset: Rows with a target, in any order.
            origins: Number of forecasts of each series. The last one ends with its last row.
            stride: Rows from one forecast to the next; by default `horizon`, so that none overlap.
            season: Rows of a season, for the naive forecast.

        Raises:
            ConfigError: A number is less than 1.
            ColumnError: As from `forecast`.
        """
        stride = self.getHorizon() if stride is None else stride
        for name, value in (("origins", origins), ("stride", stride), ("season", season)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", hint="set it to 1 or more", param=name)
        columns = self.columns
        quantiles = dict(zip(columns.quantiles, columns_of_quantiles(columns), strict=True))
        asked = Backtest(origins=origins, stride=stride, season=season)
        return summary_of(self._forecast(dataframe_of(dataset, "backtest"), asked), columns.prediction, quantiles)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self.forecast(dataset)

    def _forecast(self, dataset: DataFrame, backtest: Backtest | None) -> DataFrame:
        spark, columns, scoring = dataset.sparkSession, self.columns, self._scoring()
        if dataset.isStreaming:
            what = "a forecast takes all rows of a series, and the DataFrame is a stream"
            raise ConfigError(what, hint="forecast in foreachBatch, from rows that a table keeps", param="dataset")
        make_room(spark, 1)
        with naming_params(self):
            rows, schema = _rows(dataset, columns, backtest)
        sent, local = send(spark, self.trained), is_local(spark)

        def forecasts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return forecast(batches, columns, scorer_here(sent, scoring, local), backtest)

        by_series = rows.repartition(quoted(columns.group)) if columns.group else rows.repartition(1)
        return by_series.sortWithinPartitions(*map(quoted, columns.keys)).mapInArrow(forecasts, schema)

    def registerUDF(self, name: str, outputCol: str | None = None, spark: Any = None) -> None:
        """Refuses: an SQL function takes one row at a time, and a forecast many.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a forecast takes the rows of a series", hint="make a view of model.forecast(df)")

    @classmethod
    def fromModule(cls, module: Any, dataset: DataFrame, **params: Any) -> Self:
        """Refuses: what a window has is learned in `fit`.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a model of windows comes from fit", hint="fit for an epoch with Forecaster(module=...)")

    def _own_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        columns = self.columns
        names = [columns.prediction, *columns_of_quantiles(columns)]
        return dict.fromkeys(names, "double"), {name: name for name in names}


def _rows(dataset: DataFrame, columns: SeriesColumns, backtest: Backtest | None) -> tuple[DataFrame, T.StructType]:
    """Returns the rows that forecasts are made from, and the schema of forecasts."""
    names = ColumnNames.of(dataset)
    _check(names, columns.order, columns.numbers)
    double, whole = T.DoubleType(), T.IntegerType()
    added: list[tuple[str, T.DataType]] = [
        (columns.prediction, double),
        *((name, double) for name in columns_of_quantiles(columns)),
    ]
    if backtest is not None:
        compared = [("label", double), ("naive", double), ("scale", double)]
        added = [("cutoff", names.type_of(columns.order)), ("step", whole), *compared, *added]
    keys = dataset.select(*map(names.column, columns.keys)).schema.names
    check_outputs(ColumnNames.of(dataset.select(*map(quoted, keys))), [name for name, _ in added])
    fields = [T.StructField(name, names.type_of(name)) for name in columns.keys]
    numbers = [names.column(name).cast("double").alias(name) for name in columns.numbers]
    rows = dataset.select(*(names.column(name).alias(name) for name in columns.keys), *numbers)
    return rows, T.StructType([*fields, *(T.StructField(name, kind) for name, kind in added)])


def _check(names: ColumnNames, order: str, numbers: Sequence[str]) -> None:
    """Refuses columns that are missing, or neither order rows nor are numbers."""
    kind = names.type_of(order)
    if not isinstance(kind, _ORDERS):
        what = f"column {order!r} is {kind.simpleString()}, and rows are ordered by an integer, a date or a timestamp"
        raise ColumnError(what, hint=f"cast it, as to_timestamp({order}) does with text", column=order)
    for name in numbers:
        if not isinstance(names.type_of(name), NUMERIC):
            raise no_number(names.type_of(name), name)


class Forecaster(TorchEstimatorBase[ForecastingModel], ForecasterParams):
    """Trains a module on windows of series: `context` rows, from which it forecasts the next `horizon` values.

    The rows of a series have the same value in `groupCol` (without it, all rows are one series), and are ordered by
    `orderCol`, in even steps. By default, it trains a linear map and a small perceptron. A module of one's own
    gets `past`, float32 of shape `(samples, context, columns)`, whose columns are the target, `pastCols` and
    `futureCols`; then, if there are such columns, `futureCols` of the horizon, `(samples, horizon, columns)`; then
    `staticCols`, `(samples, columns)`. It returns `(samples, horizon)` or, with `quantiles`, `(samples, horizon,
    quantiles)`.

    Example:
        >>> rows = [(shop, day, float(10 * shop + day % 7)) for shop in (1, 2) for day in range(60)]
        >>> sales = spark.createDataFrame(rows, "shop int, day int, sold double")
        >>> of_shops = {"groupCol": "shop", "orderCol": "day", "labelCol": "sold"}
        >>> windows = {"context": 14, "horizon": 7, "epochs": 20, "batchSize": 16, "learningRate": 0.01}
        >>> model = Forecaster(**of_shops, **windows, progress=False).fit(sales)
        >>> model.forecast(sales).count()
        14
        >>> model.evaluate(sales, season=7).meanAbsoluteError < 1.0
        True

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "generic"
    _model_class = ForecastingModel
    _learns = True
    _seen: _Seen | None = None

    def fitMultiple(
        self, dataset: DataFrame | PreparedData, paramMaps: Sequence[ParamMap]
    ) -> Iterator[tuple[int, Any]]:
        """Trains a model for each of several settings of Params; see `TorchClassifier.fitMultiple`.

        Settings that change what is learned of the rows are fitted one by one.
        """
        if isinstance(dataset, PreparedData) or self._seen is not None:
            return super().fitMultiple(dataset, paramMaps)
        if any(param.name in _LEARNS_FROM for params in paramMaps for param in params):
            return Estimator.fitMultiple(self, dataset, paramMaps)
        estimator, rows = self._learned(dataframe_of(dataset, "fit"))
        return estimator.fitMultiple(rows, paramMaps)

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from those of windows: inputs, module and training step."""
        p = Values(self)
        if p["module"] is SeriesModule:
            return self
        refuse(_TRAINING, p)
        one_of("scaling", p["scaling"], ("window", "none"))
        named = [*(p[name] for name in ("groupCol", "orderCol") if p[name]), *_named(p)]
        if twice := next((name for name in named if named.count(name) > 1), None):
            hint = "name it once: the target's past and what is known ahead are seen in the context, too"
            raise ConfigError(f"column {twice!r} is named twice", hint=hint)
        scaling = None if p["scaling"] == "none" else "window"
        inputs = [name for name, of in _inputs(p).items() if of]
        found: dict[str, Any] = {"inputCols": inputs}
        if p["trainingStep"] is None:
            loss, params = p["loss"], p["lossParams"]
            if p["quantiles"]:
                loss, params = QuantileLoss, {"quantiles": p["quantiles"]}
            found |= {"trainingStep": SeriesStep(loss, params, scaling)}
        that = self.copy()
        for name in ("loss", "lossParams"):
            that.clear(that.getParam(name))
        if p.trained is not None:
            return that._set(**found)
        module = p["module"] or SeriesNetwork
        seen = {} if self._seen is None else self._seen.figures
        figures = {of: [seen.get(name, (0.0, 1.0)) for name in p[f"{of}Cols"]] for of in ("past", "future", "static")}
        params = {
            "module": import_path(module) or module,
            "params": p["moduleParams"],
            "context": p["context"],
            "horizon": p["horizon"],
            "scaling": scaling,
            "quantiles": p["quantiles"],
            **figures,
        }
        return that._set(**found, module=SeriesModule, moduleParams=params)

    def _window(self) -> Window:
        p = Values(self)
        known = (1,) if p["futureCols"] else ()
        even = None if self._seen is None else self._seen.order
        return Window(context=p["context"], horizon=p["horizon"], step=p["step"], known=known, even=even)

    def _learned(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        if self._seen is not None:
            return self, dataset
        translate(self, self._task)  # refuses Params before there is a job
        that, p = self.copy(), Values(self)
        with naming_params(self):
            names = ColumnNames.of(dataset)
            _check(names, p["orderCol"], _named(p))
            zone = setting(dataset.sparkSession, "spark.sql.session.timeZone")
            order = names.type_of(p["orderCol"]).simpleString(), zone
            that._seen = _Seen(_figures(dataset, names, p), order)
        return that, _arranged(dataset, names, p)

    def _fit_on(self, source: Source, judge: Callable[[dict[str, Any]], bool] | None = None) -> Any:
        that, known = self, getattr(source, "estimator", None)
        if self._seen is None and isinstance(known, Forecaster):
            ours, theirs = Values(self), Values(known)
            if all(ours[name] == theirs[name] for name in _LEARNS_FROM):
                that = self.copy()
                that._seen = known._seen
        return super(Forecaster, that.completed())._fit_on(source, judge)

    def _model(self, *fitted: Any) -> ForecastingModel:
        model = super()._model(*fitted)
        return model._with(_of_windows(model.trained, self._window()), model._summary)


def _of_windows(trained: TrainedModule, window: Window) -> TrainedModule:
    """Returns a module whose inputs are the windows that it was trained on, not rows."""
    length = [window.context + (place in window.known) * window.horizon for place in range(len(trained.inputs))]
    inputs = [replace(spec, shape=(rows, *spec.shape)) for rows, spec in zip(length, trained.inputs, strict=True)]
    return replace(trained, inputs=tuple(inputs))


def _inputs(p: Values) -> dict[str, list[str]]:
    """Returns the columns of each input of the module, in the order of its arguments."""
    return {_PAST: [p["labelCol"], *p["pastCols"]], _FUTURE: p["futureCols"], _STATIC: p["staticCols"]}


def _finite(column: Column) -> Column:
    """Returns a number as double, and null for NaN and infinity."""
    number = column.cast("double")
    return F.when(F.abs(number) < float("inf"), number)


def _figures(dataset: DataFrame, names: ColumnNames, p: Values) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of each column of the rows that train; refuses nulls unless they are dropped.

    They are rounded: the last digits depend on the order in which Spark adds up.
    """
    wanted = _named(p)
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    numbers = [_finite(names.column(name)) for name in wanted]
    trained = [F.when(trains, number) for number in numbers]
    found = dataset.agg(
        F.count(F.lit(1)),
        *(
            of(number)
            for of, each in ((F.count, numbers), (F.avg, trained), (F.stddev_pop, trained))
            for number in each
        ),
    ).collect()[0]
    counts, means, deviations = (found[1 + place * len(wanted) :][: len(wanted)] for place in range(3))
    for name, count in zip(wanted, counts, strict=True):
        if count < found[0] and p["nullPolicy"] == "error":
            what = f"column {name!r} has {counted(found[0] - count, 'row', 'rows')} with null, NaN or infinity"
            hint = "fill them before fit, leave rows out that are yet to come, or set nullPolicy='drop', which leaves "
            raise ColumnError(what, hint=f"{hint}out windows that hold a null", column=name)
    rounded = [[float(f"{value or 0.0:.8g}") for value in each] for each in (means, deviations)]
    return {name: (mean, deviation or 1.0) for name, mean, deviation in zip(wanted, *rounded, strict=True)}


def _arranged(dataset: DataFrame, names: ColumnNames, p: Values) -> DataFrame:
    """Returns the rows as they are trained: the columns that tell windows apart, and an array for each input."""
    roles = [p[name] for name in ("groupCol", "orderCol", "weightCol", "validationIndicatorCol") if p[name]]
    arrays = {
        name: F.array(*[names.column(column).cast("float") for column in of]) for name, of in _inputs(p).items() if of
    }
    return dataset.select(
        *(names.column(name).alias(name) for name in roles),
        names.column(p["labelCol"]).cast("float").alias(p["labelCol"]),
        *(column.alias(name) for name, column in arrays.items()),
    )
