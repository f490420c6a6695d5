"""Reads the schema that Petastorm pickles into a data set, without running code from the pickle.

The unpickler accepts only the classes of a schema, by name. It replaces each object by a passive record of
its class, arguments and state, and never imports or calls petastorm, pyspark or NumPy for a pickle.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparktorch.errors import DatasetError, SparkTorchError

__all__ = ["Codec", "UnischemaField", "read_unischema"]

Codec = Literal["plain", "ndarray", "compressed", "image"]

_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_NUMBER_ALIASES = ("half", "single", "double", "intc", "int_", "uintc", "uint", "longlong", "ulonglong")
_DTYPES = {
    **{f"numpy.{name}": name for name in _NUMBERS},
    **{f"numpy.{name}": np.dtype(name).name for name in _NUMBER_ALIASES},
    **dict.fromkeys(("numpy.bool_", "numpy.bool", "builtins.bool"), "bool"),
    **dict.fromkeys(("numpy.str_", "numpy.unicode_", "builtins.str", "builtins.unicode"), "str"),
    **dict.fromkeys(("numpy.bytes_", "numpy.string_", "builtins.bytes"), "bytes"),
    **dict.fromkeys(("numpy.object_", "builtins.object"), "object"),
    **{"builtins.int": "int64", "builtins.float": "float64"},
    **{"numpy.datetime64": "datetime64", "decimal.Decimal": "Decimal"},
}
_CODECS: dict[str, Codec] = {
    "petastorm.codecs.ScalarCodec": "plain",
    "petastorm.codecs.NdarrayCodec": "ndarray",
    "petastorm.codecs.CompressedNdarrayCodec": "compressed",
    "petastorm.codecs.CompressedImageCodec": "image",
}
_UNISCHEMA = "petastorm.unischema.Unischema"
_FIELD = "petastorm.unischema.UnischemaField"
_NUMPY_DTYPE = "numpy.dtype"
# Functions that old pickles call: Python 2 for an instance, pyspark before 3.3 for a named tuple.
_RECONSTRUCTOR = "copyreg._reconstructor"
_RESTORE = "pyspark.serializers._restore"
_SPARK_TYPES = tuple(
    f"pyspark.sql.types.{name}Type"
    for name in (
        "Boolean",
        "Byte",
        "Short",
        "Integer",
        "Long",
        "Float",
        "Double",
        "Decimal",
        "String",
        "Char",
        "Varchar",
        "Binary",
        "Date",
        "Timestamp",
        "TimestampNTZ",
        "Null",
        "Array",
    )
)
_ADMITTED = {*_DTYPES, *_CODECS, *_SPARK_TYPES, _UNISCHEMA, _FIELD, _NUMPY_DTYPE, _RECONSTRUCTOR, _RESTORE}
_ADMITTED |= {"builtins.tuple"}
_PYTHON_2 = {"copy_reg": "copyreg", "__builtin__": "builtins"}
_OLD_NAME = re.compile(r"av\.(?:experimental\.deepdrive|ml)\.dataset_toolkit\.")
# Petastorm writes images in these formats only.
_FORMATS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG"}


@dataclass(frozen=True, kw_only=True)
class UnischemaField:
    """One field of a data set: a column of its Parquet files, or a partition column.

    Attributes:
        dtype: NumPy dtype name of the values, or one of `bool`, `str`, `bytes`, `datetime64`, `Decimal`, `object`.
        shape: Shape of one row's value; `None` for a dimension that varies between rows.
        codec: `plain` for Parquet values, `ndarray` for `.npy` files, `compressed` for `.npz`, `image` for images.
        image_format: `PNG` or `JPEG`, as Pillow names them; empty for other codecs.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    codec: Codec
    image_format: str = ""

    def describe(self) -> str:
        """Returns `field 'x': float32 of shape (None, 3)`."""
        return f"field {self.name!r}: {self.dtype} of shape {self.shape}"


def read_unischema(pickled: bytes) -> tuple[UnischemaField, ...]:
    """Returns the fields of a Unischema that petastorm 0.4 or newer has pickled, in the order of the Unischema.

    A `DatasetError` refuses pickles with anything else in them, such as a custom codec or code to run.
    """
    try:
        root = _Unpickler(io.BytesIO(pickled), encoding="utf-8").load()
        return _fields(root)
    except SparkTorchError:
        raise
    except Exception as error:  # A hand-made pickle can fail in any way.
        raise DatasetError(
            f"the pickled schema cannot be read: {type(error).__name__}: {error}",
            hint="is the data set written by Petastorm, and its _common_metadata whole?",
        ) from None


class _Record:
    """A passive record of a pickled object: its constructor arguments and its state."""

    path = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Replaces the classes of a schema by `_Record` classes, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        path = f"{_OLD_NAME.sub('petastorm.', _PYTHON_2.get(module, module))}.{name}"
        if path == "collections.OrderedDict":
            return dict
        if path in _ADMITTED:
            return type(name, (_Record,), {"path": path})  # A new class each time leaves a pickle none to tamper with.
        raise DatasetError(
            f"the pickled schema asks for {path!r}, which is no part of a schema: refused, nothing was run",
            hint="custom codecs cannot be read; if it is none of yours, do not trust the data set",
        )


def _fields(root: Any) -> tuple[UnischemaField, ...]:
    _, _, state = _opened(root, {_UNISCHEMA})
    return tuple(_field(field) for field in state["_fields"].values())


def _field(record: Any) -> UnischemaField:
    _, args, _ = _opened(record, {_FIELD})
    name, dtype, shape, codec = (*args, None)[:4]
    codec_path, _, state = _opened(codec, _CODECS) if codec is not None else ("", (), {})
    kind: Codec = _CODECS[codec_path] if codec_path else "plain"
    return UnischemaField(
        name=name,
        dtype=_dtype(dtype, name),
        shape=shape,
        codec=kind,
        image_format=_FORMATS[state["_image_codec"].lstrip(".").lower()] if kind == "image" else "",
    )


def _opened(record: Any, admitted: Container[str]) -> tuple[str, tuple[Any, ...], Any]:
    """Returns the class path, arguments and state of an object, in whichever way it was pickled.

    A `ValueError` refuses classes that are not admitted.
    """
    path, args = (record.path, record.args) if isinstance(record, _Record) else ("", ())
    if path == _RECONSTRUCTOR:
        cls, base, content = args
        path = cls.path
        args = content if base.path == "builtins.tuple" else ()
    elif path == _RESTORE:
        name, _, args = args
        path = _FIELD if name == "UnischemaField" else ""
    if path not in admitted:
        raise ValueError(f"there is {path or type(record).__name__} in the place of {admitted}")
    return path, args, record.state


def _dtype(value: Any, field: str) -> str:
    if isinstance(value, type) and issubclass(value, _Record) and value.path in _DTYPES:
        return _DTYPES[value.path]
    if isinstance(value, _Record) and value.path == _NUMPY_DTYPE:
        code = value.args[0]
        if isinstance(code, str) and re.fullmatch(r"[a-zA-Z]\d*", code):  # The code is that of a simple dtype: `f4`.
            return _DTYPES[f"numpy.{np.dtype(code).type.__name__}"]
    raise ValueError(f"the type of field {field!r} is none of NumPy's that Petastorm stores")
