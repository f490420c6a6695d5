"""The encoding of the user's columns: the spec for each Spark type, and the expression that encodes a column."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
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

_NUMPY_TYPES = {sql: dtype for dtype, sql in SQL_TYPES.items()} | {"boolean": "bool"}
_CHANNELS = (1, 3, 4)
_NAME = "%column%"  # It stands for the name that Spark finds.
_FLOAT_EXACT = 1 << 24  # float32 holds every whole number up to this one.
# `preprocess` gets columns of these types unchanged, besides numbers, lists and structs.
_PLAIN = (T.StringType, T.BinaryType, T.DateType, T.TimestampType, T.TimestampNTZType)


def plan_inputs(columns: ColumnNames, names: Sequence[str], options: InputOptions) -> list[TensorSpec]:
    """Returns one spec per input; lengths and sizes that only the sample row shows are 0.

    A `ColumnError` refuses columns that are missing or cannot become a tensor, a `ConfigError` options that do not fit
    them.
    """
    options.check_names(names)
    packed: list[int] = []
    if options.assemble:
        packed = [number for number, name in enumerate(names) if isinstance(columns.type_of(name), NUMERIC)]
    is_packed = set(packed)
    specs: list[TensorSpec] = []
    for number, name in enumerate(names):
        wire = input_name(len(specs))
        if number not in is_packed:
            specs.append(_spec(columns, name, wire, options))
        elif number == packed[0]:
            spec = _packed(columns, [names[index] for index in packed], wire, options)
            specs.append(replace(spec, places=tuple(packed)))
    return specs


def _spec(columns: ColumnNames, name: str, wire: str, options: InputOptions) -> TensorSpec:
    kind = columns.type_of(name)
    encoding = encoding_of(kind)
    free = encoding is None or encoding.free
    sql = kept_as(kind) if options.as_they_are and free and not options.params_of(name) else None
    if sql is not None:
        return _as_it_is(kind, sql, name, wire, options)
    if encoding is None or (encoding.asks and name not in options.layouts):
        raise no_tensor(kind, name)
    layout = cast(Layout, options.layouts.get(name, encoding.layouts[0]))
    usual = "int64" if isinstance(element_of(kind)[0], INTEGRAL) else next(iter(encoding.dtypes_as(layout)), "")
    dtype = options.dtypes.get(name, usual)
    for error in _misfits(name, kind, encoding, layout, dtype, options):
        raise error
    _check_fill(name, options.fill, dtype, hint=f"or set inputDtypes={{{name!r}: 'float32'}}")
    ragged = layout in ("padded", "jagged")
    # Lengths that only the sample row shows are 0; the first level of ragged rows has no length.
    depth = encoding.depth(kind)
    levels = (0,) * (depth - 1 if ragged else depth)
    shape = tuple(options.shapes.get(name, levels))
    if name in options.shapes and len(levels) == 1:
        levels = (math.prod(shape),)
    return TensorSpec(
        name=wire,
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


def _as_it_is(kind: T.DataType, sql: str, name: str, wire: str, options: InputOptions) -> TensorSpec:
    """Returns the spec of a column that is passed unchanged to `preprocess`."""
    if isinstance(kind, NUMERIC):
        _check_fill(name, options.fill, _NUMPY_TYPES[sql], hint="or cast the column to double")
    return TensorSpec(
        name=wire, column=name, dtype="float32", kind="any", sql=sql, fill=options.fill, nulls=options.nulls
    )


def kept_as(kind: T.DataType) -> str | None:
    """Returns the SQL type of an unconverted column, with double for decimals; `None` if the type is not supported."""
    if isinstance(kind, T.ArrayType):
        inner = kept_as(kind.elementType)
        return None if inner is None else f"array<{inner}>"
    if isinstance(kind, T.StructType):
        fields = [(field.name, kept_as(field.dataType)) for field in kind.fields]
        if any(inner is None for _, inner in fields):
            return None
        plain = {name for name, _ in fields if name.isascii() and name.isidentifier()}
        named = (f"{name if name in plain else quoted_name(name)}:{inner}" for name, inner in fields)
        return f"struct<{','.join(named)}>"
    if isinstance(kind, T.DecimalType):
        return "double"
    if isinstance(kind, T.StringType):  # `simpleString` would also name a collation.
        return "string"
    return kind.simpleString() if isinstance(kind, (*NUMERIC, *_PLAIN)) else None


def _packed(columns: ColumnNames, names: list[str], wire: str, options: InputOptions) -> TensorSpec:
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
        name=wire,
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
    is_whole = np.dtype(dtype).kind != "f"
    if (float(converted) != fill) if is_whole else (np.isinf(converted) and not math.isinf(fill)):
        raise ConfigError(
            f"fillValue is {fill:g}, which column {name!r}, {dtype}, cannot hold",
            hint=f"set one that fits all the input columns, {hint}",
            param="fillValue",
        )


def _misfits(
    name: str, kind: T.DataType, encoding: Encoding, layout: str, dtype: str, options: InputOptions
) -> Iterator[ConfigError]:
    """Yields what layout, dtype, lengths and shape have that does not suit the column's type."""
    subject = f"column {name!r} is {kind.simpleString()}"
    possible = encoding.dtypes_as(layout) or (dtype,)
    for param, value, valid in (("inputLayouts", layout, encoding.layouts), ("inputDtypes", dtype, possible)):
        if value not in valid:
            hint = f"it can be {' or '.join(map(repr, valid))}"
            yield ConfigError(f"{subject}, which cannot be {value!r}", hint=hint, param=param)
    if not dtype:
        hint = f"set inputDtypes={{{name!r}: 'float32'}}, or another"
        yield ConfigError(f"{subject}, and nothing says what its bytes are", hint=hint, param="inputDtypes")
    for param, options_by_name, suits in (
        ("maxLengths", options.limits, layout in ("padded", "jagged")),
        ("padValues", options.pads, layout == "padded"),
        ("inputShapes", options.shapes, layout != "sparse_csr"),
    ):
        if name in options_by_name and not suits:
            hint = f", or set inputLayouts={{{name!r}: 'padded'}}" if "padded" in encoding.layouts else ""
            yield ConfigError(
                f"{param} names {name!r}, whose layout is {layout!r}", hint=f"leave it out{hint}", param=param
            )
    shape = options.shapes.get(name, (3, 0, 0))
    if layout == "image" and (len(shape) != 3 or (shape[0] not in _CHANNELS and shape[2] not in _CHANNELS)):
        yield ConfigError(
            f"inputShapes[{name!r}] is {list(shape)}, and {subject}",
            hint="an image is [channels, height, width] or [height, width, channels], with 1, 3 or 4 channels",
            param="inputShapes",
            code="ST-SHAPE",
        )


