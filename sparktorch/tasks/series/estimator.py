"""The estimator of series: it trains on windows of their rows, and `ForecastingModel` forecasts with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Rows
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.base.config import one_of
from sparktorch.base.imports import import_path, is_object
from sparktorch.data.columns import Window
from sparktorch.errors import ColumnError, ConfigError, Refusal, counted, refuse
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import ForecasterParams
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows
from sparktorch.spark.session import setting
from sparktorch.tasks.series.loss import QuantileLoss, SeriesStep
from sparktorch.tasks.series.model import COMPARED, WINDOWS, ForecastingModel, check_categories, check_series
from sparktorch.tasks.series.network import SeriesModule, SeriesNetwork
from sparktorch.tasks.series.season import context_for, learned_season, learned_start, longest_context, middle_length
from sparktorch.tasks.shared.column_statistics import categories_and_figures
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT, windows_held_out
from sparktorch.tasks.shared.layers import UNTRAINED
from sparktorch.tasks.shared.learning import LearningEstimator
from sparktorch.tasks.shared.settings import TaskSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparktorch.model.trained_module import TrainedModule

__all__ = ["Forecaster"]

# The network of series starts from a seasonal forecast, which is better than what a few windows teach.
SERIES = TaskSettings(largest_batch=256, least_steps=1_000, rows_per_epoch=50, least_trained=10, least_held_out=1)

# The columns of windows, which are arrays; messages name them.
_PAST, _FUTURE, _STATIC = "past values", "values known ahead", "static values"
_MOST_CATEGORIES = 1000  # A static column has at most so many, its most frequent ones.
_KEPT = ("context", "horizon", "quantiles", "pastCols", "futureCols", "staticCols")  # by training on
_LEARNS_FROM = (
    *("labelCol", "pastCols", "futureCols", "staticCols", "validationIndicatorCol", "nullPolicy"),
    *("context", "horizon", "season"),
)


class LearnedSeries(NamedTuple):
    """What an estimator has learned of rows."""

    figures: dict[str, tuple[float, float]]  # mean and standard deviation by column
    order: tuple[str, str]  # SQL type and time zone
    season: int | None  # None where the module is the user's
    start: dict[str, float]  # arguments of the network
    categories: list[list[Any] | None]  # Those of each static column; a column of numbers has None.


def _named(p: Values) -> list[str]:
    """Returns the columns of numbers and categories."""
    return [p["labelCol"], *p["pastCols"], *p["futureCols"], *p["staticCols"]]


_TRAINING = (
    *WINDOWS,
    Refusal("step", lambda p: p["step"] < 1, "step is {p[step]}", "set it to 1 or more"),
    Refusal(
        "season", lambda p: p["season"] is not None and p["season"] < 1, "season is {p[season]}", "set 1 for no season"
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


class Forecaster(LearningEstimator, ForecasterParams):
    """Trains a module on windows of series: `context` rows, from which it forecasts the next `horizon` values.

    The rows of a series have the same value in `groupCol` (without it, all rows are one series), and are ordered by
    `orderCol`, in even steps. By default, it trains a network that starts from a seasonal forecast, and learns what
    that misses. A module of one's own gets `past`, float32 of shape `(samples, context, columns)`, whose columns are
    the target, `pastCols` and `futureCols`; then, if there are such columns, `futureCols` of the horizon, `(samples,
    horizon, columns)`; then `staticCols`, `(samples, columns)`, with a vector for a string or a boolean. It returns
    `(samples, horizon)` or, with `quantiles`, `(samples, horizon, quantiles)`.

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
    _unit = "windows"
    _chosen_by = "time, the last ones of each series"
    _learns_from = _LEARNS_FROM
    _searched = {"moduleParams.hidden": [[64], [256]], "moduleParams.dropout": [0.1, 0.25]}
    _learned: LearnedSeries | None = None
    _chose_context = False

    @property
    def _task_settings(self) -> TaskSettings:
        p = Values(self)
        starts = p.trained is not None or _starts_from_season(p)
        return SERIES if starts else replace(SERIES, rows_per_epoch=None)  # Random weights need their steps.

    @property
    def _validates_untrained(self) -> bool:
        """Whether best weights are kept, of a network that has a forecast to start from."""
        p = Values(self)
        params = p["moduleParams"] if p.trained is None else p.trained.params
        default = is_object(params.get("module"), SeriesNetwork)
        return default and params.get("season") is not None and p["earlyStoppingPatience"] is not None

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from those of windows: inputs, module and training step."""
        that, p = super().completed(), Values(self)
        if p["module"] is SeriesModule:
            return that
        refuse(_TRAINING, p)
        one_of("scaling", p["scaling"], ("window", "none"))
        if taken := next((name for name in (p["groupCol"], p["orderCol"]) if str(name).lower() in COMPARED), None):
            hint = f"rename it: {', '.join(COMPARED)} are the columns that evaluate and backtest add"
            raise ConfigError(
                f"column {taken!r} would be there twice in the forecasts of evaluate", hint=hint, code="ST-COLUMN-TAKEN"
            )
        scaling = None if p["scaling"] == "none" else "window"
        inputs = [name for name, of in _inputs(p).items() if of]
        found: dict[str, Any] = {"inputCols": inputs}
        seen = {} if self._learned is None else self._learned.figures
        _, deviation = seen.get(p["labelCol"], (0.0, 1.0))
        if p.trained is not None:
            _check_kept(p, p.trained)
            deviation = p.trained.params.get("deviation", 1.0)
        if p["trainingStep"] is None:
            loss, params = p["loss"], p["lossParams"]
            if p["quantiles"]:
                loss, params = QuantileLoss, {"quantiles": p["quantiles"]}
            found |= {"trainingStep": SeriesStep(loss, params, scaling, deviation)}
        that = that.copy()
        for name in ("loss", "lossParams"):
            that.clear(that.getParam(name))
        if p.trained is not None:
            return that._set(**found)
        module, season = p["module"] or SeriesNetwork, p["season"]
        settings = p["moduleParams"]
        if _starts_from_season(p):
            best_season, start = (1, {}) if self._learned is None else (self._learned.season, self._learned.start)
            season, settings = season or best_season, {**start, **settings}
        figures = {of: [seen.get(name, (0.0, 1.0)) for name in p[f"{of}Cols"]] for of in ("past", "future", "static")}
        categories = [] if self._learned is None else self._learned.categories
        params = {
            "module": import_path(module) or module,
            "params": settings,
            "context": self._window().context,
            "horizon": p["horizon"],
            "scaling": scaling,
            "quantiles": p["quantiles"],
            "deviation": deviation,
            "season": season,
            **({"categories": categories} if any(known is not None for known in categories) else {}),
            **figures,
        }
        return that._set(**found, module=SeriesModule, moduleParams=params)

    def _window(self) -> Window:
        p = Values(self)
        known = (1,) if p["futureCols"] else ()
        even = None if self._learned is None else self._learned.order
        context = p["context"] or max(2, p["horizon"])  # it is chosen once the rows are known
        return Window(context=context, horizon=p["horizon"], step=p["step"], known=known, even=even)

    def _learn(self, dataset: DataFrame) -> LearnedSeries:
        p, names = Values(self), ColumnNames.of(dataset)
        if repeated := names.repeated([*(p[name] for name in ("groupCol", "orderCol") if p[name]), *_named(p)]):
            hint = "name it once: the target's past and what is known ahead are seen in the context, too"
            raise ConfigError(f"column {repeated!r} is named twice", hint=hint)
        texts = _check(dataset, names, p)
        zone = setting(dataset.sparkSession, "spark.sql.session.timeZone")
        figures = _figures(dataset, names, p, [name for name in _named(p) if name not in texts])
        season, start = learned_start(dataset, names, p, p["context"]) if _starts_from_season(p) else (None, {})
        order = (names.type_of(p["orderCol"]).simpleString(), zone)
        return LearnedSeries(figures, order, season, start, _categories(dataset, names, p, texts))

    def _looked_at(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        """Chooses the context where none is set, and then learns of the rows."""
        p, that, names = Values(self), self, ColumnNames.of(dataset)
        if p["context"] is None and p.trained is not None:
            that = self.copy()._set(context=Values(p["module"])["context"])
        elif p["context"] is None:
            _check(dataset, names, p)
            that = self.copy()
            that._chose_context = True
            rows, season = middle_length(self._lengths(dataset)), p["season"] or 1
            if p["season"] is None and _starts_from_season(p):
                season = learned_season(dataset, names, p, longest_context(rows, p["horizon"]))
            that._set(context=context_for(rows, p["horizon"], season))
        return super(Forecaster, that)._looked_at(dataset)

    def _chosen(self) -> dict[str, Any]:
        found = super()._chosen()
        if self._chose_context:
            found["settings"] = {"context": Values(self)["context"], **found.get("settings", {})}
        if Values(self).trained is not None:  # The first validation is that of the trained model.
            found["baseline"] = {}
        return found

    def _knowing(self, other: Any) -> Self:
        that, p = self, Values(other)
        learned = isinstance(other, Forecaster) and other._has_learned and not self._has_learned
        if learned and Values(self)["context"] is None:
            that = self.copy()._set(context=p["context"])
            that._chose_context = other._chose_context
        return super(Forecaster, that)._knowing(other)

    def _marked(self, dataset: DataFrame, names: ColumnNames, share: float) -> tuple[DataFrame, tuple[int, int] | None]:
        """Marks the last rows of each series, and counts its windows."""
        p, window = Values(self), self._window()
        _check(dataset, names, p)
        lengths = self._lengths(dataset)
        windows = sum(windows_held_out(length, window, 0.0)[0] * series for length, series in lengths)
        if lengths and not windows:
            longest = counted(max(length for length, _ in lengths), "row", "rows")
            what = f"no group has {window.rows} rows, those of a window; the longest has {longest}"
            hint = f"a window has context + horizon rows, {window.context} + {window.horizon}: set a smaller one"
            raise ColumnError(what, hint=hint, code="ST-NO-ROWS")
        most = MOST_HELD_OUT / max(1, windows)
        few = self._asks_for_validation
        found = [(windows_held_out(length, window, share, most, few=few), series) for length, series in lengths]
        marks = pa.table(
            {
                "length": pa.array([length for length, _ in lengths], pa.int64()),
                "marks": pa.array([count for (_, _, count), _ in found], pa.int64()),
            }
        )
        series = Rows.partitionBy(names.column(p["groupCol"]) if p["groupCol"] else F.lit(0))
        place, length = f"{self._marks}_place", f"{self._marks}_length"
        rows = dataset.select(
            "*",
            F.row_number().over(series.orderBy(names.column(p["orderCol"]).desc())).alias(place),
            F.count(F.lit(1)).over(series).alias(length),
        )
        known = F.broadcast(frame_of_rows(dataset.sparkSession, marks).toDF(length, self._marks))
        rows = rows.join(known, length, "left").withColumn(self._marks, F.col(place) <= F.col(self._marks))
        counts = [sum(found[at] * series for found, series in found) for at in (0, 1)]
        return rows.drop(place, length), (counts[0], counts[1])

    @property
    def _why_none_are_held_out(self) -> str:
        return "a series has too few windows"

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        marks = Values(self)["validationIndicatorCol"]
        trained = rows.where(~ColumnNames.of(rows).column(marks)) if marks else rows
        window = self._window()
        return sum(windows_held_out(length, window, 0.0)[0] * series for length, series in self._lengths(trained)), 0

    def _lengths(self, rows: DataFrame) -> list[tuple[int, int]]:
        """Returns each number of rows that series have, and how many have it."""
        group = Values(self)["groupCol"]
        key = ColumnNames.of(rows).column(group) if group else F.lit(0)
        lengths = rows.groupBy(key.alias("series")).agg(F.count(F.lit(1)).alias("length"))
        return [tuple(row) for row in lengths.groupBy("length").agg(F.count(F.lit(1))).collect()]

    def _arranged(self, dataset: DataFrame) -> DataFrame:
        """Returns the columns that tell windows apart, and an array for each input."""
        p, names = Values(self), ColumnNames.of(dataset)
        roles = [p[name] for name in ("groupCol", "orderCol", "weightCol", "validationIndicatorCol") if p[name]]
        assert self._learned is not None
        known = dict(zip(p["staticCols"], self._learned.categories, strict=True))
        arrays = {
            name: F.array(*[_input(names.column(column), known.get(column)).cast("float") for column in of])
            for name, of in _inputs(p).items()
            if of
        }
        return dataset.select(
            *(names.column(name).alias(name) for name in roles),
            names.column(p["labelCol"]).cast("float").alias(p["labelCol"]),
            *(column.alias(name) for name, column in arrays.items()),
        )

    def _model(self, *fitted: Any) -> ForecastingModel:
        """Returns the model, whose inputs are windows, not rows."""
        model: ForecastingModel = super()._model(*fitted)
        trained, window = model.trained, self._window()
        length = [window.context + (place in window.known) * window.horizon for place in range(len(trained.inputs))]
        inputs = [replace(spec, shape=(rows, *spec.shape)) for rows, spec in zip(length, trained.inputs, strict=True)]
        return model._with(replace(trained, inputs=tuple(inputs)), model._summary)


def _check_kept(p: Values, trained: TrainedModule) -> None:
    """Refuses to train a fitted model on with other windows or columns: it would scale them as those it has learned."""
    model = Values(p["module"])
    had = {name: model[name] for name in _KEPT} | {"scaling": trained.params.get("scaling", "window") or "none"}
    for name, value in had.items():
        if p[name] != value and not (name == "context" and p[name] is None):
            what = f"{name} is {p[name]!r}, and {value!r} in the fitted model that is to be trained on"
            raise ConfigError(what, hint="set the same, or train a module of its own", param=name)


def _starts_from_season(p: Values) -> bool:
    """Whether the module is the network that starts from a seasonal forecast."""
    module = p["module"]
    return module is None or is_object(module, SeriesNetwork)


def _inputs(p: Values) -> dict[str, list[str]]:
    """Returns the columns of each input of the module, in the order of its arguments."""
    return {_PAST: [p["labelCol"], *p["pastCols"]], _FUTURE: p["futureCols"], _STATIC: p["staticCols"]}


def _check(dataset: DataFrame, names: ColumnNames, p: Values) -> list[str]:
    """Refuses columns of other types than they must have; returns those static ones that are categories."""
    texts = [name for name in p["staticCols"] if isinstance(names.type_of(name), T.StringType | T.BooleanType)]
    if p.trained is not None:
        pairs = zip(p["staticCols"], p.trained.params.get("categories", ()), strict=False)
        known = {name: categories for name, categories in pairs if categories is not None}
        check_categories(names, known)
        texts = list(known)
    numbers = [name for name in _named(p) if name not in texts]
    check_series(dataset.sparkSession, names, p["groupCol"], p["orderCol"], numbers)
    return texts


def _categories(dataset: DataFrame, names: ColumnNames, p: Values, texts: list[str]) -> list[list[Any] | None]:
    """Returns the most frequent categories, in the rows that train, of each static column that has categories."""
    if p.trained is not None:
        return list(p.trained.params.get("categories") or [None] * len(p["staticCols"]))
    if not texts:
        return [None] * len(p["staticCols"])
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    values = [F.when(trains, names.column(name).cast("string")) for name in texts]
    found, _ = categories_and_figures(dataset, values, [], limited=len(texts), most=_MOST_CATEGORIES, labels=0)
    known: dict[str, list[Any]] = {name: sorted(of) for name, of in zip(texts, found, strict=True)}
    for name in texts:
        if isinstance(names.type_of(name), T.BooleanType):
            known[name] = [value == "true" for value in known[name]]
    return [known.get(name) for name in p["staticCols"]]


def _input(column: Column, categories: Sequence[Any] | None) -> Column:
    """Returns a column of numbers as it is, and one of categories as the indices that forecasts have for them."""
    if categories is None:
        return column
    place = F.array_position(F.array(*map(F.lit, categories)), column) if categories else F.lit(0)
    return F.when(column.isNull(), 1).when(place > 0, place + (UNTRAINED - 1)).otherwise(0)


def _figures(
    dataset: DataFrame, names: ColumnNames, p: Values, wanted: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of each column of the rows that train; refuses nulls unless they are dropped.

    They are rounded: the last digits depend on the order in which Spark adds up.
    """
    trains = ~names.column(p["validationIndicatorCol"]) if p["validationIndicatorCol"] else F.lit(True)
    doubles = [names.column(name).cast("double") for name in wanted]
    numbers = [F.when(F.abs(number) < float("inf"), number) for number in doubles]  # null for NaN and infinity
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
