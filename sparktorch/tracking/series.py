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
            model_input: Rows as for `ForecastingModel.forecast`, in any order. An order of strings is read as times.
            params: Not used.

        Returns:
            What `forecast` returns, sorted by series and order.

        Raises:
            ColumnError: A column is missing, or a series cannot be forecast.
        """
        columns, rows = self._columns, pd.DataFrame(model_input)
        for name in [*columns.keys, *columns.numbers]:
            if name not in rows:
                raise ColumnError(f"the input has no column {name!r}", column=name)
        order = rows[columns.order]
        if pd.api.types.infer_dtype(order) == "string":
            rows = rows.assign(**{columns.order: pd.to_datetime(order)})
        rows = rows.sort_values(columns.keys, kind="stable")
        keys = {name: pa.Array.from_pandas(rows[name]) for name in columns.keys}
        numbers = {
            name: pa.array(pd.to_numeric(rows[name]).to_numpy(np.float64, na_value=np.nan)) for name in columns.numbers
        }
        batch = pa.RecordBatch.from_pydict({**keys, **numbers})
        found = [one.to_pandas() for one in forecast([batch], columns, self._scorer)]
        names = [*columns.keys, columns.prediction, *columns_of_quantiles(columns)]
        return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=names)


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
