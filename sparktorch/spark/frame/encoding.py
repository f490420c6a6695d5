"""Encodes the user's columns: the spec for each Spark type, and the expression that encodes a column."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import DType, InputOptions, Layout, TensorSpec, input_name
from sparktorch.data.convert.sql_types import NUMBERS
from sparktorch.data.fields.kinds import KINDS, kind_of
from sparktorch.errors import ColumnError, ConfigError, failure_text
from sparktorch.spark.column_names import ColumnNames, quoted_name
from sparktorch.spark.compat import for_pandas
from sparktorch.spark.frame.kinds import INTEGRAL, NUMERIC, SQL_TYPES, Encoding, element_of, encoding_of, number_as
from sparktorch.spark.frame.refusals import as_numbers, no_tensor, unsuitable

__all__ = ["NUMERIC", "column_of", "exact", "input_columns", "is_numeric", "kept_as", "plan_inputs"]

# The dtype by Spark's SQL type.
_NUMPY_TYPES = {sql: dtype for dtype, sql in SQL_TYPES.items()} | {"boolean": "bool"}
_CHANNELS = (1, 3, 4)
# Spark replaces this text by the name of the column whose value it refuses.
_NAME = "%column%"
_FLOAT_EXACT = 1 << 24  # float32 holds every whole number up to this one.
# `preprocess` gets columns of these types unchanged, besides numbers, lists and structs.
_PLAIN = (T.StringType, T.BinaryType, T.DateType, T.TimestampType, T.TimestampNTZType)


def plan_inputs(columns: ColumnNames, names: Sequence[str], options: InputOptions) -> list[TensorSpec]:
    """Returns one spec per input; lengths and sizes that only the sample row shows are 0.

    A `ColumnError` refuses columns that are missing or cannot become a tensor, a `ConfigError` options that do not fit
    the columns.
    """
    options.check_names(names)
    packed: list[int] = []
    if options.assemble:
        packed = [index for index, name in enumerate(names) if isinstance(columns.type_of(name), NUMERIC)]
    is_packed = set(packed)
    specs: list[TensorSpec] = []
    for index, name in enumerate(names):
        encoded_name = input_name(len(specs))
        if index not in is_packed:
            specs.append(_spec(columns, name, encoded_name, options))
        elif index == packed[0]:
            spec = _packed_spec(columns, [names[position] for position in packed], encoded_name, options)
            specs.append(replace(spec, places=tuple(packed)))
    return specs


def _spec(columns: ColumnNames, name: str, encoded_name: str, options: InputOptions) -> TensorSpec:
    """Returns the spec of an input that is one column."""
    data_type = columns.type_of(name)
    encoding = encoding_of(data_type)
    is_free = encoding is None or encoding.free
    if options.as_they_are and is_free and not options.params_of(name):
        sql = kept_as(data_type)
        if sql is not None:
            return _unconverted_spec(data_type, sql, name, encoded_name, options)
    if encoding is None or (encoding.asks and name not in options.layouts):
        raise no_tensor(data_type, name)
    layout = cast(Layout, options.layouts.get(name, encoding.layouts[0]))
    if isinstance(element_of(data_type)[0], INTEGRAL):
        usual_dtype = "int64"
    else:
        usual_dtype = next(iter(encoding.dtypes_as(layout)), "")
    dtype = options.dtypes.get(name, usual_dtype)
    _check_options(name, data_type, encoding, layout, dtype, options)
    _check_fill(name, options.fill, dtype, hint=f"or set inputDtypes={{{name!r}: 'float32'}}")
    # Lengths that only the sample row shows are 0; the first level of ragged rows has no length.
    depth = encoding.depth(data_type)
    if layout in ("padded", "jagged"):
        depth -= 1
    levels = (0,) * depth
    shape = tuple(options.shapes.get(name, levels))
    if name in options.shapes and len(levels) == 1:
        levels = (math.prod(shape),)
    return TensorSpec(
        name=encoded_name,
        column=name,
        dtype=cast(DType, dtype),
        shape=shape,
        kind=encoding.kind,
        layout=layout,
        lists=levels if name in options.shapes and layout != "image" else None,
        fill=options.fill,
        limit=options.limits.get(name),
        pad=options.pads.get(name, 0),
        resize=layout == "image" and name in options.shapes,
    )


def _unconverted_spec(
    data_type: T.DataType, sql: str, name: str, encoded_name: str, options: InputOptions
) -> TensorSpec:
    """Returns the spec of a column that is passed unchanged to `preprocess`."""
    if isinstance(data_type, NUMERIC):
        _check_fill(name, options.fill, _NUMPY_TYPES[sql], hint="or cast the column to double")
    return TensorSpec(
        name=encoded_name, column=name, dtype="float32", kind="any", sql=sql, fill=options.fill, nulls=options.nulls
    )


def kept_as(data_type: T.DataType) -> str | None:
    """Returns the SQL type of an unconverted column, with double for decimals; `None` if the type is not supported."""
    if isinstance(data_type, T.ArrayType):
        inner = kept_as(data_type.elementType)
        return None if inner is None else f"array<{inner}>"
    if isinstance(data_type, T.StructType):
        fields = [(field.name, kept_as(field.dataType)) for field in data_type.fields]
        if any(inner is None for _, inner in fields):
            return None
        described = [f"{_field_name(name)}:{inner}" for name, inner in fields]
        return f"struct<{','.join(described)}>"
    if isinstance(data_type, T.DecimalType):
        return "double"
    if isinstance(data_type, T.StringType):  # `simpleString` would also name a collation.
        return "string"
    return data_type.simpleString() if isinstance(data_type, (*NUMERIC, *_PLAIN)) else None


def _field_name(name: str) -> str:
    """Returns a field's name as SQL types have it, quoted if needed."""
    return name if name.isascii() and name.isidentifier() else quoted_name(name)


