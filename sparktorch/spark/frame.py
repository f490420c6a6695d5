"""The DataFrame before the job: validated, cast and keyed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from sparktorch.config import Task
from sparktorch.data.columns import KEY, LABEL, VALIDATION, WEIGHT, Columns, DType, TensorSpec, input_name
from sparktorch.errors import ColumnError, nearest

__all__ = ["Frame", "input_columns", "prepare"]

_INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_NUMERIC = (*_INTEGRAL, T.FloatType, T.DoubleType, T.DecimalType, T.BooleanType)
_SQL_TYPES: dict[DType, str] = {"float32": "float", "float64": "double", "int64": "bigint"}


@dataclass(frozen=True)
class Frame:
    """A DataFrame under its wire names, with its first row.

    Attributes:
        data: The wire columns.
        columns: What they are; list widths as in the first row.
        sample: The first row as a record batch.
    """

    data: DataFrame
    columns: Columns
    sample: pa.RecordBatch


def prepare(
    dataset: DataFrame,
    task: Task,
    *,
    inputs: Sequence[str],
    label: str | None,
    weight: str | None = None,
    validation: str | None = None,
    key: str | None = None,
) -> Frame:
    """Selects, casts and names the training columns and reads the first row.

    Args:
        dataset: The user's DataFrame.
        task: What the labels mean.
        inputs: One column per argument of `forward`.
        label: The label column, or `None`.
        weight: The column of sample weights.
        validation: The boolean column that marks validation rows.
        key: A column whose value identifies a row in place of its contents.

    Raises:
        ColumnError: A column is missing or has a type that cannot be trained on, or there are no rows.
    """
    wire: list[Column] = []
    specs = []
    for index, name in enumerate(inputs):
        spec, column = _input(dataset, name, input_name(index))
        specs.append(spec)
        wire.append(column)
    label_spec = None
    if label is not None:
        label_spec, column = _label(dataset, label, task)
        wire.append(column)
    weight_spec = None
    if weight is not None:
        _require(dataset, weight, _NUMERIC, "a number")
        weight_spec = TensorSpec(name=WEIGHT, column=weight, dtype="float32")
        wire.append(_col(weight).cast("float").alias(WEIGHT))
    if validation is not None:
        _require(dataset, validation, (T.BooleanType,), "boolean")
        wire.append(_col(validation).alias(VALIDATION))
    if key is not None:
        _type_of(dataset, key)
        wire.append(F.xxhash64(_col(key)).alias(KEY))
    data = dataset.select(*wire)
    if key is None:
        data = data.withColumn(KEY, F.xxhash64(*data.columns))

    first = data.head(1)  # reads one partition; `limit(1).toArrow()` would run a task on every one
    if not first:
        raise ColumnError("the DataFrame has no rows", hint="check the filter or the path it comes from")
    sample = pa.RecordBatch.from_pylist([row.asDict() for row in first], to_arrow_schema(data.schema))
    columns = Columns(
        inputs=tuple(_measured(spec, sample) for spec in specs),
        label=_measured(label_spec, sample) if label_spec else None,
        weight=weight_spec,
        validation=validation,
    )
    return Frame(data, columns, sample)


def input_columns(dataset: DataFrame, specs: Sequence[TensorSpec]) -> list[Column]:
    """Returns the columns of a DataFrame cast as the specs of a fitted model ask.

    Raises:
        ColumnError: A column is missing or has another type than the model was fitted on.
    """
    columns = []
    for spec in specs:
        found, column = _input(dataset, spec.column, spec.name)
        if len(found.shape) != len(spec.shape):
            raise ColumnError(
                f"column {spec.column!r} is {dataset.schema[spec.column].dataType.simpleString()}, but the "
                f"model was fitted on {spec.describe()}",
                column=spec.column,
            )
        columns.append(column if found.dtype == spec.dtype else _cast(column, spec))
    return columns


def _input(dataset: DataFrame, name: str, wire: str) -> tuple[TensorSpec, Column]:
    """Returns spec and wire column of an input; lists get width 0 until a row has been seen."""
    kind = _type_of(dataset, name)
    if isinstance(kind, VectorUDT):
        column = vector_to_array(_col(name), "float32")
        return TensorSpec(name=wire, column=name, dtype="float32", shape=(0,)), column.alias(wire)
    element = kind.elementType if isinstance(kind, T.ArrayType) else kind
    if not isinstance(element, _NUMERIC):
        raise ColumnError(
            f"column {name!r} is {kind.simpleString()}, which cannot become a tensor",
            hint="inputs are numbers, arrays of numbers or ML vectors: cast it, index strings with "
            "StringIndexer, or assemble columns with VectorAssembler",
            column=name,
        )
    spec = TensorSpec(
        name=wire,
        column=name,
        dtype="int64" if isinstance(element, _INTEGRAL) else "float32",
        shape=(0,) if isinstance(kind, T.ArrayType) else (),
    )
    return spec, _cast(_col(name), spec)


def _label(dataset: DataFrame, name: str, task: Task) -> tuple[TensorSpec, Column]:
    """Returns spec and wire column of the label.

    Classes travel uncut as double, so that 1.5 or NaN can be refused instead of becoming 1 or 0.
    """
    if task == "classification":
        _require(dataset, name, _NUMERIC, "a number")
        spec = TensorSpec(name=LABEL, column=name, dtype="float64")
        return spec, _cast(_col(name), spec)
    spec, column = _input(dataset, name, LABEL)
    if task == "regression" and spec.dtype != "float32":
        spec = replace(spec, dtype="float32")
        column = _cast(_col(name), spec)
    return spec, column


def _cast(column: Column, spec: TensorSpec) -> Column:
    sql = _SQL_TYPES[spec.dtype]
    return column.cast(f"array<{sql}>" if spec.shape else sql).alias(spec.name)


def _measured(spec: TensorSpec, sample: pa.RecordBatch) -> TensorSpec:
    """Fills in the width of a list column from the first row; the ranks check every row."""
    if not spec.shape:
        return spec
    value = sample.column(spec.name)[0].as_py()
    if not value:
        raise ColumnError(
            f"column {spec.column!r} is {'null' if value is None else 'empty'} in the first row",
            hint="drop such rows before fit",
            column=spec.column,
        )
    return replace(spec, shape=(len(value),))


def _require(dataset: DataFrame, name: str, kinds: tuple[type[T.DataType], ...], what: str) -> None:
    kind = _type_of(dataset, name)
    if not isinstance(kind, kinds):
        raise ColumnError(f"column {name!r} must be {what}, but is {kind.simpleString()}", column=name)


def _type_of(dataset: DataFrame, name: str) -> T.DataType:
    schema = dataset.schema
    if name not in schema.names:
        raise ColumnError(
            f"there is no column {name!r}; the DataFrame has {', '.join(schema.names)}",
            hint=nearest(name, schema.names),
            column=name,
        )
    return schema[name].dataType


def _col(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")
