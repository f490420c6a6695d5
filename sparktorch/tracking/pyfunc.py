"""A saved model as an MLflow `python_function`: scores pandas and NumPy, without pyspark or Java."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from sparktorch.artifact import Scorer, TrainedModule
from sparktorch.data.columns import TensorSpec
from sparktorch.data.sql import arrow_type
from sparktorch.data.tensors import to_arrow
from sparktorch.errors import ColumnError

__all__ = ["PyFuncModel"]


def _load_pyfunc(path: str) -> PyFuncModel:
    """Loads the model that `sparktorch.tracking.save_model` wrote; MLflow calls this."""
    from mlflow.environment_variables import MLFLOW_ALLOW_PICKLE_DESERIALIZATION

    directory = Path(path)
    settings = json.loads((directory / "columns.json").read_text())
    # MLflow's own switch for its pyfuncs, on by default; here somebody must have switched it on.
    allowed = MLFLOW_ALLOW_PICKLE_DESERIALIZATION.is_set() and bool(MLFLOW_ALLOW_PICKLE_DESERIALIZATION.get())
    return PyFuncModel(TrainedModule.load(directory, allow_pickle=allowed), settings)


class PyFuncModel:
    """What `mlflow.pyfunc.load_model(...).predict` calls."""

    def __init__(self, trained: TrainedModule, settings: dict[str, Any]) -> None:
        """Builds the module.

        Args:
            trained: The module.
            settings: `inputs`, the input columns in order; `outputs`, the name of each output
                column by what `Scorer.score` calls it.
        """
        self._trained = trained
        self._inputs: list[str] = settings["inputs"]
        self._outputs: dict[str, str] = settings["outputs"]
        self._scorer = Scorer(trained)

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows.

        Args:
            model_input: A pandas DataFrame with the input columns, a dict of arrays by column, or
                for a model with one input a bare array of shape `(rows, ...)`.
            params: Not used.

        Returns:
            A DataFrame with the columns that `transform` adds.

        Raises:
            ColumnError: An input column is missing or has another shape than the model was fitted on.
        """
        with torch.inference_mode():
            results = self._scorer.score(self._columns(model_input))
        columns = {}
        for field, name in self._outputs.items():
            values = results[field]
            if field == "prediction" and self._trained.task == "regression":
                values = values.reshape(len(values)) if values.size == len(values) else values
            columns[name] = values if values.ndim == 1 else list(values)
        return pd.DataFrame(columns)

    def _columns(self, model_input: Any) -> list[pa.Array]:
        if isinstance(model_input, np.ndarray) and len(self._inputs) == 1:
            model_input = {self._inputs[0]: model_input}
        for name in self._inputs:
            if name not in model_input:
                raise ColumnError(f"the input has no column {name!r}", column=name)
        specs = [spec for spec in self._trained.inputs for _ in spec.sources or (spec.column,)]
        return [_arrow(model_input[name], spec, name) for name, spec in zip(self._inputs, specs, strict=True)]


def _arrow(values: Any, spec: TensorSpec, name: str) -> pa.Array:
    """Returns a column of pandas, or an array of NumPy, as Spark would send it.

    Raises:
        ColumnError: Its rows have another shape than the model was fitted on.
    """
    if spec.kind == "any":
        return pa.array(list(values), arrow_type(spec.sql), from_pandas=True)
    if spec.kind == "binary":
        return pa.array(list(values), pa.binary())
    try:
        if spec.ragged:
            rows = [np.asarray(row, spec.dtype) for row in values]
            elements = np.concatenate([np.empty((0, *spec.levels), spec.dtype), *rows])
            ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
            return pa.ListArray.from_arrays(pa.array(ends), to_arrow(elements))
        nested = getattr(values, "dtype", None) == np.dtype(object)
        stacked = np.stack(list(values)) if nested else np.asarray(values)
    except ValueError as error:
        raise ColumnError(f"the rows of column {name!r} have different shapes: {error}", column=name) from error
    shape = () if spec.sources else spec.shape
    if stacked.shape[1:] not in (shape, () if spec.sources else spec.levels):
        raise ColumnError(
            f"column {name!r} has rows of shape {stacked.shape[1:]}, the model takes {shape}", column=name
        )
    levels = () if spec.sources else spec.levels
    return to_arrow(np.ascontiguousarray(stacked, dtype=spec.dtype).reshape(len(stacked), *levels))