def is_numeric(kind: T.DataType) -> bool:
    """Whether a type is a number, an array of them on any level, or an ML vector."""
    return isinstance(kind, VectorUDT) or isinstance(element_of(kind)[0], NUMERIC)


def exact(columns: ColumnNames, spec: TensorSpec, wire: Column) -> Column:
    """Returns an encoded column that raises an error for whole numbers that packing as float32 would round."""
    wide = [name for name in spec.sources if _is_wide(columns.type_of(name))]
    if spec.dtype != "float32" or not wide:
        return wire
    # The expression is flat, and the names are one literal: nested, one `when` a column overflows the JVM's stack at
    # 300 columns.
    sizes = [F.abs(columns.column(name).cast("double")) for name in wide]
    most = F.greatest(F.lit(0.0), *sizes)
    names = F.from_json(F.lit(json.dumps([json.dumps(name)[1:-1] for name in wide])), "array<string>")
    # Spark 3.5's array_position and array_contains take no column, so the names are filtered by position.
    largest = F.array(*sizes)

    def is_largest(name: Column, index: Column) -> Column:
        return F.get(largest, index) == most

    widest = F.element_at(F.filter(names, is_largest), 1)
    error = ColumnError(
        f"column '{_NAME}' holds whole numbers beyond 2^24, which are packed as float32 and would be rounded: "
        "different ones would become the same",
        hint="leave identifiers out of the inputs; where rounding is fine, cast it to double",
        column=_NAME,
    )
    refused = F.raise_error(F.replace(F.lit(failure_text(error)), F.lit(_NAME), widest))
    return F.when(most <= _FLOAT_EXACT, wire).otherwise(refused).alias(spec.name)


