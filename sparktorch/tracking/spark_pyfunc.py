"""A pipeline with stages of Spark's as an MLflow `python_function`: scores pandas in a Spark session of the process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.ml import PipelineModel
from pyspark.sql import Column, SparkSession

from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.errors import ColumnError
from sparktorch.spark.column_names import quoted
from sparktorch.spark.compat import frame_of_rows, to_vector
from sparktorch.spark.shipping import add_code
from sparktorch.tracking.pyfunc import check_columns, pickles_allowed
from sparktorch.tracking.stages import in_utc, read_spark_stages, with_doubles, without_vectors

__all__ = ["SparkPyFunc"]

_ROW = "__sparktorch_row"


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> SparkPyFunc:
    """Loads what `save_model` wrote into the session of this process, or a local one; MLflow calls this."""
    from mlflow.utils._spark_utils import (
        _create_local_spark_session_for_loading_spark_model,
        _get_active_spark_session,
    )

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the session's Python need not be first on the PATH
    spark = _get_active_spark_session() or _create_local_spark_session_for_loading_spark_model()
    directory = Path(path)
    model = read_spark_stages(directory.parent, allow_pickle=pickles_allowed())
    if (directory.parent / "code").is_dir():
        add_code(directory.parent / "code")
    return SparkPyFunc(spark, model, json.loads((directory / "columns.json").read_text()))


class SparkPyFunc:
    """The pipeline that `mlflow.pyfunc.load_model(...).predict` calls."""

    def __init__(self, spark: SparkSession, model: PipelineModel, settings: Mapping[str, Any]) -> None:
        """Takes a pipeline; `settings` has the SQL types of its `inputs` and `outputs`, by column."""
        self._spark, self._model = spark, model
        self._inputs: Mapping[str, str] = settings["inputs"]
        self._outputs = list(settings["outputs"])
        self._zone: str = settings["zone"]  # of the session that has logged it

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows.

        Args:
            model_input: A pandas DataFrame with the input columns. What pandas counts as missing is null; times without
                a time zone are in that of the session that has logged it.
            params: Not used.

        Returns:
            A DataFrame with the output columns, vectors as arrays. A row that the pipeline leaves out has nulls, unless
            it makes several rows of others.

        Raises:
            ColumnError: An input column is missing, or has values of another type.
        """
        check_columns(model_input, self._inputs)
        arrays = {name: _arrow(model_input, name, kind, self._zone) for name, kind in self._inputs.items()}
        rows = len(next(iter(arrays.values())))
        table = pa.table({**arrays, _ROW: np.arange(rows)})
        columns = [_typed(quoted(name), kind).alias(name) for name, kind in self._inputs.items()]
        scored = self._model.transform(frame_of_rows(self._spark, table).select(*columns, _ROW))
        # A stage may leave rows out, or change their order; an SQL statement, also the numbers of rows.
        numbered = [_ROW] if _ROW in scored.columns else []
        found = without_vectors(scored.select(*map(quoted, self._outputs), *numbered)).toPandas()
        if not numbered or not found[_ROW].is_unique:  # a stage has made several rows of one
            return found.drop(columns=numbered)
        return found.set_index(_ROW).reindex(range(rows)).rename_axis(None)


def _arrow(model_input: pd.DataFrame, name: str, kind: str, zone: str) -> pa.Array:
    """Returns a column as Arrow, of the type from which Spark casts to `kind`."""
    values = pd.Series(model_input[name])
    special = {
        "vector": pa.list_(pa.float64()),
        "timestamp": pa.timestamp("us", "UTC"),
        "date": pa.timestamp("us"),
    }
    try:
        if kind in ("timestamp", "timestamp_ntz", "date") and values.map(lambda value: isinstance(value, str)).any():
            values = pd.to_datetime(values)  # as JSON has them
        if kind == "timestamp":
            values = in_utc(pd.to_datetime(values), zone)
        return pa.array(values, special.get(kind) or arrow_type(with_doubles(kind)), from_pandas=True)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ColumnError(
            f"column {name!r} is {kind} in the model: {error}", column=name, code="ST-COLUMN-TYPE"
        ) from error


def _typed(column: Column, kind: str) -> Column:
    return to_vector(column) if kind == "vector" else column.cast(kind)
