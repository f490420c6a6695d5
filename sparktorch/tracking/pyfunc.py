"""A saved model as an MLflow `python_function`: scores pandas and NumPy, without pyspark or Java."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from sparktorch.base.config import Invalid
from sparktorch.base.devices import accelerator
from sparktorch.data.columns import plain_names
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, nearest
from sparktorch.model.scorer import Scorer
from sparktorch.model.series.forecasts import SeriesColumns, columns_of_quantiles, forecast
from sparktorch.model.trained_module import TrainedModule

__all__ = ["PyFuncModel", "PyFuncPipeline", "SeriesPyFunc", "check_columns", "pickles_allowed"]


def _load_pyfunc(
    path: str, model_config: Mapping[str, Any] | None = None
) -> PyFuncModel | PyFuncPipeline | SeriesPyFunc:
    """Loads the model, or the pipeline of models, that `sparktorch.tracking.save_model` wrote; MLflow calls this.

    The `device` of `model_config` is a torch device or "auto": MLFLOW_DEFAULT_PREDICTION_DEVICE if set, else a GPU if
    there is one, else the CPU.
    """
    from mlflow.environment_variables import MLFLOW_DEFAULT_PREDICTION_DEVICE

    directory = Path(path)
    settings = json.loads((directory / "columns.json").read_text())
    device = (model_config or {}).get("device", "auto")
    if device == "auto":
        device = (
            MLFLOW_DEFAULT_PREDICTION_DEVICE.get()
            or (accelerator() if torch.accelerator.is_available() else None)
            or "cpu"
        )
    allowed = pickles_allowed()
    code = directory.parent / "code"  # where MLflow keeps it

    def model(folder: Path, settings: dict[str, Any]) -> PyFuncModel:
        return PyFuncModel(TrainedModule.load(folder, allow_pickle=allowed, code=code), settings, device)

    if "series" in settings:
        trained = TrainedModule.load(directory, allow_pickle=allowed, code=code)
        return SeriesPyFunc(trained, settings["series"], device)
    if "stages" not in settings:
        return model(directory, settings)
    folders = [directory / name for name in settings["stages"]]
    return PyFuncPipeline([model(folder, json.loads((folder / "columns.json").read_text())) for folder in folders])


def pickles_allowed() -> bool:
    """Whether pickled code may be run: on by default in MLflow; sparktorch requires it to be set explicitly."""
    from mlflow.environment_variables import MLFLOW_ALLOW_PICKLE_DESERIALIZATION

    return MLFLOW_ALLOW_PICKLE_DESERIALIZATION.is_set() and bool(MLFLOW_ALLOW_PICKLE_DESERIALIZATION.get())


def check_columns(model_input: Any, names: Iterable[str]) -> None:
    """Refuses rows without one of the columns that a model takes: MLflow lets them pass where there is no signature."""
    given = [*map(str, model_input)] if isinstance(model_input, pd.DataFrame | Mapping) else []
    name = ""
    try:
        for name in names:
            model_input[name]
    except Exception as error:  # KeyError, or those of NumPy, Arrow and Polars
        hint = nearest(name, given) if given else "pass a DataFrame, or a dict by column"
        raise ColumnError(f"there is no column {name!r}", hint=hint, column=name, code="ST-COLUMN-MISSING") from error


class PyFuncModel:
    """The model that `mlflow.pyfunc.load_model(...).predict` calls."""

    def __init__(self, trained: TrainedModule, settings: dict[str, Any], device: str) -> None:
        """Builds the module.

        Of `settings`, `inputs` are the input columns in order, `outputs` the output column of each field of
        `Scorer.score`, `invalid` is as for `Scorer.score_arrow`, `thresholds` are those of the classes, if set, and
        `layers` are as for `Scorer`.
        Models of older versions have `keep_null`, whether a row with a null gets null results.
        """
        self._trained = trained
        self._inputs: list[str] = settings["inputs"]
        self._outputs: dict[str, str] = settings["outputs"]
        self._invalid: Invalid = settings.get("invalid", "keep" if settings.get("keep_null") else "error")
        thresholds, layers = settings.get("thresholds"), settings.get("layers")
        self._scorer = Scorer(trained, device=device, batch_size="auto", thresholds=thresholds, layers=layers)

    @property
    def outputs(self) -> list[str]:
        """The columns that it adds."""
        return list(self._outputs.values())

    @property
    def skips(self) -> bool:
        """Whether it leaves rows with nulls, NaN or infinity out in Spark."""
        return self._invalid == "skip"

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows.

        Args:
            model_input: A pandas DataFrame with the input columns, a dict of arrays by column, or,
                for a model with one input, an array of shape `(rows, ...)`.
            params: Not used.

        Returns:
            A DataFrame with the columns that `transform` adds.

        Raises:
            ColumnError: An input column is missing, or has another shape than in the fit.
        """
        arrays = self._columns(model_input)
        if self._invalid != "error":
            fields = list(self._outputs)
            scored = self._scorer.score_arrow(arrays, fields, invalid=self._invalid)
            return pd.DataFrame({self._outputs[f]: array.to_pandas() for f, array in zip(fields, scored, strict=True)})
        results = self._scorer.score(arrays)
        columns = {}
        for field, name in self._outputs.items():
            values = results[field]
            if field == "prediction" and self._trained.task == "regression":
                values = values.reshape(len(values)) if values.size == len(values) else values
            columns[name] = values if values.ndim == 1 else list(values)
        return pd.DataFrame(columns)

    def _columns(self, model_input: Any) -> list[pa.Array]:
        if isinstance(model_input, np.ndarray):
            fields = {name: model_input[name] for name in model_input.dtype.names or ()}
            model_input = {self._inputs[0]: model_input} if len(self._inputs) == 1 else fields
        # Signatures of older versions have the names as Spark needs them, in backticks.
        pairs = zip(self._inputs, plain_names(self._inputs), strict=True)
        names = [given if given in model_input else plain for given, plain in pairs]
        check_columns(model_input, names)
        specs = [spec for spec in self._trained.inputs for _ in spec.sources or (spec.column,)]
        nulls = self._invalid != "error"
        return [
            kind_of(spec).of_values(model_input[name], spec, name, nulls=nulls)
            for name, spec in zip(names, specs, strict=True)
        ]