def _is_wide(kind: T.DataType) -> bool:
    """Whether a type is of whole numbers that float32 may round."""
    is_whole = isinstance(kind, T.DecimalType) and kind.scale <= 0 and kind.precision > 7
    return is_whole or isinstance(kind, (T.IntegerType, T.LongType))


def column_of(columns: ColumnNames, spec: TensorSpec) -> Column:
    """Returns the expression that encodes a column for the ranks and the scorer."""
    if spec.sources:
        return F.array(*[number_as(columns, name, spec.dtype) for name in spec.sources]).alias(spec.name)
    kind = columns.type_of(spec.column)
    column = columns.column(spec.column)
    if spec.as_it_is:
        if kind.simpleString() != spec.sql:
            numbers = spec.sql in NUMBERS
            column = number_as(columns, spec.column, _NUMPY_TYPES[spec.sql]) if numbers else column.cast(spec.sql)
        return column.alias(spec.name)
    encoding = encoding_of(kind)
    assert encoding is not None
    return encoding.encoded(columns, spec).alias(spec.name)


def input_columns(dataset: DataFrame, specs: Sequence[TensorSpec]) -> list[Column]:
    """Returns the encoded input columns of a fitted model, one per spec; refuses other types than those of the fit."""
    columns = ColumnNames.of(dataset)
    for spec in specs:
        for name in spec.sources or (spec.column,):
            kind = columns.type_of(name)
            if not _fits(kind, spec):
                hint = _as_in_fit(kind, spec, columns.sql(name))
                raise unsuitable(kind, name, f"but the model was fitted on {spec.describe()}", hint)
    sent = [(spec, column_of(columns, spec)) for spec in specs]
    return [for_pandas(column, columns.type_of(spec.column)) if spec.as_it_is else column for spec, column in sent]


def _as_in_fit(kind: T.DataType, spec: TensorSpec, sql: str) -> str:
    """Returns the hint that casts a column, by its name in SQL, to what the model was fitted on; empty if none can."""
    source = _source(spec)
    if source is not None:
        return as_numbers(kind, sql, source)
    if not spec.as_it_is or not isinstance(kind, (*NUMERIC, *_PLAIN)) or "<" in spec.sql:
        return ""
    zoned = {kind.simpleString(), spec.sql} == {"timestamp", "timestamp_ntz"}
    zone = "; its time zone is then spark.sql.session.timeZone" if zoned else ""
    return f"as in the fit: cast({sql} as {spec.sql}){zone}"


def _source(spec: TensorSpec) -> str | None:
    """Returns the SQL type of numbers that holds every number of an input; `None` if it takes no numbers."""
    if spec.as_it_is:
        return spec.sql if spec.sql in NUMBERS else None
    usual = "double" if kind_of(spec).numeric else None
    return SQL_TYPES[spec.dtype] if usual and np.dtype(spec.dtype).kind == "i" else usual


def _fits(kind: T.DataType, spec: TensorSpec) -> bool:
    """Whether a model with that input can score columns of that type."""
    if spec.as_it_is:
        return kept_as(kind) == spec.sql or (isinstance(kind, NUMERIC) and spec.sql in NUMBERS)
    encoding = encoding_of(kind)
    if encoding is None:
        return False
    if not kind_of(spec).numeric:
        return encoding.kind == spec.kind and spec.layout in encoding.layouts
    depth = len(spec.levels) + 1 if spec.ragged else len(spec.levels)
    if spec.sources:
        depth = 0
    ragged = not spec.ragged or spec.layout in encoding.layouts
    return KINDS[encoding.kind].numeric and encoding.depth(kind) == depth and ragged
