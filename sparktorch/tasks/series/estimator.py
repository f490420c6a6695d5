"""The estimator of series: it trains on windows of their rows, and `ForecastingModel` forecasts with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Rows
from pyspark.sql import functions as F

from sparktorch.base.config import one_of
from sparktorch.base.imports import import_path, is_object
from sparktorch.data.columns import Window
from sparktorch.errors import ColumnError, ConfigError, ConflictError, counted
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.compat import frame_of_rows
from sparktorch.tasks.series.learned import LearnedSeries, check_columns, learn_series
from sparktorch.tasks.series.loss import QuantileLoss, SeriesStep
from sparktorch.tasks.series.model import COMPARED, ForecastingModel, check_windows
from sparktorch.tasks.series.network import SeriesModule, SeriesNetwork
from sparktorch.tasks.series.params import ForecasterParams
from sparktorch.tasks.series.season import context_for, learned_season, longest_context, middle_length
from sparktorch.tasks.shared.estimator import LearningEstimator
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT, windows_held_out
from sparktorch.tasks.shared.layers import UNTRAINED
from sparktorch.tasks.shared.settings import TaskSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparktorch.model.trained_module import TrainedModule

__all__ = ["Forecaster"]

# The network of series starts from a seasonal forecast, which is better than what a few windows teach.
SERIES = TaskSettings(largest_batch=256, least_steps=1_000, rows_per_epoch=50, least_trained=10, least_held_out=1)

# The columns of windows, which are arrays; messages name them.
_PAST, _FUTURE, _STATIC = "past values", "values known ahead", "static values"
# A training that goes on from a fitted model has the same values of these.
_KEPT = ("context", "horizon", "quantiles", "pastCols", "futureCols", "staticCols")
_LEARNS_FROM = (
    *("labelCol", "pastCols", "futureCols", "staticCols", "validationIndicatorCol", "nullPolicy"),
    *("context", "horizon", "season"),
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
        estimator, p = super().completed(), Values(self)
        if p["module"] is SeriesModule:
            return estimator
        check_windows(p)
        _check_training(p)
        one_of("scaling", p["scaling"], ("window", "none"))
        clash = next((name for name in (p["groupCol"], p["orderCol"]) if str(name).lower() in COMPARED), None)
        if clash is not None:
            hint = f"rename it: {', '.join(COMPARED)} are the columns that evaluate and backtest add"
            raise ConfigError(
                f"column {clash!r} would be there twice in the forecasts of evaluate", hint=hint, code="ST-COLUMN-TAKEN"
            )
        scaling = None if p["scaling"] == "none" else "window"
        training: dict[str, Any] = {"inputCols": [name for name, columns in _inputs(p).items() if columns]}
        _, deviation = self._figures_of(p["labelCol"])
        if p.trained is not None:
            _check_kept(p, p.trained)
            deviation = p.trained.params.get("deviation", 1.0)
        if p["trainingStep"] is None:
            loss, params = p["loss"], p["lossParams"]
            if p["quantiles"]:
                loss, params = QuantileLoss, {"quantiles": p["quantiles"]}
            training["trainingStep"] = SeriesStep(loss, params, scaling, deviation)
        estimator = estimator.copy()
        for name in ("loss", "lossParams"):
            estimator.clear(estimator.getParam(name))
        if p.trained is not None:
            return estimator._set(**training)
        return estimator._set(**training, module=SeriesModule, moduleParams=self._network(scaling, deviation))

    def _network(self, scaling: str | None, deviation: float) -> dict[str, Any]:
        """Returns the arguments of `SeriesModule`, as far as they are known."""
        p = Values(self)
        module, season, network_params = p["module"] or SeriesNetwork, p["season"], p["moduleParams"]
        if _starts_from_season(p):
            best_season, start = (1, {}) if self._learned is None else (self._learned.season, self._learned.start)
            season, network_params = season or best_season, {**start, **network_params}
        params = {
            "module": import_path(module) or module,
            "params": network_params,
            "context": self._window().context,
            "horizon": p["horizon"],
            "scaling": scaling,
            "quantiles": p["quantiles"],
            "deviation": deviation,
            "season": season,
        }
        if self._learned is not None and any(values is not None for values in self._learned.categories):
            params["categories"] = self._learned.categories
        # Checkpoints compare these as text, in this order.
        for kind in ("past", "future", "static"):
            params[kind] = [self._figures_of(name) for name in p[f"{kind}Cols"]]
        return params

    def _figures_of(self, column: str) -> tuple[float, float]:
        """Returns mean and standard deviation of a column; 0 and 1 before they are learned, and of categories."""
        return (0.0, 1.0) if self._learned is None else self._learned.figures.get(column, (0.0, 1.0))

    def _task_training(self) -> TaskTraining:
        return TaskTraining(window=self._window(), validates_untrained=self._validates_untrained)

    def _window(self) -> Window:
        p = Values(self)
        ahead = (1,) if p["futureCols"] else ()
        order = None if self._learned is None else self._learned.order
        context = p["context"] or max(2, p["horizon"])  # The rows say later which context is chosen.
        return Window(context=context, horizon=p["horizon"], step=p["step"], known_ahead=ahead, even=order)

    def _learn(self, dataset: DataFrame) -> LearnedSeries:
        p = Values(self)
        return learn_series(dataset, ColumnNames.of(dataset), p, starts_from_season=_starts_from_season(p))

    def _learn_and_hold_out(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        """Chooses the context where none is set, and then learns of the rows."""
        p, estimator, names = Values(self), self, ColumnNames.of(dataset)
        if p["context"] is None and p.trained is not None:
            estimator = self.copy()._set(context=Values(p["module"])["context"])
        elif p["context"] is None:
            check_columns(dataset, names, p)
            estimator = self.copy()
            estimator._chose_context = True
            rows, season = middle_length(self._lengths(dataset)), p["season"] or 1
            if p["season"] is None and _starts_from_season(p):
                season = learned_season(dataset, names, p, longest_context(rows, p["horizon"]))
            estimator._set(context=context_for(rows, p["horizon"], season))
        return super(Forecaster, estimator)._learn_and_hold_out(dataset)

    def _chosen(self) -> dict[str, Any]:
        fields = super()._chosen()
        if self._chose_context:
            fields["settings"] = {"context": Values(self)["context"], **fields.get("settings", {})}
        if Values(self).trained is not None:  # The first validation is that of the trained model.
            fields["baseline"] = {}
        return fields

    def _knowing(self, other: Any) -> Self:
        estimator, p = self, Values(other)
        learned = isinstance(other, Forecaster) and other._has_learned and not self._has_learned
        if learned and Values(self)["context"] is None:
            estimator = self.copy()._set(context=p["context"])
            estimator._chose_context = other._chose_context
        return super(Forecaster, estimator)._knowing(other)

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        """Marks the last rows of each series, and counts its windows."""
        p, window = Values(self), self._window()
        check_columns(dataset, names, p)
        lengths = self._lengths(dataset)
        windows = sum(windows_held_out(length, window, 0.0)[0] * series for length, series in lengths)
        if lengths and not windows:
            longest = counted(max(length for length, _ in lengths), "row", "rows")
            what = f"no group has {window.rows} rows, those of a window; the longest has {longest}"
            hint = f"a window has context + horizon rows, {window.context} + {window.horizon}: set a smaller one"
            raise ColumnError(what, hint=hint, code="ST-NO-ROWS")
        most = MOST_HELD_OUT / max(1, windows)
        few = self._asks_for_validation
        held_out = [(windows_held_out(length, window, share, most, few=few), series) for length, series in lengths]
        trained = sum(windows_of[0] * series for windows_of, series in held_out)
        validated = sum(windows_of[1] * series for windows_of, series in held_out)
        last_rows = {length: windows_of[2] for (windows_of, _), (length, _) in zip(held_out, lengths, strict=True)}
        if p["groupCol"]:
            return self._last_of_series(dataset, names, last_rows), (trained, validated)
        return self._last_rows(dataset, names, next(iter(last_rows.values()), 0)), (trained, validated)

    def _last_rows(self, dataset: DataFrame, names: ColumnNames, count: int) -> DataFrame:
        """Marks the last rows of one series, without a window function, which would warn that it has no partitions."""
        order, first = names.column(self.getOrderCol()), f"{self._marks}_first"
        if not count:
            return dataset.withColumn(self._marks, F.lit(False))
        last = dataset.select(order.alias(first)).orderBy(F.desc(first)).limit(count).agg(F.min(first).alias(first))
        marked = dataset.crossJoin(F.broadcast(last))
        return marked.withColumn(self._marks, F.coalesce(order >= F.col(first), F.lit(False))).drop(first)

    def _last_of_series(self, dataset: DataFrame, names: ColumnNames, last_rows: Mapping[int, int]) -> DataFrame:
        """Marks the last rows of each series; how many follows from the number of its rows."""
        marks = pa.table(
            {
                "length": pa.array(list(last_rows), pa.int64()),
                "marks": pa.array(list(last_rows.values()), pa.int64()),
            }
        )
        series = Rows.partitionBy(names.column(self.getGroupCol()))
        position, length = f"{self._marks}_position", f"{self._marks}_length"
        rows = dataset.select(
            "*",
            F.row_number().over(series.orderBy(names.column(self.getOrderCol()).desc())).alias(position),
            F.count(F.lit(1)).over(series).alias(length),
        )
        marks_by_length = F.broadcast(frame_of_rows(dataset.sparkSession, marks).toDF(length, self._marks))
        rows = rows.join(marks_by_length, length, "left").withColumn(self._marks, F.col(position) <= F.col(self._marks))
        return rows.drop(position, length)

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

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the columns that tell windows apart, and an array for each input."""
        p, names = Values(self), ColumnNames.of(dataset)
        roles = [p[name] for name in ("groupCol", "orderCol", "weightCol", "validationIndicatorCol") if p[name]]
        assert self._learned is not None
        categories = dict(zip(p["staticCols"], self._learned.categories, strict=True))
        arrays = {
            name: F.array(*[_input(names.column(column), categories.get(column)).cast("float") for column in columns])
            for name, columns in _inputs(p).items()
            if columns
        }
        return dataset.select(
            *(names.column(name).alias(name) for name in roles),
            names.column(p["labelCol"]).cast("float").alias(p["labelCol"]),
            *(column.alias(name) for name, column in arrays.items()),
        )

    def _model(self, *parts: Any) -> ForecastingModel:
        """Returns the model, whose inputs are windows, not rows."""
        model: ForecastingModel = super()._model(*parts)
        trained, window = model.trained, self._window()
        length = [
            window.context + (index in window.known_ahead) * window.horizon for index in range(len(trained.inputs))
        ]
        inputs = [replace(spec, shape=(rows, *spec.shape)) for rows, spec in zip(length, trained.inputs, strict=True)]
        return model._with(replace(trained, inputs=tuple(inputs)), model._summary)


