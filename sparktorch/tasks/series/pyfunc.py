"""The model of series that MLflow serves, without pyspark: it forecasts, and has a signature and an example."""

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
    """The model that forecasts for `mlflow.pyfunc.load_model(...).predict`."""

    def __init__(self, trained: TrainedModule, columns: dict[str, Any], device: str) -> None:
        """Builds the module; `columns` is what `SeriesColumns.to_dict` returns."""
        self._columns = SeriesColumns(**columns)
        self._scorer = Scorer(trained, Scoring(batch_size="auto"), device=device)

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Forecasts the rows after the last one of each series that has a target.

        Args:
            model_input: The rows that `ForecastingModel.forecast` takes, in any order. In the column of the order,
                strings are read as times, and periods as their starts.
            params: MLflow passes this; it is not used.

        Returns:
            The rows that `ForecastingModel.forecast` returns, sorted by series and order.

        Raises:
            ColumnError: A column is missing, the order is neither whole numbers nor times of one time zone, or a series
                cannot be forecast.
        """
        columns = self._columns
        rows = pd.DataFrame(model_input)
        check_columns(rows, (*columns.keys, *columns.inputs))
        keys = {name: _without_categories(rows[name]) for name in columns.keys}
        keys[columns.order] = _readable_order(keys[columns.order], columns.order)
        rows = rows.assign(**keys).sort_values(columns.keys, kind="stable")
        arrays = {name: _arrow_array(rows[name], name) for name in columns.keys}
        for name in columns.inputs:
            kind = pa.float64()
            if name in columns.vocabulary:
                categories = columns.vocabulary[name]
                kind = pa.array(categories).type if categories else pa.string()
            arrays[name] = _arrow_array(rows[name], name, kind)
        batch = pa.RecordBatch.from_pydict(arrays)
        tables = [forecasts.to_pandas() for forecasts in forecast([batch], columns, self._scorer)]
        if not tables:
            return pd.DataFrame(columns=[*columns.keys, columns.prediction, *columns_of_quantiles(columns)])
        all_forecasts: pd.DataFrame = pd.concat(tables, ignore_index=True)
        return all_forecasts


def _without_categories(column: pd.Series[Any]) -> pd.Series[Any]:
    """Returns a column of pandas' type "category" as the values that it stands for, and any other column as it is."""
    return column.astype(column.cat.categories.dtype) if isinstance(column.dtype, pd.CategoricalDtype) else column


def _arrow_array(column: pd.Series[Any], name: str, kind: pa.DataType | None = None) -> pa.Array:
    """Returns a column as an array of a type, by default the type of its values; refuses values of other types."""
    try:
        if kind == pa.float64():
            return pa.array(pd.to_numeric(column).to_numpy(np.float64, na_value=np.nan))
        values = pa.Array.from_pandas(_without_categories(column))
        return values if kind is None else values.cast(kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        what = f"column {name!r} is {kind or 'of one type'} in the model: {error}"
        raise ColumnError(what, column=name, code="ST-COLUMN-TYPE") from error


def _readable_order(order: pd.Series[Any], name: str) -> pd.Series[Any]:
    """Returns the order as integers, dates or timestamps; refuses values that are none of these."""
    kind = pd.api.types.infer_dtype(order)
    cause: Exception | None = None
    try:
        if kind == "string":
            times = [None if pd.isna(text) else read_time(text) for text in order]
            order = pd.to_datetime(pd.Series(times, order.index))
        elif kind == "datetime":
            order = pd.to_datetime(order)
        elif kind == "period":
            order = order.dt.to_timestamp()
        elif kind == "floating":  # JSON and missing values make floating-point numbers of integers.
            order = order.astype("Int64")
    except (TypeError, ValueError) as error:
        cause = error
    if pd.api.types.infer_dtype(order) in ("integer", "date", "datetime64", "empty"):
        return order
    raise ColumnError(
        f"column {name!r} holds {kind} values, which are no whole numbers, dates or times of one time zone",
        hint="convert it; times with several offsets by pd.to_datetime(..., utc=True).dt.tz_convert(...)",
        column=name,
    ) from cause


def series_signature(columns: SeriesColumns) -> ModelSignature:
    """Returns the signature: input columns may have any type, since numbers may be null; forecasts are doubles."""
    from mlflow import types
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType

    inputs = [types.ColSpec(AnyType(), name) for name in (*columns.keys, *columns.inputs)]
    keys = inputs[: len(columns.keys)]
    forecasts = [types.ColSpec("double", name) for name in (columns.prediction, *columns_of_quantiles(columns))]
    return ModelSignature(inputs=types.Schema([*inputs]), outputs=types.Schema([*keys, *forecasts]))


def series_example(columns: SeriesColumns) -> pd.DataFrame:
    """Returns rows of one series, of zeros and empty categories: training rows may be confidential."""
    row_count = columns.context + (columns.horizon if columns.future else 0)
    example = pd.DataFrame({name: np.zeros(row_count) for name in columns.numbers})
    for name, categories in columns.vocabulary.items():
        is_boolean = True in categories or False in categories
        example[name] = False if is_boolean else ""
    example.loc[columns.context :, columns.target] = np.nan
    example.insert(0, columns.order, np.arange(row_count))
    if columns.group:
        example.insert(0, columns.group, "0")
    return example
