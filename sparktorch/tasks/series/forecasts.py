"""Forecasts from Arrow batches that are sorted by series and time: windows are cut from rows, checked and scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.data.sampling.even_steps import Steps, steps_of
from sparktorch.errors import ColumnError, counted
from sparktorch.model.scorer import Scorer
from sparktorch.tasks.shared.columns import category_indices

__all__ = ["Backtest", "SeriesColumns", "columns_of_quantiles", "forecast", "series_in"]

# At most this number of windows, with at most this number of values, are scored at a time.
_WINDOWS = 2048
_VALUES = 1 << 22

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SeriesColumns:
    """The columns from which forecasts are made, and the columns of forecasts.

    Attributes:
        group: The column that tells series apart; empty if all rows are one series.
        order: The column of integers, dates or timestamps that orders the rows of a series.
        target: The column that is forecast.
        past: Columns known up to the last row of the context.
        future: Columns known ahead.
        static: Columns that do not change within a series.
        categories: The known categories, strings or booleans, of each static column, or `None` for a column of numbers.
            If this is empty, all static columns are numbers.
        context: Rows from which a forecast is made.
        horizon: Rows of a forecast.
        quantiles: The quantiles that the module returns, ascending. Without quantiles, it returns one value.
        prediction: The column of forecasts.
        skips: Whether series that cannot be forecast are left out; otherwise they are an error.
    """

    group: str
    order: str
    target: str
    past: Sequence[str] = ()
    future: Sequence[str] = ()
    static: Sequence[str] = ()
    categories: Sequence[Sequence[Any] | None] = ()
    context: int
    horizon: int
    quantiles: Sequence[float] = ()
    prediction: str = "prediction"
    skips: bool = False

    @property
    def keys(self) -> list[str]:
        """The columns that identify a row: its series, if there are several, and its time."""
        return [*([self.group] if self.group else []), self.order]

    @property
    def inputs(self) -> list[str]:
        """The columns of numbers and categories, in the order in which they follow the keys."""
        return [self.target, *self.past, *self.future, *self.static]

    @property
    def vocabulary(self) -> dict[str, Sequence[Any]]:
        """The categories that the fit has learned, by column."""
        pairs = zip(self.static, self.categories, strict=False)
        return {name: categories for name, categories in pairs if categories is not None}

    @property
    def numbers(self) -> list[str]:
        """The columns of numbers."""
        return [name for name in self.inputs if name not in self.vocabulary]

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Says which known rows are forecast as if they were yet to come.

    Attributes:
        origins: Number of forecasts of each series. The last forecast ends with the series' last row.
        stride: Rows from the first row of a forecast to the first row of the next.
        season: Rows of a season, for the naive forecast, which is the value one season before.
    """

    origins: int = 1
    stride: int = 1
    season: int = 1


def columns_of_quantiles(columns: SeriesColumns) -> list[str]:
    """Returns the name of each quantile's column, such as `prediction_p10` for 0.1."""
    names = [f"{columns.prediction}_p{100 * quantile:.10g}" for quantile in columns.quantiles]
    return [name.replace(".", "_") for name in names]


class _Series(NamedTuple):
    """The rows of a series.

    Attributes:
        group: The series' key, an array of one value.
        order: The times of the rows.
        values: The numbers, or the indices of categories, by column.
        steps: The steps between all rows, by which a backtest finds the row one season before.
    """

    group: pa.Array
    order: pa.Array
    values: dict[str, Floats]
    steps: Steps | None


class _Window(NamedTuple):
    """The inputs of a forecast, and what a backtest compares the forecast with.

    Attributes:
        group: The series' key, an array of one value.
        times: The times of the horizon's rows.
        inputs: The module's arguments, without the axis of windows.
        cutoff: The time of the last row before the horizon, an array of one value.
        label: In a backtest, the target in the horizon.
        naive: In a backtest, the seasonal naive forecast.
        scale: In a backtest, the mean absolute error of naive forecasts before the horizon.
    """

    group: pa.Array
    times: pa.Array
    inputs: list[npt.NDArray[np.float32]]
    cutoff: pa.Array
    label: Floats
    naive: Floats
    scale: float


