"""The estimator of series: it trains a module on windows of rows, with which `ForecastingModel` forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from sparktorch.base.config import one_of
from sparktorch.base.imports import import_path, is_object
from sparktorch.data.columns import Window
from sparktorch.errors import ColumnError, ConfigError, ConflictError, counted
from sparktorch.ml.fit.task_training import TaskTraining
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.series.held_out import (
    count_windows,
    lengths_of_series,
    mark_last_of_series,
    mark_last_rows,
    windows_held_out,
)
from sparktorch.tasks.series.learned import LearnedSeries, check_columns, learn_series
from sparktorch.tasks.series.loss import QuantileLoss, SeriesStep
from sparktorch.tasks.series.model import COMPARED, ForecastingModel, check_windows
from sparktorch.tasks.series.network import SeriesModule, SeriesNetwork
from sparktorch.tasks.series.params import ForecasterParams
from sparktorch.tasks.series.season import context_for, learn_season, longest_context, middle_length
from sparktorch.tasks.shared.estimator import LearningEstimator
from sparktorch.tasks.shared.held_out import MOST_HELD_OUT
from sparktorch.tasks.shared.layers import UNTRAINED
from sparktorch.tasks.shared.settings import TaskSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from sparktorch.model.trained_module import TrainedModule

__all__ = ["Forecaster"]

# The network of series starts from a seasonal forecast, which is better than what a few windows teach.
SERIES = TaskSettings(largest_batch=256, least_steps=1_000, rows_per_epoch=50, least_trained=10, least_held_out=1)

# The columns of arrays from which ranks cut windows. Messages name them.
_PAST, _FUTURE, _STATIC = "past values", "values known ahead", "static values"
# A training that goes on from a fitted model must have the model's values of these Params.
_MODEL_PARAMS = ("context", "horizon", "quantiles", "pastCols", "futureCols", "staticCols")
_LEARNS_FROM = (
    "labelCol",
    "pastCols",
    "futureCols",
    "staticCols",
    "validationIndicatorCol",
    "nullPolicy",
    "context",
    "horizon",
    "season",
)


class Forecaster(LearningEstimator, ForecasterParams):
    """Trains a module on windows of series: `context` rows, from which it forecasts the next `horizon` values.

    The rows of a series have the same value in `groupCol` (without it, all rows are one series), and are ordered by
    `orderCol`, in even steps. By default, it trains a network that starts from a seasonal forecast, and learns what
    the forecast misses.

    A module of your own gets these tensors, float32, and returns `(samples, horizon)` or, with `quantiles`, `(samples,
    horizon, quantiles)`:

    - `past`, of shape `(samples, context, columns)`: the target, `pastCols` and `futureCols`;
    - if there are `futureCols`, their values in the horizon, of shape `(samples, horizon, columns)`;
    - if there are `staticCols`, their values, of shape `(samples, columns)`, with a vector for a string or a boolean.

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
        if p.trained is not None or _starts_from_season(p):
            return SERIES
        return replace(SERIES, rows_per_epoch=None)  # Random weights need all steps, however few the rows are.

    @property
    def _validates_untrained(self) -> bool:
        """Whether the weights from before the first step are validated, too.

        They are if a network starts from a seasonal forecast and the best weights are kept: the start may be the best.
        """
        p = Values(self)
        params = p["moduleParams"] if p.trained is None else p.trained.params
        is_default_network = is_object(params.get("module"), SeriesNetwork)
        return is_default_network and params.get("season") is not None and p["earlyStoppingPatience"] is not None

    def completed(self) -> Self:
        """Returns a copy with the Params that follow from the windows: inputs, module and training step."""
        estimator = super().completed()
        p = Values(self)
        if p["module"] is SeriesModule:
            return estimator  # It is complete.
        check_windows(p)
        _check_training(p)
        one_of("scaling", p["scaling"], ("window", "none"))
        _check_names_of_keys(p)
        scaling = None if p["scaling"] == "none" else "window"
        _, deviation = self._figures_of(p["labelCol"])
        if p.trained is not None:
            _check_model_params(p, p.trained)
            deviation = p.trained.params.get("deviation", 1.0)
        params: dict[str, Any] = {"inputCols": [name for name, columns in _inputs(p).items() if columns]}
        if p["trainingStep"] is None:
            loss = p["loss"]
            loss_params = p["lossParams"]
            if p["quantiles"]:
                loss = QuantileLoss
                loss_params = {"quantiles": p["quantiles"]}
            params["trainingStep"] = SeriesStep(loss, loss_params, scaling, deviation)
        if p.trained is None:
            params["module"] = SeriesModule
            params["moduleParams"] = self._module_params(scaling, deviation)
        estimator = estimator.copy()
        for name in ("loss", "lossParams"):  # The training step has the loss.
            estimator.clear(estimator.getParam(name))
        return estimator._set(**params)

    def _module_params(self, scaling: str | None, deviation: float) -> dict[str, Any]:
        """Returns the arguments of `SeriesModule`, with defaults for what is not learned yet."""
        p = Values(self)
        module = p["module"] or SeriesNetwork
        season = p["season"]
        network_params = p["moduleParams"]
        if _starts_from_season(p):
            best_season: int | None = 1
            start: dict[str, float] = {}
            if self._learned is not None:
                best_season = self._learned.season
                start = self._learned.start
            season = season or best_season
            network_params = {**start, **network_params}
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
        # Checkpoints compare the Params as text, and so the order of the keys must not change.
        for kind in ("past", "future", "static"):
            params[kind] = [self._figures_of(name) for name in p[f"{kind}Cols"]]
        return params

    def _figures_of(self, column: str) -> tuple[float, float]:
        """Returns mean and standard deviation of a column; 0 and 1 for categories, and before anything is learned."""
        return (0.0, 1.0) if self._learned is None else self._learned.figures.get(column, (0.0, 1.0))

    def _task_training(self) -> TaskTraining:
        return TaskTraining(window=self._window(), validates_untrained=self._validates_untrained)

    def _window(self) -> Window:
        """Returns the windows of a series that are samples."""
        p = Values(self)
        return Window(
            context=p["context"] or max(2, p["horizon"]),  # A context that is not set is chosen once there are rows.
            horizon=p["horizon"],
            step=p["step"],
            known_ahead=(1,) if p["futureCols"] else (),  # This is the index of the input that is known ahead.
            even=None if self._learned is None else self._learned.order,
        )

    def _learn(self, dataset: DataFrame) -> LearnedSeries:
        p = Values(self)
        return learn_series(dataset, ColumnNames.of(dataset), p, starts_from_season=_starts_from_season(p))

    def _learn_and_hold_out(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        """Chooses the context if none is set, and then learns from the rows."""
        p = Values(self)
        if p["context"] is not None:
            return super()._learn_and_hold_out(dataset)
        estimator = self.copy()
        if p.trained is not None:
            estimator._set(context=Values(p["module"])["context"])
        else:
            names = ColumnNames.of(dataset)
            check_columns(dataset, names, p)
            rows = middle_length(self._lengths(dataset))
            season = p["season"] or 1
            if p["season"] is None and _starts_from_season(p):
                season = learn_season(dataset, names, p, longest_context(rows, p["horizon"]))
            estimator._set(context=context_for(rows, p["horizon"], season))
            estimator._chose_context = True
        return super(Forecaster, estimator)._learn_and_hold_out(dataset)

    def _chosen(self) -> dict[str, Any]:
        fields = super()._chosen()
        if self._chose_context:
            fields["settings"] = {"context": Values(self)["context"], **fields.get("settings", {})}
        if Values(self).trained is not None:
            # The first validation, of the fitted model, is what the training has to improve on.
            fields["baseline"] = {}
        return fields

    def _knowing(self, other: Any) -> Self:
        """Returns the estimator with what another one has learned, and with the context that it has chosen."""
        estimator = self
        takes_statistics = isinstance(other, Forecaster) and other._has_learned and not self._has_learned
        if takes_statistics and Values(self)["context"] is None:
            estimator = self.copy()._set(context=Values(other)["context"])
            estimator._chose_context = other._chose_context
        return super(Forecaster, estimator)._knowing(other)

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        """Marks the last rows of each series, and counts the windows that train and that are held out."""
        p = Values(self)
        window = self._window()
        check_columns(dataset, names, p)
        lengths = self._lengths(dataset)
        windows = count_windows(lengths, window)
        if lengths and not windows:
            longest = counted(max(length for length, _ in lengths), "row", "rows")
            what = f"no group has {window.rows} rows, those of a window; the longest has {longest}"
            hint = f"a window has context + horizon rows, {window.context} + {window.horizon}: set a smaller one"
            raise ColumnError(what, hint=hint, code="ST-NO-ROWS")
        most = MOST_HELD_OUT / max(1, windows)
        trained = 0
        held_out = 0
        marks_by_length: dict[int, int] = {}
        for length, series_count in lengths:
            split = windows_held_out(length, window, share, most, few=self._asks_for_validation)
            trained += split.trained * series_count
            held_out += split.held_out * series_count
            marks_by_length[length] = split.marked_rows
        order = names.column(p["orderCol"])
        if p["groupCol"]:
            series = names.column(p["groupCol"])
            rows = mark_last_of_series(dataset, series, order, self._marks, marks_by_length)
        else:
            count = next(iter(marks_by_length.values()), 0)  # Without groups, all rows are one series.
            rows = mark_last_rows(dataset, order, self._marks, count)
        return rows, (trained, held_out)

    @property
    def _why_none_are_held_out(self) -> str:
        return "a series has too few windows"

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        """Returns how many windows train; windows for validation are counted where they are marked."""
        marks = Values(self)["validationIndicatorCol"]
        training_rows = rows.where(~ColumnNames.of(rows).column(marks)) if marks else rows
        return count_windows(self._lengths(training_rows), self._window()), 0

    def _lengths(self, rows: DataFrame) -> list[tuple[int, int]]:
        """Returns each number of rows that series have, with the number of series that have it."""
        group = Values(self)["groupCol"]
        return lengths_of_series(rows, ColumnNames.of(rows).column(group) if group else F.lit(0))

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the columns that tell windows apart, the target, and an array of columns for each input."""
        p = Values(self)
        names = ColumnNames.of(dataset)
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
        trained = model.trained
        window = self._window()
        inputs = []
        for index, spec in enumerate(trained.inputs):
            rows = window.rows if index in window.known_ahead else window.context
            inputs.append(replace(spec, shape=(rows, *spec.shape)))
        return model._with(replace(trained, inputs=tuple(inputs)), model._summary)


def _check_names_of_keys(p: Values) -> None:
    """Refuses columns of series and order that have the name of a column which `evaluate` adds."""
    for name in (p["groupCol"], p["orderCol"]):
        if str(name).lower() in COMPARED:
            hint = f"rename it: {', '.join(COMPARED)} are the columns that evaluate and backtest add"
            what = f"column {name!r} would be there twice in the forecasts of evaluate"
            raise ConfigError(what, hint=hint, code="ST-COLUMN-TAKEN")


def _check_training(p: Values) -> None:
    """Refuses Params with which no windows can be trained on."""
    if p["step"] < 1:
        raise ConfigError(f"step is {p['step']}", hint="set it to 1 or more", param="step", code="ST-VALUE")
    if p["season"] is not None and p["season"] < 1:
        raise ConfigError(f"season is {p['season']}", hint="set 1 for no season", param="season", code="ST-VALUE")
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


def _check_model_params(p: Values, trained: TrainedModule) -> None:
    """Refuses windows or columns that differ from a fitted model's: they would be scaled as the model's columns are."""
    model = Values(p["module"])
    model_values = {name: model[name] for name in _MODEL_PARAMS} | {
        "scaling": trained.params.get("scaling", "window") or "none"
    }
    for name, value in model_values.items():
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
    """Returns a column of numbers as it is, and a column of categories as indices, as `category_indices` does."""
    if categories is None:
        return column
    position = F.array_position(F.array(*map(F.lit, categories)), column) if categories else F.lit(0)
    # `array_position` counts from 1; 0 stands for an unknown category.
    return F.when(column.isNull(), 1).when(position > 0, position + (UNTRAINED - 1)).otherwise(0)
