"""A saved model as an MLflow `python_function`: scores pandas and NumPy, without pyspark or Java."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from sparktorch.artifact import Scorer, TrainedModule
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
                column by what `Scorer.score_arrays` calls it.
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
            results = self._scorer.score_arrays(self._arrays(model_input))
        columns = {}
        for field, name in self._outputs.items():
            values = results[field]
            if field == "prediction" and self._trained.task == "regression":
                values = values.reshape(len(values)) if values.size == len(values) else values
            columns[name] = values if values.ndim == 1 else list(values)
        return pd.DataFrame(columns)

    def _arrays(self, model_input: Any) -> list[npt.NDArray[Any]]:
        if isinstance(model_input, np.ndarray) and len(self._inputs) == 1:
            model_input = {self._inputs[0]: model_input}
        arrays = []
        for name, spec in zip(self._inputs, self._trained.inputs, strict=True):
            if name not in model_input:
                raise ColumnError(f"the input has no column {name!r}", column=name)
            values = model_input[name]
            nested = getattr(values, "dtype", None) == np.dtype(object)
            stacked = np.stack(list(values)) if nested else np.asarray(values)
            if stacked.shape[1:] != spec.shape:
                raise ColumnError(
                    f"column {name!r} has rows of shape {stacked.shape[1:]}, the model takes {spec.shape}",
                    column=name,
                )
            arrays.append(np.ascontiguousarray(stacked, dtype=spec.dtype))
        return arrays
