"""A saved model as an MLflow `python_function`: scores pandas and NumPy, without pyspark or Java."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timezone, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from sparktorch.base.devices import accelerator
from sparktorch.base.imports import load_object
from sparktorch.data.columns import TensorSpec, plain_names
from sparktorch.data.convert.values import has_instants, zone_named
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, SparkTorchError, nearest
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule

__all__ = ["PyFuncModel", "PyFuncPipeline", "Served", "check_columns", "pickles_allowed", "zone_of"]

# Models that do not return a row for each row are served by these classes. In columns.json, such a model has the key.
_SCORERS = {"series": "sparktorch.tasks.series.pyfunc:SeriesPyFunc"}


class Served:
    """A model as MLflow calls it, which raises its refusals as exceptions of MLflow.

    MLflow's scoring server answers any other exception with a sentence that does not say what was wrong.
    """

    def __init__(self, model: Any) -> None:
        """Takes a model that has `predict`."""
        self._model = model

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows as the model does.

        Raises:
            MlflowException: The model refuses the rows; the message says why, and the server answers 400 with it.
        """
        try:
            scored: pd.DataFrame = self._model.predict(model_input, params)
        except SparkTorchError as error:
            from mlflow.exceptions import MlflowException

            raise MlflowException.invalid_parameter_value(str(error)) from error
        return scored


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> Served:
    """Loads the model, or the pipeline of models, that `sparktorch.tracking.save_model` wrote; MLflow calls this.

    The `device` of `model_config` is a torch device or "auto": MLFLOW_DEFAULT_PREDICTION_DEVICE if set, else a GPU if
    there is one, else the CPU. Its `time_zone` is as for `zone_of`.
    """
    from mlflow.environment_variables import MLFLOW_DEFAULT_PREDICTION_DEVICE

    directory = Path(path)
    settings = json.loads((directory / "columns.json").read_text())
    config = model_config or {}
    device = config.get("device", "auto")
    time_zone = config.get("time_zone", "auto")
    if device == "auto":
        device = MLFLOW_DEFAULT_PREDICTION_DEVICE.get()
        if not device and torch.accelerator.is_available():
            device = accelerator()
        device = device or "cpu"
    allowed = pickles_allowed()
    code = directory.parent / "code"  # MLflow keeps the code here.

    def model(folder: Path, settings: dict[str, Any]) -> PyFuncModel:
        trained = TrainedModule.load(folder, allow_pickle=allowed, code=code)
        return PyFuncModel(trained, settings, device, time_zone)

    for key, scorer in _SCORERS.items():
        if key in settings:
            trained = TrainedModule.load(directory, allow_pickle=allowed, code=code)
            return Served(load_object(scorer)(trained, settings[key], device))
    if "stages" not in settings:
        return Served(model(directory, settings))
    folders = [directory / name for name in settings["stages"]]
    stages = [model(folder, json.loads((folder / "columns.json").read_text())) for folder in folders]
    return Served(PyFuncPipeline(stages))


def pickles_allowed() -> bool:
    """Whether pickled code may be run: on by default in MLflow; sparktorch requires it to be set explicitly."""
    from mlflow.environment_variables import MLFLOW_ALLOW_PICKLE_DESERIALIZATION

    return MLFLOW_ALLOW_PICKLE_DESERIALIZATION.is_set() and bool(MLFLOW_ALLOW_PICKLE_DESERIALIZATION.get())


def check_columns(model_input: Any, names: Iterable[str]) -> None:
    """Refuses rows that lack a column of the model; MLflow lets such rows pass if there is no signature."""
    columns = [*map(str, model_input)] if isinstance(model_input, pd.DataFrame | Mapping) else []
    name = ""
    try:
        for name in names:
            model_input[name]
    except Exception as error:  # NumPy, Arrow and Polars have other errors than KeyError.
        hint = nearest(name, columns) if columns else "pass a DataFrame, or a dict by column"
        raise ColumnError(f"there is no column {name!r}", hint=hint, column=name, code="ST-COLUMN-MISSING") from error


def zone_of(time_zone: str, default: str = "UTC") -> tzinfo:
    """Returns the time zone of timestamps without one, by its name.

    The name "auto" stands for the zone of the session in a UDF of Spark, and for `default` elsewhere.
    """
    if time_zone != "auto":
        return zone_named(time_zone)
    if "pyspark" not in sys.modules:  # A UDF has imported pyspark.
        return zone_named(default)
    from sparktorch.spark.zone import zone_in_udf

    return zone_in_udf(default)


