"""Forecasts from sorted rows equal those that NumPy cuts and scores one by one; what is missing is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.errors import ColumnError
from sparktorch.model.scorer import Scorer
from sparktorch.tasks.series.forecasts import Backtest, SeriesColumns, forecast
from tests.support.models import trained_module

COLUMNS = SeriesColumns(
    group="shop", order="day", target="sold", past=["visits"], future=["price"], static=["size"], context=4, horizon=3
)
PLAIN = SeriesColumns(group="", order="day", target="sold", context=4, horizon=3)


def scorer(columns: SeriesColumns) -> tuple[Scorer, torch.nn.Module]:
    figures = {of: [(1.0, 2.0)] * len(getattr(columns, of)) for of in ("past", "future", "static")}
    params = {"module": "sparktorch.tasks.series.network:SeriesNetwork", "params": {"hidden": [5]}, **figures}
    params |= {"context": columns.context, "horizon": columns.horizon, "quantiles": list(columns.quantiles)}
    parts = [torch.zeros(2, 4, 1 + len(columns.past)), torch.zeros(2, 7, 1), torch.zeros(2, 4, 1)]
    example = parts if columns.future else parts[:1]
    trained = trained_module("sparktorch.tasks.series.network:SeriesModule", *example, params=params)
    return Scorer(trained), trained.build()


def rows(lengths: Sequence[int], columns: SeriesColumns = COLUMNS, **changed: Any) -> pa.Table:
    generator = np.random.default_rng(0)
    count = sum(lengths)
    values: dict[str, Any] = {
        "shop": np.repeat([f"s{place}" for place in range(len(lengths))], lengths),
        "day": np.concatenate([np.arange(length) * 2 for length in lengths]),
        **{name: generator.normal(size=count) + 5 for name in columns.numbers},
    }
    return pa.table({name: changed.get(name, values[name]) for name in [*columns.keys, *columns.numbers]})


def batches(table: pa.Table, size: int) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist([], table.schema)  # Spark may send one without rows
    yield from table.to_batches(max_chunksize=size)


def forecasts(table: pa.Table, columns: SeriesColumns, backtest: Backtest | None = None, size: int = 5) -> Any:
    found = list(forecast(batches(table, size), columns, scorer(columns)[0], backtest))
    return pa.Table.from_batches(found).to_pandas()


def by_hand(values: np.ndarray[Any, Any], origin: int, columns: SeriesColumns) -> np.ndarray[Any, Any]:
    """Returns the module's forecast of the rows from `origin` on, of the columns of numbers of one series."""
    past, future = values[origin - 4 : origin], values[origin - 4 : origin + 3]
    parts = [past[:, :2], future[:, 2:3], past[:, 3:]] if columns.past else [past[:, :1]]
    with torch.no_grad():
        tensors = [torch.from_numpy(part.astype(np.float32))[None] for part in parts]
        return np.asarray(scorer(columns)[1](*tensors)[0])


def without(table: pa.Table, name: str, places: Sequence[int]) -> pa.Table:
    values = np.asarray(table[name], np.float64).copy()
    values[list(places)] = np.nan
    return table.set_column(table.column_names.index(name), name, pa.array(values, from_pandas=True))


def numbers(table: pa.Table, columns: SeriesColumns = COLUMNS) -> np.ndarray[Any, Any]:
    return np.column_stack([np.array(table[name], np.float64) for name in columns.numbers])


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_a_forecast_goes_on_after_the_last_row_with_a_target(size: int) -> None:
    table = without(rows([9, 12]), "sold", [6, 7, 8, 18, 19, 20])
    found = forecasts(table, COLUMNS, size=size)
    assert found["shop"].tolist() == ["s0"] * 3 + ["s1"] * 3
    assert found["day"].tolist() == [12, 14, 16, 18, 20, 22]
    want = [by_hand(numbers(table.slice(0, 9)), 6, COLUMNS), by_hand(numbers(table.slice(9)), 9, COLUMNS)]
    assert np.allclose(found["prediction"], np.concatenate(want), atol=1e-5)


