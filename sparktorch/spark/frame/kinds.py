"""What Spark knows of each kind of column: the types that become it, and the expressions that encode them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import Layout, TensorSpec
from sparktorch.spark.column_names import ColumnNames

__all__ = ["ENCODINGS", "INTEGRAL", "NUMERIC", "SQL_TYPES", "Encoding", "element_of", "encoding_of", "number_as"]

INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
NUMERIC = (*INTEGRAL, T.FloatType, T.DoubleType, T.DecimalType, T.BooleanType)
# Spark's SQL type by dtype.
SQL_TYPES: dict[str, str] = {
    "float32": "float",
    "float64": "double",
    "int64": "bigint",
    "int32": "int",
    "int16": "smallint",
    "int8": "tinyint",
}
_FILE_FIELDS = ("path", "modificationTime", "length", "content")
_IMAGE_FIELDS = ("height", "width", "nChannels", "data")
_IMAGE_DTYPES = ("float32", "uint8")


class Encoding(NamedTuple):
    """How columns of some Spark types become one kind of column.

    Attributes:
        kind: The kind's name in `data/fields/kinds.py`.
        matches: Returns whether a Spark type is one of these types.
        encoded: Returns the expression that encodes such a column for a spec, which may be of another numeric kind.
        layouts: The possible layouts, the usual one first.
        dtypes: The possible dtypes, the usual one first; the usual dtype of integral elements is int64. Empty if any
            dtype that the user names is possible.
        free: Whether a `preprocess` gets such columns as they are, unless options say otherwise.
        asks: Whether the user must name the layout.
    """

    kind: str
    matches: Callable[[T.DataType], bool]
    encoded: Callable[[ColumnNames, TensorSpec], Column]
    layouts: tuple[Layout, ...] = ("dense",)
    dtypes: tuple[str, ...] = tuple(SQL_TYPES)
    free: bool = False
    asks: bool = False

    def depth(self, data_type: T.DataType) -> int:
        """Returns the number of list levels of a type; a vector, a file and an image have one."""
        return element_of(data_type)[1] if self.kind == "number" else 1

    def dtypes_as(self, layout: str) -> tuple[str, ...]:
        """Returns the possible dtypes in a layout, as in `dtypes`."""
        return _IMAGE_DTYPES if layout == "image" else self.dtypes


def element_of(data_type: T.DataType) -> tuple[T.DataType, int]:
    """Returns the innermost element type of nested arrays, and their depth."""
    depth = 0
    while isinstance(data_type, T.ArrayType):
        data_type = data_type.elementType
        depth += 1
    return data_type, depth


def number_as(columns: ColumnNames, name: str, dtype: str) -> Column:
    """Returns a column of numbers, or of nested lists of them, as a dtype."""
    element, depth = element_of(columns.type_of(name))
    if np.dtype(dtype).kind == "i" and not _holds_all(element, dtype):
        # Out-of-range values become null, for `nullPolicy`; a cast would raise or wrap, depending on ANSI mode.
        return F.expr(f"try_cast({columns.sql(name)} as {_list_type(dtype, depth)})")
    return columns.column(name).cast(_list_type(dtype, depth))


def _holds_all(data_type: T.DataType, dtype: str) -> bool:
    """Whether an integer dtype holds every value of a type."""
    if isinstance(data_type, T.BooleanType):
        return True
    bits = np.iinfo(dtype).bits
    held_types = [spark_type for spark_type, width in zip(INTEGRAL, (8, 16, 32, 64), strict=True) if width <= bits]
    return isinstance(data_type, tuple(held_types))


def _list_type(dtype: str, depth: int) -> str:
    """Returns the SQL type of lists of a dtype, nested `depth` times."""
    return "array<" * depth + SQL_TYPES[dtype] + ">" * depth


def _image(columns: ColumnNames, spec: TensorSpec) -> Column:
    """Returns an image as a struct of the fields that ranks need, null if Spark could not read the image."""
    column = columns.column(spec.column)
    fields = F.struct(*[column[name].alias(name) for name in _IMAGE_FIELDS])
    # An image that Spark could not read has height -1.
    readable = column["data"].isNotNull() & (column["height"] >= 0)
    return F.when(readable, fields)


def _vectors(columns: ColumnNames, spec: TensorSpec) -> Column:
    """Returns an ML vector as a struct of size, indices and values; the size of a dense vector is null.

    Dense vectors have null as indices, which becomes an empty array: Spark writes it to Arrow 15 times as fast.
    """
    column = columns.column(spec.column)
    dtype = spec.dtype
    fields = F.unwrap_udt(column)
    indices = F.coalesce(fields["indices"], F.array().cast("array<int>"))
    values = fields["values"]
    if np.dtype(dtype).kind == "i":
        least = float(np.iinfo(dtype).min)
        most = float(np.iinfo(dtype).max)

        def null_beyond_limits(value: Column) -> Column:
            # A value that the dtype cannot hold becomes null, for `nullPolicy`. In float64, `least - 1` may be `least`.
            return F.when(((value == least) | (value > least - 1)) & (value < most + 1), value)

        values = F.transform(values, null_beyond_limits)
    parts = F.struct(
        fields["size"].alias("size"), indices.alias("indices"), values.cast(_list_type(dtype, 1)).alias("values")
    )
    return F.when(column.isNotNull(), parts)


def _numbers(columns: ColumnNames, spec: TensorSpec) -> Column:
    return number_as(columns, spec.column, spec.dtype)


def _bytes(columns: ColumnNames, spec: TensorSpec) -> Column:
    return columns.column(spec.column)


def _content(columns: ColumnNames, spec: TensorSpec) -> Column:
    return columns.column(spec.column)["content"]


def _is_vector(data_type: T.DataType) -> bool:
    return isinstance(data_type, VectorUDT)


def _is_number(data_type: T.DataType) -> bool:
    return isinstance(data_type, NUMERIC)


def _is_list_of_numbers(data_type: T.DataType) -> bool:
    return isinstance(element_of(data_type)[0], NUMERIC)


def _is_binary(data_type: T.DataType) -> bool:
    return isinstance(data_type, T.BinaryType)


def _is_file(data_type: T.DataType) -> bool:
    """Whether a type is the struct of a row from Spark's source `binaryFile`."""
    return isinstance(data_type, T.StructType) and set(_FILE_FIELDS) <= set(data_type.names)


def _is_image(data_type: T.DataType) -> bool:
    """Whether a type is the struct of an image from Spark's source `image`."""
    return isinstance(data_type, T.StructType) and set(_IMAGE_FIELDS) <= set(data_type.names)


ENCODINGS = (
    Encoding("vector", _is_vector, _vectors, layouts=("dense", "sparse_csr"), dtypes=("float32", "float64")),
    Encoding("number", _is_number, _numbers, free=True),
    Encoding("number", _is_list_of_numbers, _numbers, layouts=("dense", "padded", "jagged"), free=True),
    Encoding("binary", _is_binary, _bytes, layouts=("raw", "image"), dtypes=(), free=True, asks=True),
    Encoding("binary", _is_file, _content, layouts=("image",)),
    Encoding("binary", _is_image, _image, layouts=("image",)),
)


def encoding_of(data_type: T.DataType) -> Encoding | None:
    """Returns how columns of a type become tensors; `None` if they cannot become tensors."""
    return next((encoding for encoding in ENCODINGS if encoding.matches(data_type)), None)