def _check_training(p: Values) -> None:
    """Refuses Params with which no windows can be trained on."""
    if p["step"] < 1:
        raise ConfigError(f"step is {p['step']}", hint="set it to 1 or more", param="step", code="ST-CLASH")
    if p["season"] is not None and p["season"] < 1:
        raise ConfigError(f"season is {p['season']}", hint="set 1 for no season", param="season", code="ST-CLASH")
    if p["quantiles"] and (p.is_set("loss") or p.is_set("lossParams")):
        raise ConflictError(
            "loss is set, and quantiles have a loss of their own", hint="leave one of them out", param="loss"
        )
    if p["nullPolicy"] == "fill":
        raise ConflictError(
            "nullPolicy is 'fill', and what stands for a null depends on its series",
            hint="fill in what you know before fit, or set nullPolicy='drop', which leaves out windows with nulls",
            param="nullPolicy",
        )
    if p.brings_its_training:
        raise ConflictError(
            "module is a LightningModule, whose training_step takes batches of its own",
            hint="pass its network, which is called as forward(past, ...)",
            param="module",
        )


def _check_kept(p: Values, trained: TrainedModule) -> None:
    """Refuses to train a fitted model on with other windows or columns: it would scale them as those it has learned."""
    model = Values(p["module"])
    saved = {name: model[name] for name in _KEPT} | {"scaling": trained.params.get("scaling", "window") or "none"}
    for name, value in saved.items():
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


def _input(column: Column, categories: Sequence[Any] | None) -> Column:
    """Returns a column of numbers as it is, and one of categories as the indices that forecasts have for them."""
    if categories is None:
        return column
    position = F.array_position(F.array(*map(F.lit, categories)), column) if categories else F.lit(0)
    return F.when(column.isNull(), 1).when(position > 0, position + (UNTRAINED - 1)).otherwise(0)
