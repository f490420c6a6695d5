"""The MLflow signature of models, and an input example with zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from sparktorch.data.columns import TensorSpec, plain_names
from sparktorch.data.convert.sql_types import arrow_type
from sparktorch.data.fields.kinds import kind_of

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

    from sparktorch.ml.model import TorchModelBase

__all__ = ["column_type", "signature_of", "type_of", "zeros_for"]


def signature_of(stages: Sequence[TorchModelBase]) -> ModelSignature:
    """Returns inputs and outputs as columns.

    `stages` are the models of a pipeline, or a single model; the output of a stage is no input.

    Inputs have the type `Any`, because the pyfunc takes what `transform` takes, and checks the values itself. Only
    bytes have their own type, by which MLflow decodes them from JSON. MLflow's other types refuse too much, or read
    values wrongly:

    - Tensors need a pandas index with a 0, and one dtype.
    - Numbers need the exact size.
    - Times are read from whole numbers as nanoseconds.
    """
    from mlflow import types
    from mlflow.models import ModelSignature

    required = all(stage.getHandleInvalid() == "error" for stage in stages)
    inputs = [types.ColSpec(_input_type(stage, spec), name, required) for stage, name, spec in _columns_of(stages)]
    columns: list[types.ColSpec | types.TensorSpec] = []
    for stage in stages:
        fields, outputs = stage._fields()
        columns += [types.ColSpec(type_of(fields[field]), name) for name, field in outputs.items()]
    return ModelSignature(inputs=types.Schema([*inputs]), outputs=types.Schema(columns))


def _input_type(stage: TorchModelBase, spec: TensorSpec) -> Any:
    """Returns MLflow's type of an input column: bytes if they are never null, else `Any`."""
    from mlflow.types.schema import AnyType, DataType

    if pa.types.is_binary(kind_of(spec).arrow(spec)) and not spec.nulls and stage.getHandleInvalid() == "error":
        return DataType.binary
    return AnyType()


def zeros_for(stages: Sequence[TorchModelBase]) -> pd.DataFrame:
    """Returns two input rows of zeros; training rows may be confidential."""
    return pd.DataFrame({name: kind_of(spec).zeros(spec) for _, name, spec in _columns_of(stages)})


def type_of(sql: str) -> Any:
    """Returns MLflow's type for a SQL type, or for "vector"; a `ValueError` says that MLflow has none."""
    return _mlflow_type(arrow_type("array<double>" if sql == "vector" else sql))


def _columns_of(stages: Sequence[TorchModelBase]) -> Iterator[tuple[TorchModelBase, str, TensorSpec]]:
    """Yields, for each input column in a pandas frame, its stage, its name, and the spec that it belongs to."""
    # A column that an earlier stage takes or adds is no further input.
    available: set[str] = set()
    for stage in stages:
        specs = {name: spec for spec in stage._inputs() for name in spec.sources or (spec.column,)}
        for name, spec in zip(plain_names(list(specs)), specs.values(), strict=True):
            if name not in available:
                yield stage, name, spec
            available.add(name)
        available |= set(stage._fields()[1])


def column_type(spec: TensorSpec) -> Any:
    """Returns MLflow's type for a column that `spec` reads."""
    kind = kind_of(spec).arrow(spec)
    return _mlflow_type(kind.value_type if spec.sources else kind)


def _mlflow_type(kind: pa.DataType, *, wide: bool = False) -> Any:
    """Returns MLflow's type for an Arrow type, with `wide` numbers of 64 bits, as in structs; else a `ValueError`."""
    from mlflow.types.schema import Array, DataType, Object, Property

    if pa.types.is_list(kind):
        return Array(_mlflow_type(kind.value_type, wide=wide))
    if pa.types.is_struct(kind):
        return Object([Property(field.name, _mlflow_type(field.type, wide=True), required=False) for field in kind])
    if pa.types.is_temporal(kind):
        return DataType.datetime
    if wide and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return DataType.long if pa.types.is_integer(kind) else DataType.double
    kinds = {
        **dict.fromkeys((pa.int8(), pa.int16(), pa.int32()), DataType.integer),
        **{pa.int64(): DataType.long, pa.float32(): DataType.float, pa.float64(): DataType.double},
        **{pa.bool_(): DataType.boolean, pa.string(): DataType.string, pa.binary(): DataType.binary},
    }
    if kind not in kinds:
        raise ValueError(f"MLflow has no type for {kind}")
    return kinds[kind]
