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
SQL_TYPES: dict[str, str] = {
    "float32": "float",
    "float64": "double",
    "int64": "bigint",
    "int32": "int",
    "int16": "smallint",
    "int8": "tinyint",
}
_IMAGE_FIELDS = ("height", "width", "nChannels", "data")
_OF_IMAGES = ("float32", "uint8")


class Encoding(NamedTuple):
    """Types of columns that become a kind of column in one way.

    Attributes:
        kind: The kind's name in `data/fields/kinds.py`.
        matches: Whether a type is among them.
        encoded: Returns the expression that encodes such a column for a spec, which may be of another numeric kind.
        layouts: Their possible layouts, the usual one first.
        dtypes: Their possible dtypes, the usual one first; of integral elements that is int64. Empty for any that
            is named.
        free: Whether a `preprocess` gets them as they are, unless options say otherwise.
        asks: Whether the user must name the layout.
    """

    kind: str
    matches: Callable[[T.DataType], bool]
    encoded: Callable[[ColumnNames, TensorSpec], Column]
    layouts: tuple[Layout, ...] = ("dense",)
    dtypes: tuple[str, ...] = tuple(SQL_TYPES)
    free: bool = False
    asks: bool = False

    def depth(self, kind: T.DataType) -> int:
        """Returns the number of list levels of a type; a vector, a file and an image have one."""
        return element_of(kind)[1] if self.kind == "number" else 1

    def dtypes_as(self, layout: str) -> tuple[str, ...]:
        """Returns the possible dtypes in a layout, the usual one first; empty for any that is named."""
        return _OF_IMAGES if layout == "image" else self.dtypes


def element_of(kind: T.DataType) -> tuple[T.DataType, int]:
    """Returns the innermost element type of nested arrays, and their depth."""
    depth = 0
    while isinstance(kind, T.ArrayType):
        kind, depth = kind.elementType, depth + 1
    return kind, depth


def number_as(columns: ColumnNames, name: str, dtype: str) -> Column:
    """Returns a column of numbers, or of nested lists of them, as a dtype."""
    element, depth = element_of(columns.type_of(name))
    if np.dtype(dtype).kind == "i" and not _holds_all(element, dtype):
        # Out-of-range values become null, for `nullPolicy`; a cast would raise or wrap, depending on ANSI mode.
        return F.expr(f"try_cast({columns.sql(name)} as {_listed(dtype, depth)})")
    return columns.column(name).cast(_listed(dtype, depth))


def _holds_all(kind: T.DataType, dtype: str) -> bool:
    """Whether an integer dtype holds every value of a type."""
    if isinstance(kind, T.BooleanType):
        return True
    wide = [sort for sort, width in zip(INTEGRAL, (8, 16, 32, 64), strict=True) if width <= np.iinfo(dtype).bits]
    return isinstance(kind, tuple(wide))


def _listed(dtype: str, depth: int) -> str:
    """Returns the SQL type of lists of a dtype, nested `depth` times."""
    return "array<" * depth + SQL_TYPES[dtype] + ">" * depth


def _image(columns: ColumnNames, spec: TensorSpec) -> Column:
    column = columns.column(spec.column)
    fields = F.struct(*[column[name].alias(name) for name in _IMAGE_FIELDS])
    # Images that Spark could not read have height -1.
    readable = column["data"].isNotNull() & (column["height"] >= 0)
    return F.when(readable, fields)


def _vectors(columns: ColumnNames, spec: TensorSpec) -> Column:
    """Returns an ML vector as a struct of size (null if it is dense), indices and values.

    Dense vectors have null indices. They become an empty array, which Spark writes to Arrow 15 times as fast.
    """
    column, dtype = columns.column(spec.column), spec.dtype
    fields = F.unwrap_udt(column)
    indices = F.coalesce(fields["indices"], F.array().cast("array<int>"))
    values = fields["values"]
    if np.dtype(dtype).kind == "i":
        least, most = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)

        # A value that the dtype cannot hold becomes null, for `nullPolicy`.
        def null_beyond_limits(value: Column) -> Column:
            return F.when(((value == least) | (value > least - 1)) & (value < most + 1), value)

        values = F.transform(values, null_beyond_limits)
    parts = F.struct(
        fields["size"].alias("size"), indices.alias("indices"), values.cast(_listed(dtype, 1)).alias("values")
    )
    return F.when(column.isNotNull(), parts)


def _numbers(columns: ColumnNames, spec: TensorSpec) -> Column:
    return number_as(columns, spec.column, spec.dtype)


def _bytes(columns: ColumnNames, spec: TensorSpec) -> Column:
    return columns.column(spec.column)


def _content(columns: ColumnNames, spec: TensorSpec) -> Column:
    return columns.column(spec.column)["content"]


def _is_vector(kind: T.DataType) -> bool:
    return isinstance(kind, VectorUDT)


def _is_number(kind: T.DataType) -> bool:
    return isinstance(kind, NUMERIC)


def _is_list_of_numbers(kind: T.DataType) -> bool:
    return isinstance(element_of(kind)[0], NUMERIC)


def _is_binary(kind: T.DataType) -> bool:
    return isinstance(kind, T.BinaryType)


def _is_file(kind: T.DataType) -> bool:
    """Whether a type is that of a row of Spark's source `binaryFile`."""
    return isinstance(kind, T.StructType) and {"path", "modificationTime", "length", "content"} <= set(kind.names)


def _is_image(kind: T.DataType) -> bool:
    """Whether a type is that of the column of Spark's source `image`."""
    return isinstance(kind, T.StructType) and set(_IMAGE_FIELDS) <= set(kind.names)


ENCODINGS = (
    Encoding("vector", _is_vector, _vectors, layouts=("dense", "sparse_csr"), dtypes=("float32", "float64")),
    Encoding("number", _is_number, _numbers, free=True),
    Encoding("number", _is_list_of_numbers, _numbers, layouts=("dense", "padded", "jagged"), free=True),
    Encoding("binary", _is_binary, _bytes, layouts=("raw", "image"), dtypes=(), free=True, asks=True),
    Encoding("binary", _is_file, _content, layouts=("image",)),
    Encoding("binary", _is_image, _image, layouts=("image",)),
)


def encoding_of(kind: T.DataType) -> Encoding | None:
    """Returns how columns of a type become tensors; `None` if they cannot."""
    return next((encoding for encoding in ENCODINGS if encoding.matches(kind)), None)