def forecast(
    batches: Iterable[pa.RecordBatch], columns: SeriesColumns, scorer: Scorer, backtest: Backtest | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields forecasts, a row for each step of the horizon: the keys, `prediction` and its quantiles.

    In a backtest, rows also have the columns `cutoff` (the time of the last row that the forecast knows), `step` (from
    1 on), `label`, `naive` (the seasonal naive forecast) and `scale` (the mean absolute error of naive forecasts of the
    rows before). `naive` and `scale` are null where no row is one season before.

    Args:
        batches: Rows of `columns.keys` and `columns.inputs`, sorted by the keys; numbers are double.
        columns: The columns of rows and of forecasts.
        scorer: The scorer of the module.
        backtest: The known rows to forecast; by default, the rows after the last one of each series that has a target.

    Raises:
        ColumnError: A series has fewer rows than the context, a null in it, or uneven steps.
    """
    windows = (window for rows in series_in(batches, columns) for window in _windows(rows, columns, backtest))
    values_per_window = (columns.context + columns.horizon) * len(columns.inputs)
    count = max(1, min(_WINDOWS, _VALUES // values_per_window))
    while next_windows := list(islice(windows, count)):
        yield _score(next_windows, columns, scorer, backtest)


def series_in(batches: Iterable[pa.RecordBatch], columns: SeriesColumns) -> Iterator[pa.Table]:
    """Yields the rows of each series, from batches whose rows are sorted by series."""
    batches_of_series: list[pa.RecordBatch] = []  # A series may begin in one batch and end in another.
    for batch in batches:
        if not batch.num_rows:
            continue
        starts = np.zeros(1, np.int64)
        if columns.group:
            codes = np.asarray(batch.column(0).dictionary_encode("encode").indices)
            starts = np.concatenate([starts, np.flatnonzero(np.diff(codes)) + 1])
        for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
            part = batch.slice(start, stop - start)
            if batches_of_series and columns.group and batches_of_series[-1].column(0)[0] != part.column(0)[0]:
                yield pa.Table.from_batches(batches_of_series)
                batches_of_series = []
            batches_of_series.append(part)
    if batches_of_series:
        yield pa.Table.from_batches(batches_of_series)


def _windows(rows: pa.Table, columns: SeriesColumns, backtest: Backtest | None) -> Iterator[_Window]:
    """Yields the windows of one series; refuses, or leaves out, windows that cannot be scored."""
    rows = rows.combine_chunks()
    for name in columns.keys:
        if rows[name].null_count:
            if columns.skips and name == columns.group:
                return
            hint = "leave such rows out" + (", or set handleInvalid='skip'" if name == columns.group else "")
            raise ColumnError(f"column {name!r} holds null", hint=hint, column=name, code="ST-NULL")
    order = rows[columns.order].chunk(0)
    series = _Series(
        group=rows[columns.group].chunk(0)[:1] if columns.group else pa.nulls(1),
        order=order,
        values=_values(rows, columns),
        steps=steps_of(order) if backtest is not None and len(order) > 1 else None,
    )
    with_target = np.flatnonzero(~np.isnan(series.values[columns.target]))
    end = int(with_target[-1]) + 1 if len(with_target) else 0
    origins = [end]  # An origin is the position of the first row of a horizon.
    if backtest is not None:
        last_origin = end - columns.horizon
        origins = [last_origin - backtest.stride * index for index in reversed(range(backtest.origins))]
    ignored_errors = (ColumnError,) if columns.skips else ()
    for origin in origins:
        with suppress(*ignored_errors):
            yield _window(series, origin, columns, backtest)


def _values(rows: pa.Table, columns: SeriesColumns) -> dict[str, Floats]:
    """Returns the numbers, or the indices of categories, by column."""
    values = {name: np.asarray(rows[name], np.float64) for name in columns.numbers}
    for name, categories in columns.vocabulary.items():
        values[name] = category_indices(rows[name].chunk(0), categories).astype(np.float64)
    return values


def _window(series: _Series, origin: int, columns: SeriesColumns, backtest: Backtest | None) -> _Window:
    """Returns the window whose horizon begins at the position `origin`; refuses a window that is not complete."""
    _check_row_count(series, origin, columns, backtest)
    start = origin - columns.context
    stop = origin + columns.horizon
    steps = steps_of(series.order[start:stop])
    if len(steps.uneven):
        _refuse_uneven(series, start + int(steps.uneven[0]), columns)
    context_rows = slice(start, origin)
    inputs = [_finite_values(series, context_rows, [columns.target, *columns.past], columns)]
    if columns.future:
        inputs.append(_finite_values(series, slice(start, stop), columns.future, columns))
    if columns.static:
        inputs.append(_finite_values(series, context_rows, columns.static, columns))
    label = np.empty(0)
    naive = np.empty(0)
    scale = np.nan
    if backtest is not None:
        assert series.steps is not None
        label = _finite_values(series, slice(origin, stop), [columns.target], columns)[:, 0]
        scale, naive = _naive(series.values[columns.target], series.steps, origin, columns.horizon, backtest.season)
    return _Window(
        group=series.group,
        times=steps.after(columns.context - 1, columns.horizon),
        inputs=[values.astype(np.float32) for values in inputs],
        cutoff=series.order[origin - 1 : origin],
        label=label,
        naive=naive,
        scale=scale,
    )


def _check_row_count(series: _Series, origin: int, columns: SeriesColumns, backtest: Backtest | None) -> None:
    """Refuses a series with too few rows before `origin`, or too few after it that say what is known ahead."""
    if origin < columns.context:
        need = f"a context of {columns.context}" + (" before the rows to compare with" if backtest else "")
        what = f"has {counted(max(0, origin), 'row', 'rows')} with {columns.target!r} for {need}"
        raise _refusal(series, columns, what, columns.target)
    rows_ahead = len(series.order) - origin
    if columns.future and rows_ahead < columns.horizon:
        what = f"has {counted(rows_ahead, 'row', 'rows')} after its last {columns.target!r}, and horizon is "
        what += f"{columns.horizon}: what is known ahead is in rows without a target"
        raise _refusal(series, columns, what, columns.future[0])


def _refuse_uneven(series: _Series, position: int, columns: SeriesColumns) -> NoReturn:
    """Refuses a series in which the row at a position is not one step after the row before."""
    earlier = series.order[position - 1].as_py()
    later = series.order[position].as_py()
    if earlier == later:
        remedy = "aggregate or drop duplicates"
        raise _refusal(series, columns, f"has {earlier} twice", columns.order, remedy)
    raise _refusal(series, columns, f"has uneven steps: after {earlier} comes {later}", columns.order)


def _finite_values(series: _Series, rows: slice, names: Sequence[str], columns: SeriesColumns) -> Floats:
    """Returns the values of some columns in some rows, of shape `(rows, names)`; refuses values that are missing."""
    values = np.column_stack([series.values[name][rows] for name in names])
    missing = np.argwhere(~np.isfinite(values))
    if missing.size:
        row, column = missing[0].tolist()
        time = series.order[rows.start + row].as_py()
        what = f"has no number in column {names[column]!r} where {columns.order} is {time}"
        raise _refusal(series, columns, what, names[column])
    return values


def _refusal(
    series: _Series, columns: SeriesColumns, what: str, column: str, remedy: str = "add what is missing"
) -> ColumnError:
    """Returns the error that refuses a series."""
    subject = f"series {series.group[0].as_py()!r}" if columns.group else "the series"
    hint = f"{remedy}, or set handleInvalid='skip', which leaves out such series"
    return ColumnError(f"{subject} {what}", hint=hint, column=column)


def _naive(target: Floats, steps: Steps, origin: int, horizon: int, season: int) -> tuple[float, Floats]:
    """Returns the mean absolute error of seasonal naive forecasts before `origin`, and the forecast from `origin` on.

    The row one season before is looked up by its time: rows may be missing before the context.
    """
    times = steps.counts[:origin]  # These are whole numbers on a scale on which steps are even.
    season_time = steps.step * season

    def target_at(wanted_times: npt.NDArray[np.int64]) -> Floats:
        positions = np.searchsorted(times, wanted_times).clip(max=origin - 1)
        return np.where(times[positions] == wanted_times, target[positions], np.nan)

    errors = np.abs(target[:origin] - target_at(times - season_time))
    errors = errors[np.isfinite(errors)]
    # Rows of the horizon beyond one season repeat the last season before the origin.
    seasons_back = 1 + np.arange(horizon) // season
    naive = target_at(steps.counts[origin : origin + horizon] - season_time * seasons_back)
    return float(errors.mean()) if len(errors) else np.nan, naive


def _score(
    windows: Sequence[_Window], columns: SeriesColumns, scorer: Scorer, backtest: Backtest | None
) -> pa.RecordBatch:
    """Scores windows, and returns the rows of their forecasts."""
    arguments = zip(*(window.inputs for window in windows), strict=True)
    tensors = [torch.from_numpy(np.stack(argument)) for argument in arguments]
    values = np.asarray(scorer.score_tensors(tensors)["prediction"], np.float64)
    prediction = values
    if columns.quantiles:
        values = np.sort(values, axis=-1)  # Quantiles may cross, as each of them has its own loss.
        prediction = values[..., np.abs(np.array(columns.quantiles) - 0.5).argmin()]
    window_of_row = np.repeat(np.arange(len(windows)), columns.horizon)
    arrays: dict[str, Any] = {}
    if columns.group:
        arrays[columns.group] = pa.concat_arrays([window.group for window in windows]).take(pa.array(window_of_row))
    arrays[columns.order] = pa.concat_arrays([window.times for window in windows])
    if backtest is not None:
        scales = np.array([window.scale for window in windows])[window_of_row]
        arrays["cutoff"] = pa.concat_arrays([window.cutoff for window in windows]).take(pa.array(window_of_row))
        arrays["step"] = pa.array(np.tile(np.arange(1, columns.horizon + 1, dtype=np.int32), len(windows)))
        arrays["label"] = pa.array(np.concatenate([window.label for window in windows]))
        arrays["naive"] = pa.array(np.concatenate([window.naive for window in windows]), from_pandas=True)
        arrays["scale"] = pa.array(np.where(scales > 0, scales, np.nan), from_pandas=True)
    arrays[columns.prediction] = pa.array(prediction.reshape(-1))
    for index, name in enumerate(columns_of_quantiles(columns)):
        arrays[name] = pa.array(values[..., index].reshape(-1))
    return pa.RecordBatch.from_pydict(arrays)