class PyFuncModel:
    """The model that scores for `mlflow.pyfunc.load_model(...).predict`."""

    def __init__(self, trained: TrainedModule, settings: dict[str, Any], device: str, time_zone: str = "auto") -> None:
        """Builds the module.

        In `settings`, `inputs` are the input columns in order, and `outputs` has the output column for each field of
        `Scorer.score`; the other entries are from `Scoring.to_dict`. `time_zone` is as for `zone_of`.
        """
        self._trained = trained
        self._time_zone = time_zone
        self._inputs: list[str] = settings["inputs"]
        self._outputs: dict[str, str] = settings["outputs"]
        scoring = Scoring.from_dict(settings)
        self._invalid = scoring.invalid
        self._scorer = Scorer(trained, scoring, device=device)

    @property
    def outputs(self) -> list[str]:
        """The columns that the model adds."""
        return list(self._outputs.values())

    @property
    def skips(self) -> bool:
        """Whether `transform` leaves out rows with nulls, NaN or infinity."""
        return self._invalid == "skip"

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows.

        Args:
            model_input: A pandas DataFrame with the input columns, a dict of arrays by column, or,
                for a model with one input, an array of shape `(rows, ...)`.
            params: Not used.

        Returns:
            A DataFrame with the columns that `transform` adds, and the index of `model_input`, if it has one.

        Raises:
            ColumnError: An input column is missing, or has another shape or type than in the fit.
        """
        rows = self._rows(model_input)
        arrays = self._columns(rows)
        index = rows.index if isinstance(rows, pd.DataFrame) else pd.RangeIndex(len(arrays[0]))
        if self._invalid != "error":
            fields = list(self._outputs)
            scored = self._scorer.score_arrow(arrays, fields)
            with_nulls = {self._outputs[field]: array.to_pandas() for field, array in zip(fields, scored, strict=True)}
            return pd.DataFrame(with_nulls).set_axis(index)
        results = self._scorer.score(arrays)
        columns = {}
        for field, name in self._outputs.items():
            values = results[field]
            if field == "prediction" and self._trained.task == "regression":
                values = values.reshape(len(values)) if values.size == len(values) else values
            columns[name] = values if values.ndim == 1 else list(values)
        return pd.DataFrame(columns, index=index)

    @property
    def _specs(self) -> list[TensorSpec]:
        """The spec for each input column; the columns of a packed input share its spec."""
        return [spec for spec in self._trained.inputs for _ in spec.sources or (spec.column,)]

    def _rows(self, model_input: Any) -> Any:
        """Returns rows by column name: a bare array is the only column, or has a field for each column."""
        if isinstance(model_input, np.ndarray):
            fields = {name: model_input[name] for name in model_input.dtype.names or ()}
            return {self._inputs[0]: model_input} if len(self._inputs) == 1 else fields
        has_plain_cells = [
            bool(spec.sources) or not pa.types.is_nested(kind_of(spec).arrow(spec)) for spec in self._specs
        ]
        if not (isinstance(model_input, pd.DataFrame) and len(model_input) == 1 and all(has_plain_cells)):
            return model_input
        names = [name for name in self._names(model_input) if name in model_input]
        values = [model_input[name].iloc[0] for name in names]
        # From a dict, or the "inputs" of a request, MLflow makes one row if all columns are lists of text.
        if not names or not all(isinstance(value, list) for value in values):
            return model_input
        lengths = {name: len(value) for name, value in zip(names, values, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ColumnError(f"the columns have different numbers of rows: {lengths}", code="ST-SHAPE")
        count = len(values[0])
        # In a pipeline, the columns for later stages are unpacked as well.
        packed = {name: model_input[name].iloc[0] for name in model_input}
        unpacked = {name: cells for name, cells in packed.items() if isinstance(cells, list) and len(cells) == count}
        return pd.DataFrame(unpacked)

    def _names(self, rows: Any) -> list[str]:
        """Returns the names that the input columns have in rows: older signatures have them in Spark's backticks."""
        pairs = zip(self._inputs, plain_names(self._inputs), strict=True)
        return [quoted if quoted in rows else plain for quoted, plain in pairs]

    def _columns(self, rows: Any) -> list[pa.Array]:
        names = self._names(rows)
        specs = self._specs
        check_columns(rows, names)
        nulls = self._invalid != "error"
        timed = any(spec.as_it_is and has_instants(kind_of(spec).arrow(spec)) for spec in specs)
        zone = zone_of(self._time_zone) if timed else timezone.utc
        return [
            kind_of(spec).of_values(rows[name], spec, name, nulls=nulls, zone=zone)
            for name, spec in zip(names, specs, strict=True)
        ]


class PyFuncPipeline:
    """A chain of models, in which a model may take the outputs of earlier models."""

    def __init__(self, stages: Sequence[PyFuncModel]) -> None:
        """Stores the models."""
        self._stages = stages

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows as `PyFuncModel.predict`; returns the columns of all stages, null where one leaves a row out."""
        columns: Any = self._stages[0]._rows(model_input)
        outputs: list[pd.DataFrame] = []
        index: Any = None
        # These are the positions of the rows that no stage has left out. As in Spark, later stages get only these rows.
        positions: Any = None
        for stage in self._stages:
            is_empty = positions is not None and not len(positions)
            scored = pd.DataFrame(columns=stage.outputs) if is_empty else stage.predict(columns)
            if positions is None:
                index = scored.index
                positions = np.arange(len(scored))
            outputs.append(scored.set_axis(positions))
            columns = {**{name: columns[name] for name in columns}, **scored}
            if stage.skips:
                is_scored = scored.notna().any(axis=1).to_numpy()
                positions = positions[is_scored]
                for name, values in columns.items():
                    columns[name] = [value for value, stays in zip(values, is_scored, strict=True) if stays]
        table: pd.DataFrame = pd.concat(outputs, axis=1).loc[positions].reindex(range(len(outputs[0])))
        return table.set_axis(index)