def _packed_spec(columns: ColumnNames, names: list[str], encoded_name: str, options: InputOptions) -> TensorSpec:
    """Returns the spec of scalar columns packed into one array."""
    for name in names:
        params = options.params_of(name)
        if params:
            raise ConfigError(
                f"{params[0]} names {name!r}, which assembleInputs packs together with the other scalar columns",
                hint=f"leave {params[0]} out: one column that is cast to double makes all of them floats",
                param=params[0],
            )
    integral = all(isinstance(columns.type_of(name), INTEGRAL) for name in names)
    _check_fill(names[0], options.fill, "int64" if integral else "float32", hint="or cast a column to double")
    return TensorSpec(
        name=encoded_name,
        column=names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}",
        dtype="int64" if integral else "float32",
        shape=(len(names),),
        sources=tuple(names),
        fill=options.fill,
    )


def _check_fill(name: str, fill: float | None, dtype: str, *, hint: str) -> None:
    """Checks that a dtype can hold `fillValue`."""
    if fill is None:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.float64(fill).astype(dtype)
    is_lost = float(converted) != fill
    if np.dtype(dtype).kind == "f":  # Floats may round the value.
        is_lost = bool(np.isinf(converted)) and not math.isinf(fill)
    if is_lost:
        raise ConfigError(
            f"fillValue is {fill:g}, which column {name!r}, {dtype}, cannot hold",
            hint=f"set one that fits all the input columns, {hint}",
            param="fillValue",
        )


def _check_options(
    name: str, data_type: T.DataType, encoding: Encoding, layout: str, dtype: str, options: InputOptions
) -> None:
    """Refuses a layout, dtype, length or shape that does not suit the column's type."""
    subject = f"column {name!r} is {data_type.simpleString()}"
    possible_dtypes = encoding.dtypes_as(layout) or (dtype,)
    for param, value, possible in (("inputLayouts", layout, encoding.layouts), ("inputDtypes", dtype, possible_dtypes)):
        if value not in possible:
            hint = f"it can be {' or '.join(map(repr, possible))}"
            raise ConfigError(f"{subject}, which cannot be {value!r}", hint=hint, param=param)
    if not dtype:
        hint = f"set inputDtypes={{{name!r}: 'float32'}}, or another"
        raise ConfigError(f"{subject}, and nothing says what its bytes are", hint=hint, param="inputDtypes")
    for param, options_by_name, suits in (
        ("maxLengths", options.limits, layout in ("padded", "jagged")),
        ("padValues", options.pads, layout == "padded"),
        ("inputShapes", options.shapes, layout != "sparse_csr"),
    ):
        if name in options_by_name and not suits:
            hint = f", or set inputLayouts={{{name!r}: 'padded'}}" if "padded" in encoding.layouts else ""
            raise ConfigError(
                f"{param} names {name!r}, whose layout is {layout!r}", hint=f"leave it out{hint}", param=param
            )
    shape = options.shapes.get(name, (3, 0, 0))
    if layout == "image" and (len(shape) != 3 or (shape[0] not in _CHANNELS and shape[2] not in _CHANNELS)):
        raise ConfigError(
            f"inputShapes[{name!r}] is {list(shape)}, and {subject}",
            hint="an image is [channels, height, width] or [height, width, channels], with 1, 3 or 4 channels",
            param="inputShapes",
            code="ST-SHAPE",
        )


def is_numeric(data_type: T.DataType) -> bool:
    """Whether a type is a number, an array of numbers on any level, or an ML vector."""
    return isinstance(data_type, VectorUDT) or isinstance(element_of(data_type)[0], NUMERIC)


