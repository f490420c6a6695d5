"""A pipeline with stages of Spark's as an MLflow `python_function`: scores pandas in a Spark session of the process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from datetime import timezone, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.ml import PipelineModel
from pyspark.sql import Column, SparkSession

from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.convert.values import TIMES_HINT, has_times, values_as
from sparktorch.errors import ColumnError
from sparktorch.spark.column_names import quoted
from sparktorch.spark.compat import frame_of_rows, to_vector
from sparktorch.spark.shipping import add_code
from sparktorch.tracking.pyfunc import Served, check_columns, pickles_allowed, zone_of
from sparktorch.tracking.stages import read_spark_stages, with_doubles, without_vectors

__all__ = ["SparkPyFunc"]

_ROW = "__sparktorch_row"


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> Served:
    """Loads a pipeline that `save_model` wrote into the session of this process, or a local one; MLflow calls this.

    The `time_zone` of `model_config` is as for `zone_of`; "auto" outside of UDFs is the zone of the session that has
    logged the pipeline.
    """
    from mlflow.utils._spark_utils import _create_local_spark_session_for_loading_spark_model, _get_active_spark_session

    # Without this, workers run the first Python on the PATH, which need not be this one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = _get_active_spark_session() or _create_local_spark_session_for_loading_spark_model()
    directory = Path(path)
    model = read_spark_stages(directory.parent, allow_pickle=pickles_allowed())
    if (directory.parent / "code").is_dir():
        add_code(directory.parent / "code")
    settings = json.loads((directory / "columns.json").read_text())
    return Served(SparkPyFunc(spark, model, settings, (model_config or {}).get("time_zone", "auto")))


class SparkPyFunc:
    """The pipeline that scores for `mlflow.pyfunc.load_model(...).predict`."""

    def __init__(
        self, spark: SparkSession, model: PipelineModel, settings: Mapping[str, Any], time_zone: str = "auto"
    ) -> None:
        """Takes a pipeline; `settings` has the SQL types of its `inputs` and `outputs`, by column."""
        self._spark, self._model, self._time_zone = spark, model, time_zone
        self._inputs: Mapping[str, str] = settings["inputs"]
        self._outputs = list(settings["outputs"])
        self._logged_zone: str = settings["zone"]  # The session that has logged the pipeline has this time zone.

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Scores rows.

        Args:
            model_input: A pandas DataFrame with the input columns. What pandas counts as missing is null; times without
                a time zone are in that of the session that has logged it, in a UDF in that of its session.
            params: Not used.

        Returns:
            A DataFrame with the output columns, vectors as arrays, and the index of `model_input`. A row that the
            pipeline leaves out has nulls, unless it makes several rows of others.

        Raises:
            ColumnError: An input column is missing, or has values of another type.
        """
        check_columns(model_input, self._inputs)
        timed = any(re.search(r"\btimestamp\b", kind) for kind in self._inputs.values())
        zone = zone_of(self._time_zone, self._logged_zone) if timed else timezone.utc
        arrays = {name: _arrow(model_input, name, kind, zone) for name, kind in self._inputs.items()}
        rows = len(next(iter(arrays.values())))
        index = model_input.index if isinstance(model_input, pd.DataFrame) else pd.RangeIndex(rows)
        frame = frame_of_rows(self._spark, pa.table({**arrays, _ROW: np.arange(rows)}))
        columns = [_typed(quoted(name), kind).alias(name) for name, kind in self._inputs.items()]
        scored = self._model.transform(frame.select(*columns, _ROW))
        # A stage may leave rows out, or change their order; an SQL statement may also leave out the row numbers.
        numbered = [_ROW] if _ROW in scored.columns else []
        table = without_vectors(scored.select(*map(quoted, self._outputs), *numbered)).toPandas()
        if not numbered:
            return table
        if not table[_ROW].is_unique:  # A stage has made several rows of one.
            return table.drop(columns=_ROW).set_axis(index[table[_ROW].to_numpy()])
        return table.set_index(_ROW).reindex(range(rows)).set_axis(index)


def _arrow(model_input: pd.DataFrame, name: str, kind: str, zone: tzinfo | None) -> pa.Array:
    """Returns a column as Arrow, of the type from which Spark casts to `kind`."""
    values = pd.Series(model_input[name])
    hint = ""
    try:
        arrow = pa.list_(pa.float64()) if kind == "vector" else arrow_type(with_doubles(kind))
        if not has_times(arrow):
            return pa.array(values, arrow, from_pandas=True)
        hint = TIMES_HINT
        return values_as(arrow, values, zone)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        what = f"column {name!r} is {kind} in the model: {error}"
        raise ColumnError(what, hint=hint, column=name, code="ST-COLUMN-TYPE") from error


def _typed(column: Column, kind: str) -> Column:
    return to_vector(column) if kind == "vector" else column.cast(kind)
