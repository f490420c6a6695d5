"""Decodes the binary columns of Petastorm's codecs to NumPy arrays.

It unpickles nothing: arrays of Python objects are refused.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import lru_cache
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
    kind, files = ARROW_TYPES[field.dtype], column.drop_null().cast(pa.large_binary())
    if not len(files):
        return pa.array([], kind), np.empty((0, len(field.shape)), np.int64)
    numbers = first_row + np.flatnonzero(column.is_valid())
    first = _row(files[0].as_py(), field, numbers[0])
    values = _alike(files, first) if field.codec == "ndarray" else None
    if values is not None:
        shapes = np.tile(np.array(first.shape, np.int64), (len(files), 1))
    else:
        rows = [_row(file, field, number) for number, file in zip(numbers, files.to_pylist(), strict=True)]
        values = np.concatenate([row.reshape(-1) for row in rows])
        shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), len(field.shape))
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


def _row(blob: bytes, field: UnischemaField, number: np.int64) -> Array:
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
            row_of_partition=int(number),
        ) from None
    return found


def _alike(files: pa.LargeBinaryArray, first: Array) -> Array | None:
    """Returns the elements of `.npy` files at once if all have the first one's header and length, else `None`."""
    _, offsets, data = files.buffers()
    bounds = np.frombuffer(offsets, np.int64)[files.offset :][: len(files) + 1]
    if not first.nbytes or not first.flags.c_contiguous or np.ptp(np.diff(bounds)):
        return None
    content = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(len(files), -1)
    header = content.shape[1] - first.nbytes
    if (content[:, :header] != content[0, :header]).any():
        return None
    return np.ascontiguousarray(content[:, header:]).reshape(-1).view(first.dtype)


def _npy(blob: bytes, field: UnischemaField) -> Array:
    size = 10 + int.from_bytes(blob[8:10], "little")  # of a header of version 1, which Petastorm writes
    shape, fortran, dtype = _header(blob[:size])
    if not dtype.itemsize:  # empty strings
        return np.zeros(shape, dtype)
    return np.frombuffer(blob, dtype, offset=size).reshape(shape, order="F" if fortran else "C")


@lru_cache(maxsize=1024)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Returns the shape, the order and the dtype of a `.npy` file; NumPy takes longer for a header than for values."""
    stream = io.BytesIO(header)
    np.lib.format.read_magic(stream)
    return np.lib.format.read_array_header_1_0(stream)


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