def exact(columns: ColumnNames, spec: TensorSpec, encoded: Column) -> Column:
    """Returns an encoded column that raises an error for whole numbers that packing as float32 would round."""
    wide = [name for name in spec.sources if _is_wide(columns.type_of(name))]
    if spec.dtype != "float32" or not wide:
        return encoded
    # The expression is flat, and the names are one literal: nested expressions, with one `when` for each column, would
    # overflow the JVM's stack at 300 columns.
    sizes = [F.abs(columns.column(name).cast("double")) for name in wide]
    most = F.greatest(F.lit(0.0), *sizes)
    names = F.from_json(F.lit(json.dumps([json.dumps(name)[1:-1] for name in wide])), "array<string>")
    # Spark 3.5's array_position and array_contains take no column, so the names are filtered by position.
    all_sizes = F.array(*sizes)

    def has_largest(name: Column, index: Column) -> Column:
        return F.get(all_sizes, index) == most

    name_of_largest = F.element_at(F.filter(names, has_largest), 1)
    error = ColumnError(
        f"column '{_NAME}' holds whole numbers beyond 2^24, which are packed as float32 and would be rounded: "
        "different ones would become the same",
        hint="leave identifiers out of the inputs; where rounding is fine, cast it to double",
        column=_NAME,
    )
    refused = F.raise_error(F.replace(F.lit(failure_text(error)), F.lit(_NAME), name_of_largest))
    return F.when(most <= _FLOAT_EXACT, encoded).otherwise(refused).alias(spec.name)


def _is_wide(data_type: T.DataType) -> bool:
    """Whether a type has whole numbers that float32 may round."""
    if isinstance(data_type, T.DecimalType):
        return data_type.scale <= 0 and data_type.precision > 7
    return isinstance(data_type, (T.IntegerType, T.LongType))


def column_of(columns: ColumnNames, spec: TensorSpec) -> Column:
    """Returns the expression that encodes a column for the ranks and the scorer."""
    if spec.sources:
        return F.array(*[number_as(columns, name, spec.dtype) for name in spec.sources]).alias(spec.name)
    data_type = columns.type_of(spec.column)
    column = columns.column(spec.column)
    if spec.as_it_is:
        is_converted = data_type.simpleString() != spec.sql
        if is_converted and spec.sql in NUMBERS:
            column = number_as(columns, spec.column, _NUMPY_TYPES[spec.sql])
        elif is_converted:
            column = column.cast(spec.sql)
        return column.alias(spec.name)
    encoding = encoding_of(data_type)
    assert encoding is not None
    return encoding.encoded(columns, spec).alias(spec.name)


def input_columns(dataset: DataFrame, specs: Sequence[TensorSpec]) -> list[Column]:
    """Returns the encoded input columns of a fitted model, one per spec; refuses types that do not suit the fit's."""
    columns = ColumnNames.of(dataset)
    for spec in specs:
        for name in spec.sources or (spec.column,):
            data_type = columns.type_of(name)
            if not _fits(data_type, spec):
                hint = _as_in_fit(data_type, spec, columns.sql(name))
                raise unsuitable(data_type, name, f"but the model was fitted on {spec.describe()}", hint)
    encoded = []
    for spec in specs:
        column = column_of(columns, spec)
        encoded.append(for_pandas(column, columns.type_of(spec.column)) if spec.as_it_is else column)
    return encoded


def _as_in_fit(data_type: T.DataType, spec: TensorSpec, sql: str) -> str:
    """Returns the hint to cast a column, `sql` in SQL, to what the model was fitted on; empty if no cast helps."""
    number_type = _number_type(spec)
    if number_type is not None:
        return as_numbers(data_type, sql, number_type)
    if not spec.as_it_is or not isinstance(data_type, (*NUMERIC, *_PLAIN)) or "<" in spec.sql:
        return ""
    zoned = {data_type.simpleString(), spec.sql} == {"timestamp", "timestamp_ntz"}
    zone = "; its time zone is then spark.sql.session.timeZone" if zoned else ""
    return f"as in the fit: cast({sql} as {spec.sql}){zone}"


def _number_type(spec: TensorSpec) -> str | None:
    """Returns the SQL type of numbers that can hold every number of an input; `None` if the input takes no numbers."""
    if spec.as_it_is:
        return spec.sql if spec.sql in NUMBERS else None
    if not kind_of(spec).numeric:
        return None
    return SQL_TYPES[spec.dtype] if np.dtype(spec.dtype).kind == "i" else "double"


def _fits(data_type: T.DataType, spec: TensorSpec) -> bool:
    """Whether a model with the input `spec` can score columns of a type."""
    if spec.as_it_is:
        return kept_as(data_type) == spec.sql or (isinstance(data_type, NUMERIC) and spec.sql in NUMBERS)
    encoding = encoding_of(data_type)
    if encoding is None:
        return False
    if not kind_of(spec).numeric:
        return encoding.kind == spec.kind and spec.layout in encoding.layouts
    if not KINDS[encoding.kind].numeric:
        return False
    if spec.sources:
        return encoding.depth(data_type) == 0
    if spec.ragged:
        return encoding.depth(data_type) == len(spec.levels) + 1 and spec.layout in encoding.layouts
    return encoding.depth(data_type) == len(spec.levels)