def test_rows_without_a_group_are_one_series() -> None:
    table = rows([8], PLAIN)
    found = forecasts(table, PLAIN)
    assert found.columns.tolist() == ["day", "prediction"]
    assert found["day"].tolist() == [16, 18, 20]
    assert np.allclose(found["prediction"], by_hand(numbers(table, PLAIN), 8, PLAIN), atol=1e-5)


def test_quantiles_are_in_order_and_the_prediction_is_the_middle_one() -> None:
    columns = replace(PLAIN, quantiles=[0.025, 0.4, 0.9])
    table = rows([8], columns)
    found = forecasts(table, columns)
    want = np.sort(by_hand(numbers(table, columns), 8, columns), axis=1)
    assert np.allclose(found[["prediction_p2_5", "prediction_p40", "prediction_p90"]], want, atol=1e-5)
    assert found["prediction"].equals(found["prediction_p40"].rename("prediction"))


def test_a_backtest_forecasts_from_several_origins_and_adds_what_to_compare_with() -> None:
    table = rows([12, 11])
    found = forecasts(table, COLUMNS, Backtest(origins=2, stride=2, season=2))
    start = 0
    for name, length in (("s0", 12), ("s1", 11)):
        values = numbers(table.slice(start, length))
        start += length
        of = found[found["shop"] == name].reset_index(drop=True)
        for place, origin in enumerate([length - 5, length - 3]):
            one = of.iloc[3 * place : 3 * place + 3]
            target = values[:, 0]
            assert one["cutoff"].tolist() == [2 * (origin - 1)] * 3
            assert one["step"].tolist() == [1, 2, 3]
            assert one["day"].tolist() == [2 * origin, 2 * origin + 2, 2 * origin + 4]
            assert np.array_equal(one["label"], target[origin : origin + 3])
            assert np.array_equal(one["naive"], target[[origin - 2, origin - 1, origin - 2]])
            assert np.allclose(one["scale"], np.abs(target[2:origin] - target[: origin - 2]).mean(), atol=1e-12)
            assert np.allclose(one["prediction"], by_hand(values, origin, COLUMNS), atol=1e-5)


def test_behind_a_gap_the_naive_forecast_is_that_of_the_time_a_season_before() -> None:
    days = np.delete(np.arange(40), [30])  # before the context of 33 to 36
    table = rows([39], PLAIN, day=days, sold=np.where(days == 25, 50.0, days % 12))
    found = forecasts(table, PLAIN, Backtest(season=12))
    assert found["day"].tolist() == [37, 38, 39]
    assert found["naive"].tolist() == [50.0, 2.0, 3.0]
    assert np.allclose(found["scale"], 49 / 24)  # of days 12 to 36 but 30, the error of day 25 alone is not 0
    found = forecasts(table, PLAIN, Backtest(season=7))
    assert found["naive"].isna().tolist() == [True, False, False]


def test_what_has_no_season_before_it_has_no_scale() -> None:
    flat = rows([12], PLAIN, sold=np.ones(12))
    assert forecasts(flat, PLAIN, Backtest(season=1))["scale"].isna().all()
    found = forecasts(rows([7], PLAIN), PLAIN, Backtest(season=7))
    assert found[["scale", "naive"]].isna().all(axis=None)


