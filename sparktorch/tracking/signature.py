"""What MLflow is told of a model's columns: its signature, and two rows of nothing as an example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sparktorch.data.columns import TensorSpec
from sparktorch.data.images import black_image

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models import ModelSignature

    from sparktorch.ml.model import TorchModelBase

__all__ = ["signature_of", "zeros_for"]


def signature_of(model: TorchModelBase, outputs: dict[str, str]) -> ModelSignature:
    """Returns inputs as named tensors, which MLflow makes of columns, arrays and JSON alike; outputs as columns.

    Where rows differ in length, are bytes, or go to a callable, inputs are columns, too: MLflow has no
    tensors for them.
    """
    from mlflow import types
    from mlflow.models import ModelSignature

    fields, _ = model._fields()
    inputs: list[types.ColSpec | types.TensorSpec] = []
    as_columns = any(spec.ragged or spec.kind in ("binary", "any") for spec in model.trained.inputs)
    for spec in model._inputs():
        shape = () if spec.sources else spec.shape
        tensor = np.dtype(spec.dtype), (-1, *shape)
        names = spec.sources or (spec.column,)
        inputs += [types.ColSpec(_column_type(spec), n) if as_columns else types.TensorSpec(*tensor, n) for n in names]
    columns: list[types.ColSpec | types.TensorSpec] = []
    for name, field in outputs.items():
        sql = fields[field]
        kind = _nested("double", 1) if sql == "vector" else _of_sql(sql)
        columns.append(types.ColSpec(kind, name))
    return ModelSignature(inputs=types.Schema(inputs), outputs=types.Schema(columns))


def zeros_for(model: TorchModelBase) -> pd.DataFrame:
    """Returns two rows as the model takes them: of zeros, because a row of the training set may be secret."""
    import pandas as pd

    specs = model._inputs()
    return pd.DataFrame({name: _zeros(spec) for spec in specs for name in spec.sources or (spec.column,)})


def _column_type(spec: TensorSpec) -> Any:
    """Returns MLflow's type of a column."""
    if spec.kind == "any":
        return _of_sql(spec.sql)
    levels = () if spec.sources or spec.kind == "binary" else spec.levels
    return _nested("binary" if spec.kind == "binary" else spec.dtype, len(levels) + spec.ragged)


def _of_sql(sql: str) -> Any:
    """Returns MLflow's type of a type of Spark's, arrays included."""
    return _nested(sql.replace("array<", "").rstrip(">"), sql.count("array<"))


def _nested(element: str, depth: int) -> Any:
    """Returns MLflow's type of arrays nested so deep; whole numbers of any width that it does not know are integers."""
    from mlflow.types.schema import Array, DataType

    kinds = {kind.name: kind for kind in DataType}
    kinds |= {"float32": DataType.float, "float64": DataType.double, "int64": DataType.long, "bigint": DataType.long}
    kinds |= dict.fromkeys(("date", "timestamp", "timestamp_ntz"), DataType.datetime)
    kind: Any = kinds.get(element, DataType.integer)
    for _ in range(depth):
        kind = Array(kind)
    return kind


def _zeros(spec: TensorSpec) -> Any:
    """Returns two rows of one column."""
    if spec.kind == "any":
        return _nothing(spec.sql)
    if spec.kind == "binary":
        size = spec.width * np.dtype(spec.dtype).itemsize
        return [black_image(spec) if spec.layout == "image" else bytes(size)] * 2
    shape = () if spec.sources else (1, *spec.levels) if spec.ragged else spec.shape
    zeros = np.zeros((2, *shape), spec.dtype)
    return zeros.tolist() if shape else zeros


def _nothing(sql: str) -> Any:
    """Returns two rows of a type of Spark's that say nothing: 0, an empty text or list."""
    numpy = {"tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64", "boolean": "bool"}
    numpy |= {"float": "float32", "double": "float64"}
    numpy |= dict.fromkeys(("date", "timestamp", "timestamp_ntz"), "datetime64[us]")
    if sql in numpy:
        return np.zeros(2, numpy[sql])
    return [[], []] if sql.startswith("array") else [b""] * 2 if sql == "binary" else [""] * 2
