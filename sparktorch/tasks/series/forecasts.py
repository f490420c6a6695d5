"""Forecasts from rows in Arrow, sorted by series and time: windows are cut from them, checked and scored."""

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

_WINDOWS, _VALUES = 2048, 1 << 22  # At most so many are scored at a time.

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SeriesColumns:
    """The columns that are read for forecasts, and those that they have.

    Attributes:
        group: The column that tells series apart; empty if all rows are one.
        order: The column of integers, dates or timestamps that orders the rows of a series.
        target: The column that is forecast.
        past: Columns known up to the last row of the context.
        future: Columns known ahead.
        static: Columns that do not change within a series.
        categories: The known categories, strings or booleans, of each static column, `None` for one of numbers; without
            it, all static columns are numbers.
        context: Rows that a forecast is made from.
        horizon: Rows of a forecast.
        quantiles: The quantiles that the module returns, ascending; without, it returns one value.
        prediction: The column of forecasts.
        skips: Whether series without a forecast are left out; otherwise they are an error.
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
        """The columns that say which row of which series a row is."""
        return [*([self.group] if self.group else []), self.order]

    @property
    def inputs(self) -> list[str]:
        """The columns of numbers and categories, in the order in which rows have them after the keys."""
        return [self.target, *self.past, *self.future, *self.static]

    @property
    def vocabulary(self) -> dict[str, Sequence[Any]]:
        """The categories that the fit has learned, of each column that has some."""
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
    """Which known rows are forecast, as if they were not.

    Attributes:
        origins: Number of forecasts of each series, the last one of its last rows.
        stride: Rows from one forecast's first row to that of the next.
        season: Rows of a season, for the naive forecast: the value one season before.
    """

    origins: int = 1
    stride: int = 1
    season: int = 1


def columns_of_quantiles(columns: SeriesColumns) -> list[str]:
    """Returns the names of the columns of quantiles: `prediction_p10` of 0.1."""
    names = [f"{columns.prediction}_p{100 * quantile:.10g}" for quantile in columns.quantiles]
    return [name.replace(".", "_") for name in names]


class _Series(NamedTuple):
    """The rows of a series.

    Attributes:
        group: The series' key, an array of one value.
        order: The times of the rows.
        values: The columns of numbers, and of indices of categories.
        steps: The steps of all rows, by which a backtest finds the row of one season before.
    """

    group: pa.Array
    order: pa.Array
    values: dict[str, Floats]
    steps: Steps | None


class _Window(NamedTuple):
    """What a forecast is made from, and compared with.

    Attributes:
        group: The series' key, an array of one value.
        times: The times of the horizon's rows.
        inputs: The module's arguments, without the axis of windows.
        origin: The time of the last row before the horizon, an array of one value.
        label: The target in the horizon, of a backtest.
        naive: The seasonal naive forecast, of a backtest.
        scale: The mean absolute error of naive forecasts before the horizon, of a backtest.
    """

    group: pa.Array
    times: pa.Array
    inputs: list[npt.NDArray[np.float32]]
    origin: pa.Array
    label: Floats
    naive: Floats
    scale: float


def forecast(
    batches: Iterable[pa.RecordBatch], columns: SeriesColumns, scorer: Scorer, backtest: Backtest | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields forecasts, a row for each step of the horizon: the keys, `prediction` and its quantiles.

    Of a backtest, rows also have the columns `cutoff` (the time of the last row that the forecast knows), `step` (from
    1 on), `label`, `naive` (the seasonal naive forecast) and `scale` (the mean absolute error of naive forecasts of the
    rows before). The last two are null where no row is one season before.

    Args:
        batches: Rows of `columns.keys` and `columns.inputs`, of which numbers are double, sorted by the keys.
        columns: What the columns are.
        scorer: What scores with the module.
        backtest: Which rows to forecast; by default those after the last one of each series that has a target.

    Raises:
        ColumnError: A series has fewer rows than the context, a null in it, or uneven steps.
    """
    windows = (window for series in series_in(batches, columns) for window in _windows(series, columns, backtest))
    values = (columns.context + columns.horizon) * len(columns.inputs)
    while group := list(islice(windows, max(1, min(_WINDOWS, _VALUES // values)))):
        yield _scored(group, columns, scorer, backtest)


def series_in(batches: Iterable[pa.RecordBatch], columns: SeriesColumns) -> Iterator[pa.Table]:
    """Yields the rows of each series, given rows that are sorted by series."""
    batches_of_series: list[pa.RecordBatch] = []
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
    """Yields the windows of one series; refuses, or leaves out, those that cannot be scored."""
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
    origins = [end]
    if backtest is not None:
        last = end - columns.horizon
        origins = [last - backtest.stride * index for index in reversed(range(backtest.origins))]
    left_out = (ColumnError,) if columns.skips else ()
    for origin in origins:
        with suppress(*left_out):
            yield _window(series, origin, columns, backtest)


def _values(rows: pa.Table, columns: SeriesColumns) -> dict[str, Floats]:
    """Returns the numbers of each column, and the indices of categories."""
    values = {name: np.asarray(rows[name], np.float64) for name in columns.numbers}
    for name, categories in columns.vocabulary.items():
        values[name] = category_indices(rows[name].chunk(0), categories).astype(np.float64)
    return values


def _window(series: _Series, origin: int, columns: SeriesColumns, backtest: Backtest | None) -> _Window:
    """Returns the window whose horizon begins at row `origin`; refuses one that is not complete."""
    order, target = series.order, columns.target
    start, stop = origin - columns.context, origin + columns.horizon

    def refuse(what: str, column: str, remedy: str = "add what is missing") -> NoReturn:
        subject = f"series {series.group[0].as_py()!r}" if columns.group else "the series"
        hint = f"{remedy}, or set handleInvalid='skip', which leaves out such series"
        raise ColumnError(f"{subject} {what}", hint=hint, column=column)

    def present(rows: slice, names: Sequence[str]) -> Floats:
        values = np.column_stack([series.values[name][rows] for name in names])
        missing = np.argwhere(~np.isfinite(values))
        if missing.size:
            row, column = missing[0].tolist()
            time = order[rows.start + row].as_py()
            refuse(f"has no number in column {names[column]!r} where {columns.order} is {time}", names[column])
        return values

    if start < 0:
        need = f"a context of {columns.context}" + (" before the rows to compare with" if backtest else "")
        refuse(f"has {counted(max(0, origin), 'row', 'rows')} with {target!r} for {need}", target)
    if columns.future and stop > len(order):
        what = f"has {counted(len(order) - origin, 'row', 'rows')} after its last {target!r}, and horizon is "
        refuse(f"{what}{columns.horizon}: what is known ahead is in rows without a target", columns.future[0])
    steps = steps_of(order[start:stop])
    if len(steps.uneven):
        earlier, later = (order[start + int(steps.uneven[0]) + horizon_rows].as_py() for horizon_rows in (-1, 0))
        if earlier == later:
            refuse(f"has {earlier} twice", columns.order, "aggregate or drop duplicates")
        refuse(f"has uneven steps: after {earlier} comes {later}", columns.order)
    context_rows, window_rows, horizon_rows = slice(start, origin), slice(start, stop), slice(origin, stop)
    inputs = ((context_rows, [target, *columns.past]), (window_rows, columns.future), (context_rows, columns.static))
    scale, naive = np.nan, np.empty(0)
    if backtest is not None:
        assert series.steps is not None
        scale, naive = _naive(series.values[target], series.steps, origin, columns.horizon, backtest.season)
    return _Window(
        group=series.group,
        times=steps.after(columns.context - 1, columns.horizon),
        inputs=[present(rows, names).astype(np.float32) for rows, names in inputs if names],
        origin=order[origin - 1 : origin],
        label=present(horizon_rows, [target])[:, 0] if backtest else np.empty(0),
        naive=naive,
        scale=scale,
    )


def _naive(target: Floats, steps: Steps, origin: int, horizon: int, season: int) -> tuple[float, Floats]:
    """Returns the mean absolute error of seasonal naive forecasts before `origin`, and the one from there on.

    What is a season before is found by its time: rows may be missing before the context.
    """
    times, season_length = steps.counts[:origin], steps.step * season

    def values_at(counts: npt.NDArray[np.int64]) -> Floats:
        positions = np.searchsorted(times, counts).clip(max=origin - 1)
        return np.where(times[positions] == counts, target[positions], np.nan)

    errors = np.abs(target[:origin] - values_at(times - season_length))
    errors = errors[np.isfinite(errors)]
    ahead = steps.counts[origin : origin + horizon] - season_length * (1 + np.arange(horizon) // season)
    return float(errors.mean()) if len(errors) else np.nan, values_at(ahead)


def _scored(
    windows: Sequence[_Window], columns: SeriesColumns, scorer: Scorer, backtest: Backtest | None
) -> pa.RecordBatch:
    """Returns the rows of the forecasts of some windows."""
    parts = zip(*(window.inputs for window in windows), strict=True)
    tensors = [torch.from_numpy(np.stack(part)) for part in parts]
    values = np.asarray(scorer.score_tensors(tensors)["prediction"], np.float64)
    middle = values
    if columns.quantiles:
        values = np.sort(values, axis=-1)  # Quantiles may cross, as each has a loss of its own.
        middle = values[..., np.abs(np.array(columns.quantiles) - 0.5).argmin()]
    window_of_row = np.repeat(np.arange(len(windows)), columns.horizon)
    arrays: dict[str, Any] = {}
    if columns.group:
        arrays[columns.group] = pa.concat_arrays([window.group for window in windows]).take(pa.array(window_of_row))
    arrays[columns.order] = pa.concat_arrays([window.times for window in windows])
    if backtest is not None:
        scales = np.array([window.scale for window in windows])[window_of_row]
        arrays["cutoff"] = pa.concat_arrays([window.origin for window in windows]).take(pa.array(window_of_row))
        arrays["step"] = pa.array(np.tile(np.arange(1, columns.horizon + 1, dtype=np.int32), len(windows)))
        arrays["label"] = pa.array(np.concatenate([window.label for window in windows]))
        arrays["naive"] = pa.array(np.concatenate([window.naive for window in windows]), from_pandas=True)
        arrays["scale"] = pa.array(np.where(scales > 0, scales, np.nan), from_pandas=True)
    arrays[columns.prediction] = pa.array(middle.reshape(-1))
    for index, name in enumerate(columns_of_quantiles(columns)):
        arrays[name] = pa.array(values[..., index].reshape(-1))
    return pa.RecordBatch.from_pydict(arrays)
