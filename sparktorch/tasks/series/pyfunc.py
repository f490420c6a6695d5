"""A model of series as MLflow serves it, without pyspark: its scorer, its signature, and an example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from sparktorch.data.convert.values import read_time
from sparktorch.errors import ColumnError
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tasks.series.forecasts import SeriesColumns, columns_of_quantiles, forecast
from sparktorch.tracking.pyfunc import check_columns

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

__all__ = ["SeriesPyFunc", "series_example", "series_signature"]


class SeriesPyFunc:
    """The model that scores for `mlflow.pyfunc.load_model(...).predict`."""

    def __init__(self, trained: TrainedModule, columns: dict[str, Any], device: str) -> None:
        """Builds the module; `columns` is as from `SeriesColumns.to_dict`."""
        self._columns = SeriesColumns(**columns)
        self._scorer = Scorer(trained, Scoring(batch_size="auto"), device=device)

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Forecasts the rows after the last one of each series that has a target.

        Args:
            model_input: Rows as for `ForecastingModel.forecast`, in any order. Strings in the column of the order are
                read as times, and periods as their starts.
            params: Not used.

        Returns:
            What `forecast` returns, sorted by series and order.

        Raises:
            ColumnError: A column is missing, the order is neither whole numbers nor times of one time zone, or a series
                cannot be forecast.
        """
        columns, rows = self._columns, pd.DataFrame(model_input)
        check_columns(rows, (*columns.keys, *columns.inputs))
        plain = {name: _without_categories(rows[name]) for name in columns.keys}
        rows = rows.assign(**{**plain, columns.order: _ordering(plain[columns.order], columns.order)})
        rows = rows.sort_values(columns.keys, kind="stable")
        keys = {name: _typed(rows[name], name) for name in columns.keys}
        values = {name: _typed(rows[name], name, pa.float64()) for name in columns.numbers}
        for name, categories in columns.vocabulary.items():
            values[name] = _typed(rows[name], name, pa.array(categories).type if categories else pa.string())
        batch = pa.RecordBatch.from_pydict({**keys, **{name: values[name] for name in columns.inputs}})
        tables = [forecasts.to_pandas() for forecasts in forecast([batch], columns, self._scorer)]
        names = [*columns.keys, columns.prediction, *columns_of_quantiles(columns)]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=names)


def _without_categories(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.astype(column.cat.categories.dtype) if isinstance(column.dtype, pd.CategoricalDtype) else column


def _typed(column: pd.Series[Any], name: str, kind: pa.DataType | None = None) -> pa.Array:
    """Returns a column as Arrow, by default of the type of its values; refuses values that are of no such type."""
    try:
        if kind == pa.float64():
            return pa.array(pd.to_numeric(column).to_numpy(np.float64, na_value=np.nan))
        values = pa.Array.from_pandas(_without_categories(column))
        return values if kind is None else values.cast(kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        what = f"column {name!r} is {kind or 'of one type'} in the model: {error}"
        raise ColumnError(what, column=name, code="ST-COLUMN-TYPE") from error


def _ordering(order: pd.Series[Any], name: str) -> pd.Series[Any]:
    """Returns an order as integers, dates or timestamps, or without rows as it is; refuses another one."""
    kind, why = pd.api.types.infer_dtype(order), None
    try:
        if kind == "string":
            order = pd.to_datetime(
                pd.Series([None if pd.isna(text) else read_time(text) for text in order], order.index)
            )
        elif kind == "datetime":
            order = pd.to_datetime(order)
        elif kind == "period":
            order = order.dt.to_timestamp()
        elif kind == "floating":  # JSON and missing values make such numbers of integers.
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

    inputs = [types.ColSpec(AnyType(), name) for name in (*columns.keys, *columns.inputs)]
    added = [types.ColSpec("double", name) for name in (columns.prediction, *columns_of_quantiles(columns))]
    return ModelSignature(inputs=types.Schema([*inputs]), outputs=types.Schema([*inputs[: len(columns.keys)], *added]))


def series_example(columns: SeriesColumns) -> pd.DataFrame:
    """Returns the rows of one series of zeros and empty categories; training rows may be confidential."""
    rows = columns.context + (columns.horizon if columns.future else 0)
    rows_of_zeros = pd.DataFrame({name: np.zeros(rows) for name in columns.numbers})
    for name, categories in columns.vocabulary.items():
        rows_of_zeros[name] = False if True in categories or False in categories else ""
    rows_of_zeros.loc[columns.context :, columns.target] = np.nan
    rows_of_zeros.insert(0, columns.order, np.arange(rows))
    if columns.group:
        rows_of_zeros.insert(0, columns.group, "0")
    return rows_of_zeros
