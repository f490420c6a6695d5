"""Prepares the DataFrame before the job: checks and encodes columns, adds row keys, reads the sample row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.base.config import Task
from sparktorch.data.columns import (
    FOLD,
    GROUP,
    KEY,
    LABEL,
    ORDER,
    VALIDATION,
    WEIGHT,
    Columns,
    Groups,
    InputOptions,
    TensorSpec,
    carried_name,
)
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.preprocess import Function, Preprocess
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import NUMERIC, column_of, exact, is_numeric, plan_inputs
from sparktorch.spark.frame.first_row import first_row, measured
from sparktorch.spark.frame.groups import group_columns
from sparktorch.spark.frame.nested import hashed
from sparktorch.spark.frame.refusals import no_boolean, no_label, no_number

__all__ = ["Frame", "prepare"]

_NO_OPTIONS = InputOptions()


@dataclass(frozen=True)
class Frame:
    """An encoded DataFrame.

    Attributes:
        data: The DataFrame.
        columns: Its columns; lengths and sizes in the specs come from the sample row.
        sample: The sample row.
    """

    data: DataFrame
    columns: Columns
    sample: pa.RecordBatch


def prepare(
    dataset: DataFrame,
    task: Task,
    *,
    inputs: Sequence[str],
    label: str | Sequence[str] | None,
    weight: str | None = None,
    validation: str | None = None,
    key: str | None = None,
    options: InputOptions = _NO_OPTIONS,
    preprocess: Function | None = None,
    keyed: bool = True,
    fold: str | None = None,
    carried: Sequence[str] = (),
    groups: Groups | None = None,
    grades: bool = False,
) -> Frame:
    """Selects and encodes the training columns, and reads the sample row.

    Args:
        dataset: The user's DataFrame.
        task: Meaning of the labels.
        inputs: Names of the input columns, in the order of the arguments of `forward`.
        label: Name of the label column, names of several scalar label columns, or `None`.
        weight: Name of the column of sample weights.
        validation: Name of the boolean column that marks validation rows.
        key: Name of a column whose value identifies a row, in place of the row's contents.
        options: Options for the inputs.
        preprocess: Makes the arguments of `forward` from the inputs.
        keyed: Whether row keys cover all columns; otherwise they leave out digestible columns, see `Columns.keyed`.
        fold: Name of an int column with the fold of each row, which is not part of the row's key.
        carried: Names of numeric columns that go with the rows, and are not part of the rows' keys.
        groups: The groups of the rows, whose columns go with the rows, and are part of the rows' keys.
        grades: Whether the labels are grades.
    """
    names = ColumnNames.of(dataset)
    specs = plan_inputs(names, inputs, options)
    columns = Columns(
        inputs=tuple(specs),
        label=None if label is None else _label(names, label, task),
        validation=validation,
        drop_nulls=options.drop,
        preprocess=None if preprocess is None else Preprocess(preprocess, [spec.column for spec in specs]),
        keyed=keyed or key is not None,
        folds=fold is not None,
        carried=tuple(carried),
        groups=groups,
        grades=grades,
    )
    if weight is not None:
        if not isinstance(names.type_of(weight), NUMERIC):
            raise no_number(names.type_of(weight), weight)
        columns = replace(columns, weight=TensorSpec(name=WEIGHT, column=weight, dtype="float32"))
    encoded: list[Column] = []
    for spec in columns.tensors:
        column = column_of(names, spec)
        encoded.append(exact(names, spec, column) if spec in columns.inputs else column)
    if validation is not None:
        if not isinstance(names.type_of(validation), T.BooleanType):
            raise no_boolean(names.type_of(validation), validation)
        encoded.append(names.column(validation).alias(VALIDATION))
    if key is not None:
        encoded.append(F.xxhash64(names.column(key)).alias(KEY))
    if fold is not None:
        encoded.append(names.column(fold).alias(FOLD))
    encoded += group_columns(names, groups, specs)
    encoded += [names.column(name).cast("double").alias(carried_name(index)) for index, name in enumerate(carried)]
    data = dataset.select(*encoded)
    if key is None:
        data = _add_key(data, columns)
    sample = first_row(data, columns, filled=options.fill is not None)
    columns = replace(
        columns,
        inputs=tuple(measured(spec, sample) for spec in columns.inputs),
        label=measured(columns.label, sample) if columns.label else None,
    )
    return Frame(data, columns, sample)


def _add_key(data: DataFrame, columns: Columns) -> DataFrame:
    """Adds the row key, which covers the contents that ranks do not digest, if there are any."""
    contents: list[Column] = []
    for spec in columns.tensors:
        if columns.keyed or not kind_of(spec).digestible(spec):
            contents += hashed(spec, data.schema[spec.name].dataType)
    if columns.keyed and columns.validation is not None:
        contents.append(F.col(VALIDATION))
    contents += [F.col(name) for name in (GROUP, ORDER) if name in data.columns]
    return data.withColumn(KEY, F.xxhash64(*contents)) if contents else data


def _label(columns: ColumnNames, name: str | Sequence[str], task: Task) -> TensorSpec:
    """Returns the spec of the label.

    Classes are encoded as double, so that ranks can reject 1.5 or NaN, which a cast to integers would turn into 1 or 0.
    """
    are_classes = task == "classification"
    are_several = not isinstance(name, str)
    names = [name] if isinstance(name, str) else list(name)
    for label_name in names:
        data_type = columns.type_of(label_name)
        must_be_scalar = are_classes or are_several
        if isinstance(data_type, NUMERIC) or (is_numeric(data_type) and not must_be_scalar):
            continue
        if are_several:
            raise no_number(data_type, label_name)
        raise no_label(data_type, label_name, classes=are_classes)
    if are_classes:
        return TensorSpec(name=LABEL, column=names[0], dtype="float64")
    (spec,) = plan_inputs(columns, names, InputOptions(assemble=are_several))
    return replace(spec, name=LABEL, dtype="float32" if task == "regression" else spec.dtype)
