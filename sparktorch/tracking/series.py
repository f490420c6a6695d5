"""Models of series in MLflow: a `python_function` that forecasts from rows in pandas, its signature and its example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from sparktorch.errors import ColumnError
from sparktorch.model.scorer import Scorer
from sparktorch.model.series.forecasts import SeriesColumns, columns_of_quantiles, forecast
from sparktorch.model.trained_module import TrainedModule

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

__all__ = ["SeriesPyFunc", "series_example", "series_signature"]


class SeriesPyFunc:
    """The model that `mlflow.pyfunc.load_model(...).predict` calls."""

    def __init__(self, trained: TrainedModule, columns: dict[str, Any], device: str) -> None:
        """Builds the module; `columns` is as from `SeriesColumns.to_dict`."""
        self._columns = SeriesColumns(**columns)
        self._scorer = Scorer(trained, device=device, batch_size="auto")

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Forecasts the rows after the last one of each series that has a target.

        Args:
            model_input: Rows as for `ForecastingModel.forecast`, in any order. Strings in the column of the order are
                read as times, and periods as their starts.
            params: Not used.

        Returns:
            What `forecast` returns, sorted by series and order.

        Raises:
            ColumnError: The order is neither whole numbers nor times of one time zone, or a series cannot be forecast.
        """
        columns, rows = self._columns, pd.DataFrame(model_input)
        plain = {name: _without_categories(rows[name]) for name in columns.keys}
        rows = rows.assign(**{**plain, columns.order: _ordering(plain[columns.order], columns.order)})
        rows = rows.sort_values(columns.keys, kind="stable")
        keys = {name: pa.Array.from_pandas(rows[name]) for name in columns.keys}
        numbers = {
            name: pa.array(pd.to_numeric(rows[name]).to_numpy(np.float64, na_value=np.nan)) for name in columns.numbers
        }
        batch = pa.RecordBatch.from_pydict({**keys, **numbers})
        found = [one.to_pandas() for one in forecast([batch], columns, self._scorer)]
        names = [*columns.keys, columns.prediction, *columns_of_quantiles(columns)]
        return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=names)


def _without_categories(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.astype(column.cat.categories.dtype) if isinstance(column.dtype, pd.CategoricalDtype) else column


def _ordering(order: pd.Series[Any], name: str) -> pd.Series[Any]:
    """Returns an order as integers, dates or timestamps, or without rows as it is; refuses another one."""
    kind, why = pd.api.types.infer_dtype(order), None
    try:
        if kind in ("string", "datetime"):
            order = pd.to_datetime(order)
        elif kind == "period":
            order = order.dt.to_timestamp()
        elif kind == "floating":  # integers, as JSON and missing values leave them
            order = order.astype("Int64")
    except (TypeError, ValueError) as error:
        why = error
    if pd.api.types.infer_dtype(order) in ("integer", "date", "datetime64", "empty"):
        return order
    raise ColumnError(
        f"column {name!r} holds {kind} values, which are no whole numbers, dates or times of one time zone",
        hint="convert it; times with several offsets by pd.to_datetime(..., utc=True).dt.tz_convert(...)",
        column=name,
    ) from why


def series_signature(columns: SeriesColumns) -> ModelSignature:
    """Returns columns of any type, whose numbers may be null, and forecasts."""
    from mlflow import types
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType

    inputs = [types.ColSpec(AnyType(), name) for name in (*columns.keys, *columns.numbers)]
    made = [types.ColSpec("double", name) for name in (columns.prediction, *columns_of_quantiles(columns))]
    return ModelSignature(inputs=types.Schema([*inputs]), outputs=types.Schema([*inputs[: len(columns.keys)], *made]))


def series_example(columns: SeriesColumns) -> pd.DataFrame:
    """Returns the rows of one series of zeros; training rows may be confidential."""
    rows = columns.context + (columns.horizon if columns.future else 0)
    found = pd.DataFrame({name: np.zeros(rows) for name in columns.numbers})
    found.loc[columns.context :, columns.target] = np.nan
    found.insert(0, columns.order, np.arange(rows))
    if columns.group:
        found.insert(0, columns.group, "0")
    return found
