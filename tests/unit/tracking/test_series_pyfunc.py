"""The pyfunc of series takes the rows that pandas makes of files, and tells which orders it cannot read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ColumnError
from sparktorch.tasks.series.forecasts import SeriesColumns
from sparktorch.tasks.series.pyfunc import SeriesPyFunc
from tests.support.models import trained_module

COLUMNS = SeriesColumns(group="shop", order="day", target="sold", context=4, horizon=2)
DAYS = pd.date_range("2024-03-29", periods=8)


@pytest.fixture(scope="module")
def served() -> SeriesPyFunc:
    params = {"module": "sparktorch.tasks.series.network:SeriesNetwork", "params": {}, "context": 4, "horizon": 2}
    inputs = [TensorSpec(name="x0", column="past values", dtype="float32", shape=(4, 1))]
    trained = trained_module("sparktorch.tasks.series.network:SeriesModule", params=params, inputs=inputs)
    return SeriesPyFunc(trained, COLUMNS.to_dict(), "cpu")


def rows(order: Any) -> pd.DataFrame:
    sold = np.random.default_rng(0).normal(size=12)
    return pd.DataFrame({"shop": ["b"] * 6 + ["a"] * 6, "day": [*order[:6]] * 2, "sold": sold})


def test_groups_that_are_categories_are_those_of_their_values(served: SeriesPyFunc) -> None:
    table = rows(DAYS)
    found = served.predict(table.assign(shop=table["shop"].astype(pd.CategoricalDtype(["b", "a"]))))
    pd.testing.assert_frame_equal(found, served.predict(table))


@pytest.mark.parametrize("kind", ["float64", "Int64", "category"])
def test_whole_numbers_of_any_type_order_rows(served: SeriesPyFunc, kind: str) -> None:
    table = rows(range(8))
    found = served.predict(table.assign(day=table["day"].astype(kind)))
    assert found["day"].tolist() == [6, 7, 6, 7]
    assert found["prediction"].equals(served.predict(table)["prediction"])


@pytest.mark.parametrize("order", [DAYS.to_period("D"), DAYS.strftime("%Y-%m-%d"), DAYS.to_pydatetime()])
def test_periods_and_strings_are_read_as_times(served: SeriesPyFunc, order: Any) -> None:
    found = served.predict(rows(order))
    pd.testing.assert_frame_equal(found, served.predict(rows(DAYS)), check_dtype=False)


def test_a_null_among_times_in_text_is_the_null_of_a_time(served: SeriesPyFunc) -> None:
    table = rows(DAYS)
    text = table.assign(day=[None, *table["day"].dt.strftime("%Y-%m-%d")[1:]])
    for null in (None, float("nan"), pd.NA):
        text.loc[0, "day"] = null
        assert outcome(served, text) == outcome(served, table.assign(day=table["day"].where(table.index != 0)))


def outcome(served: SeriesPyFunc, table: pd.DataFrame) -> Any:
    """What the model returns, or how it refuses the rows."""
    try:
        return served.predict(table)["prediction"].tolist()
    except ColumnError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:In a future version of pandas:FutureWarning")
@pytest.mark.parametrize(
    ("order", "kind"),
    [
        ([time.isoformat() for time in DAYS.tz_localize("Europe/Berlin")], "string"),
        ([0.5, 1.5, 2.5, 3.5, 4.5, 5.5], "floating"),
        ([True, False] * 3, "boolean"),
    ],
)
def test_another_order_is_refused(served: SeriesPyFunc, order: Any, kind: str) -> None:
    with pytest.raises(ColumnError, match=f"column 'day' holds {kind} values, which are no whole numbers, dates"):
        served.predict(rows(order))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sold": ["abc"] * 12}, "column 'sold' is double in the model: Unable to parse string"),
        ({"open": ["maybe"] * 12}, "column 'open' is bool in the model"),
        ({"kind": [["a"]] * 12}, "column 'kind' is string in the model"),
        ({"shop": ["a", 1] * 6}, "column 'shop' is of one type in the model"),
    ],
)
def test_values_of_another_type_are_refused(values: dict[str, Any], says: str) -> None:
    statics: dict[str, Any] = {"static": ["open", "kind"], "categories": [[False, True], ["a"]]}
    columns = SeriesColumns(group="shop", order="day", target="sold", context=4, horizon=2, **statics)
    served = SeriesPyFunc(trained_module("torch.nn:Identity", torch.zeros(1)), columns.to_dict(), "cpu")
    table = rows(DAYS).assign(open=True, kind="a").assign(**values)
    with pytest.raises(ColumnError, match=says):
        served.predict(table)