class PyFuncPipeline:
    """Models in a row, each of which may take what those before it return."""

    def __init__(self, stages: Sequence[PyFuncModel]) -> None:
        """Takes the models."""
        self._stages = stages

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows as `PyFuncModel.predict`; returns the columns of all stages, null where one leaves a row out."""
        known: Any = model_input
        found: list[pd.DataFrame] = []
        places: Any = None  # numbers of the rows that no stage has left out: later ones do not get those, as in Spark
        for stage in self._stages:
            left = places is None or len(places)
            scored = stage.predict(known) if left else pd.DataFrame(columns=stage.outputs)
            places = np.arange(len(scored)) if places is None else places
            found.append(scored.set_axis(places))
            # An array has no names: it is all that the first stage takes.
            known = {**({} if isinstance(known, np.ndarray) else {name: known[name] for name in known}), **scored}
            if stage.skips:
                kept = scored.notna().any(axis=1).to_numpy()
                places = places[kept]
                known = {name: [row for row, keep in zip(of, kept, strict=True) if keep] for name, of in known.items()}
        made: pd.DataFrame = pd.concat(found, axis=1).loc[places].reindex(range(len(found[0])))
        return made


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
            ColumnError: A column is missing, the order is neither whole numbers nor times of one time zone, or a series
                cannot be forecast.
        """
        columns, rows = self._columns, pd.DataFrame(model_input)
        check_columns(rows, (*columns.keys, *columns.numbers))
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