def test_windows_are_scored_in_batches_of_so_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows([9, 9, 9, 9])
    want = forecasts(table, COLUMNS, Backtest())
    for values, sizes in ((7 * 4 * 3, [9, 3]), (1, [3, 3, 3, 3])):  # a window has 7 rows of 4 columns
        monkeypatch.setattr("sparktorch.tasks.series.forecasts._VALUES", values)
        found = list(forecast(batches(table, 100), COLUMNS, scorer(COLUMNS)[0], Backtest()))
        assert [batch.num_rows for batch in found] == sizes
        assert np.allclose(pa.Table.from_batches(found)["prediction"], want["prediction"], atol=1e-6)


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        (rows([9, 6]), "price", "series 's0' has 0 rows after its last 'sold', and horizon is 3"),
        (without(rows([9]), "sold", [3, 6, 7, 8]), "sold", "'s0' has no number in column 'sold' where day is 6"),
        (without(without(rows([9]), "sold", [6, 7, 8]), "visits", [5]), "visits", "'visits' where day is 10"),
        (without(without(rows([9]), "sold", [6, 7, 8]), "price", [8]), "price", "'price' where day is 16"),
        (without(without(rows([9]), "sold", [6, 7, 8]), "size", [2]), "size", "'size' where day is 4"),
        (without(rows([6]), "sold", [3, 4, 5]), "sold", "has 3 rows with 'sold' for a context of 4"),
        (
            without(rows([9], day=[0, 2, 4, 6, 8, 11, 12, 14, 16]), "sold", [6, 7, 8]),
            "day",
            "'s0' has uneven steps: after 8 comes 11",
        ),
        (
            without(rows([9], day=[0, 2, 4, 6, 8, 8, 10, 12, 14]), "sold", [6, 7, 8]),
            "day",
            "(?s)'s0' has 8 twice.*drop duplicates",
        ),
    ],
)
def test_a_series_that_cannot_be_forecast_is_told_or_left_out(table: pa.Table, column: str, message: str) -> None:
    with pytest.raises(ColumnError, match=message) as refused:
        forecasts(table, COLUMNS)
    assert refused.value.where == {"column": column}
    sound = without(rows([9]), "sold", [6, 7, 8])
    sound = sound.set_column(0, "shop", pa.array(["z"] * 9))
    found = forecasts(pa.concat_tables([table, sound]), replace(COLUMNS, skips=True))
    assert found["shop"].tolist() == ["z"] * 3


def test_a_gap_before_the_context_does_not_matter() -> None:
    table = rows([9], PLAIN, day=[0, 1, 2, 9, 10, 20, 30, 40, 50])
    assert forecasts(table, PLAIN)["day"].tolist() == [60, 70, 80]


def test_a_null_in_the_order_is_refused() -> None:
    table = rows([5], PLAIN, day=pa.array([date(2024, 1, 1), None, None, None, None]))
    with pytest.raises(ColumnError, match="column 'day' holds null"):
        forecasts(table, PLAIN)


def test_rows_without_a_group_are_no_series_of_their_own() -> None:
    table = without(rows([9, 9], shop=pa.array([None] * 9 + ["s1"] * 9)), "sold", [6, 7, 8, 15, 16, 17])
    with pytest.raises(ColumnError, match="column 'shop' holds null"):
        forecasts(table, COLUMNS)
    assert forecasts(table, replace(COLUMNS, skips=True))["shop"].tolist() == ["s1"] * 3


@pytest.mark.parametrize(("known", "column"), [(["a", "b"], ["b", None, "new"]), ([False, True], [True, None, False])])
def test_static_categories_are_read_as_the_indices_that_training_has_for_them(known: list[Any], column: Any) -> None:
    kinds = replace(COLUMNS, static=["size", "kind"], categories=[None, known])
    one = replace(COLUMNS, static=["size", "index"])
    plain = rows([9, 9, 9], one, index=np.repeat(np.array([3, 1, 0 if "new" in column else 2], float), 9))
    read = plain.rename_columns([name.replace("index", "kind") for name in plain.column_names])
    read = read.set_column(read.num_columns - 1, "kind", pa.array([value for value in column for _ in range(9)]))
    seen = []

    class Sums:
        def score_tensors(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
            seen.append(tensors)
            return {"prediction": np.zeros((len(tensors[0]), 3))}

    for table, columns in ((read, kinds), (plain, one)):
        table = without(table, "sold", [6, 7, 8, 15, 16, 17, 24, 25, 26])
        list(forecast(batches(table, 7), columns, Sums()))  # type: ignore[arg-type]
    assert seen[0][2][:, -1, 1].tolist() == [3, 1, 0 if "new" in column else 2]
    for found, want in zip(*seen, strict=True):
        torch.testing.assert_close(found, want)
