"""Decodes the binary columns of Petastorm's codecs to NumPy arrays.

It unpickles nothing: arrays of Python objects are refused.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.base.imports import pillow
from sparktorch.data.petastorm.unischema import UnischemaField
from sparktorch.errors import ColumnError

__all__ = ["ARROW_TYPES", "decoded"]

Array = npt.NDArray[Any]

# Arrow types of decoded values. Spark has no unsigned integers and no float16: those become wider, uint64 int64.
ARROW_TYPES = {
    **{name: pa.type_for_alias(name) for name in ("bool", "int8", "int16", "int32", "int64", "float32", "float64")},
    **{"uint8": pa.int16(), "uint16": pa.int32(), "uint32": pa.int64(), "uint64": pa.int64(), "float16": pa.float32()},
    **{"str": pa.string(), "bytes": pa.binary()},
}
_NUMPY_NAMES = {"U": "str", "S": "bytes"}  # of types that have another width in each array


def decoded(column: pa.Array, field: UnischemaField, first_row: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Decodes the rows of a binary column that are not null.

    Returns their elements, row after row in C order, and each row's shape, int64 of shape `(rows, dimensions)`. A
    `ColumnError` names the row of a value that is broken, or not what the field says; `first_row` is that of the first.
    """
    if field.codec == "image":
        pillow()  # says if it is missing
    blobs = [(number, blob) for number, blob in enumerate(column.to_pylist(), first_row) if blob is not None]
    rows = [_row(blob, field, number) for number, blob in blobs]
    shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), len(field.shape))
    kind = ARROW_TYPES[field.dtype]
    if not rows:
        return pa.array([], kind), shapes
    values = np.concatenate([row.reshape(-1) for row in rows])
    if values.dtype.kind == "u":  # Arrow refuses what int64 does not hold
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    elif values.dtype.kind not in _NUMPY_NAMES:
        values = values.astype(kind.to_pandas_dtype(), copy=False)
    try:
        return pa.array(values, kind), shapes
    except pa.ArrowInvalid as error:
        raise ColumnError(
            f"{field.describe()} has values that Spark has no type for: {error}",
            hint="leave it out with columns=[...]",
            column=field.name,
        ) from error


def _row(blob: bytes, field: UnischemaField, number: int) -> Array:
    """Decodes one value, and compares its dtype and shape with those of the field."""
    try:
        found = _DECODE[field.codec](blob, field)
        name = _NUMPY_NAMES.get(found.dtype.kind, found.dtype.name)
        lengths = [size if wanted is None else wanted for size, wanted in zip(found.shape, field.shape, strict=False)]
        if name != field.dtype or found.ndim != len(field.shape) or list(found.shape) != lengths:
            raise ValueError(f"it is {name} of shape {found.shape}")
    except Exception as error:  # NumPy, zipfile, zlib and Pillow raise many types for corrupt data
        raise ColumnError(
            f"{field.describe()} has a row that cannot be decoded: {type(error).__name__}: {error}",
            column=field.name,
            row_of_partition=number,
        ) from None
    return found


def _npy(blob: bytes, field: UnischemaField) -> Array:
    found: Array = np.lib.format.read_array(io.BytesIO(blob), allow_pickle=False)
    return found


def _npz(blob: bytes, field: UnischemaField) -> Array:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return _npy(archive.read("arr.npy"), field)


def _image(blob: bytes, field: UnischemaField) -> Array:
    """Decodes an image: 8-bit RGB, 8-bit grayscale or 16-bit grayscale."""
    with pillow().open(io.BytesIO(blob), formats=(field.image_format,)) as image:
        mode, pixels = image.mode, np.asarray(image)
    if mode.startswith("I"):
        return pixels.astype(np.uint16)
    if mode not in ("L", "RGB"):
        raise ValueError(f"the image is of the mode {mode}")
    return pixels


_DECODE: dict[str, Callable[[bytes, UnischemaField], Array]] = {"ndarray": _npy, "compressed": _npz, "image": _image}
