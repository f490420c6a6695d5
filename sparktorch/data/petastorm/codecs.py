"""Decodes the binary columns of Petastorm's codecs to NumPy arrays.

It unpickles nothing: arrays of Python objects are refused.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparktorch.base.imports import pillow
from sparktorch.data.petastorm.unischema import UnischemaField
from sparktorch.errors import ColumnError

__all__ = ["ARROW_TYPES", "DECODE", "Blobs", "Place", "Values", "native"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# Arrow types of decoded values. Spark has no unsigned integers and no float16: those become wider, uint64 int64.
ARROW_TYPES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "uint8": pa.int16(),
    "int16": pa.int16(),
    "uint16": pa.int32(),
    "int32": pa.int32(),
    "uint32": pa.int64(),
    "int64": pa.int64(),
    "uint64": pa.int64(),
    "float16": pa.float32(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "str": pa.string(),
    "bytes": pa.binary(),
}


class Values(NamedTuple):
    """The elements of non-null rows, row after row in C order, and each row's shape, int64 `(rows, dimensions)`."""

    flat: Array
    shapes: npt.NDArray[np.int64]


class Place(NamedTuple):
    """The source of values, for checks and messages: their field, and int64 row numbers in the partition."""

    field: UnischemaField
    rows: npt.NDArray[np.int64]

    def error(self, index: int, what: str) -> ColumnError:
        """Returns the error for the value at `index`; `what` describes the problem."""
        return ColumnError(
            f"{self.field.describe()} has a row that cannot be decoded: {what}",
            column=self.field.name,
            row_of_partition=int(self.rows[index]),
        )

    def check(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Refuses a value whose dtype or shape is not that of the field."""
        wanted = self.field.shape
        fits = len(shape) == len(wanted) and all(
            size in (None, found) for size, found in zip(wanted, shape, strict=True)
        )
        name = {"U": "str", "S": "bytes"}.get(dtype.kind, dtype.name)
        if not fits or name != self.field.dtype:
            raise self.error(index, f"it is {name} of shape {shape}")


@dataclass(frozen=True)
class Blobs:
    """The binary values of a column that are not null: value i is `data[bounds[i]:bounds[i + 1]]`."""

    data: Bytes
    bounds: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: pa.Array, present: npt.NDArray[np.bool_]) -> Blobs:
        """Returns the non-null values of a binary column; copies their bytes only if there are nulls."""
        if column.null_count:
            column = column.filter(pa.array(present))
        if not len(column):
            return cls(np.empty(0, np.uint8), np.zeros(1, np.int64))
        wide = pa.types.is_large_binary(column.type)
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int64 if wide else np.int32)[column.offset :][: len(column) + 1]
        return cls(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8), bounds.astype(np.int64))

    @classmethod
    def joined(cls, parts: Sequence[bytes]) -> Blobs:
        """Returns values concatenated."""
        return cls(np.frombuffer(b"".join(parts), np.uint8), np.cumsum([0, *map(len, parts)]))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[start:end].tobytes() for start, end in pairwise(self.bounds))


class _Header(NamedTuple):
    """The header of a `.npy` file; `size` is its length in bytes."""

    size: int
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    def array(self, data: Bytes, rows: int) -> Array:
        """Returns the contiguous contents of `rows` files as one array of shape `(rows, *shape)`."""
        if not self.dtype.itemsize:  # empty strings
            return np.zeros((rows, *self.shape), self.dtype)
        shape = self.shape[::-1] if self.fortran else self.shape
        values: Array = data.view(self.dtype).reshape(rows, *shape)
        return values.transpose(0, *range(len(shape), 0, -1)) if self.fortran else values


@lru_cache(maxsize=1024)
def _header(head: bytes) -> _Header:
    stream = io.BytesIO(head)
    stream.seek(8)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    return _Header(len(head), shape, fortran, dtype)


def _decode_ndarrays(blobs: Blobs, place: Place) -> Values:
    """Decodes `.npy` files: all at once if they have the same header and length, otherwise one by one."""
    if not len(blobs):
        return _nothing(place.field)
    head = _head(blobs, 0, place)
    lengths = np.diff(blobs.bounds)
    if (lengths == lengths[0]).all():
        files = blobs.data[blobs.bounds[0] : blobs.bounds[-1]].reshape(len(blobs), -1)
        if (files[:, : head.size] == files[0, : head.size]).all():
            content = np.ascontiguousarray(files[:, head.size :])
            return Values(head.array(content, len(blobs)).reshape(-1), np.tile(_sizes(head.shape), (len(blobs), 1)))
    parts, shapes = [], []
    for index in range(len(blobs)):
        head = _head(blobs, index, place)
        content = blobs.data[blobs.bounds[index] + head.size : blobs.bounds[index + 1]]
        # An odd offset would leave the view unaligned; a copy is aligned.
        parts.append(head.array(content.copy(), 1).reshape(-1))
        shapes.append(head.shape)
    return Values(np.concatenate(parts), np.array(shapes, np.int64).reshape(len(shapes), -1))


def _head(blobs: Blobs, index: int, place: Place) -> _Header:
    """Returns the header of one `.npy` file, or refuses it if corrupt, or not that of the field and file length."""
    start, end = blobs.bounds[index : index + 2]
    lead = blobs.data[start : min(start + 10, end)].tobytes()
    if len(lead) < 10 or lead[:7] != b"\x93NUMPY\x01":
        raise place.error(index, "it is no .npy file")
    size = 10 + int.from_bytes(lead[8:], "little")
    try:
        head = _header(blobs.data[start : min(start + size, end)].tobytes())
    except Exception as error:  # NumPy parses headers as Python, which can fail in many ways
        raise place.error(index, f"{type(error).__name__}: {error}") from None
    place.check(index, head.dtype, head.shape)
    if end - start - head.size != math.prod(head.shape) * head.dtype.itemsize:
        raise place.error(index, f"its {end - start - head.size} bytes do not make shape {head.shape}")
    return head


def _decode_compressed(blobs: Blobs, place: Place) -> Values:
    return _decode_ndarrays(Blobs.joined([_inflated(blob, index, place) for index, blob in enumerate(blobs)]), place)


def _inflated(blob: bytes, index: int, place: Place) -> bytes:
    """Returns the `.npy` file in a `.npz` file."""
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            return archive.read("arr.npy")
    except Exception as error:  # zipfile and zlib raise many types for corrupt data
        raise place.error(index, f"{type(error).__name__}: {error}") from None


def _decode_images(blobs: Blobs, place: Place) -> Values:
    if not len(blobs):
        return _nothing(place.field)
    images = [_pixels(blob, index, place) for index, blob in enumerate(blobs)]
    flat = np.concatenate([pixels.reshape(-1) for pixels in images])
    return Values(flat, np.array([pixels.shape for pixels in images], np.int64))


def _pixels(blob: bytes, index: int, place: Place) -> Array:
    """Decodes an image: 8-bit RGB, 8-bit grayscale or 16-bit grayscale."""
    images = pillow()
    try:
        with images.open(io.BytesIO(blob), formats=(place.field.image_format,)) as image:
            mode, pixels = image.mode, np.asarray(image)
    except images.UnidentifiedImageError:
        raise place.error(index, f"it is no {place.field.image_format} image") from None
    except Exception as error:  # Pillow's errors, and those of the libraries below it
        raise place.error(index, f"{type(error).__name__}: {error}") from None
    if mode not in ("L", "RGB") and not mode.startswith("I"):
        raise place.error(index, f"the image is of the mode {mode}")
    pixels = pixels.astype(np.uint16) if mode.startswith("I") else pixels
    place.check(index, pixels.dtype, pixels.shape)
    return pixels


DECODE: dict[str, Callable[[Blobs, Place], Values]] = {
    "ndarray": _decode_ndarrays,
    "compressed": _decode_compressed,
    "image": _decode_images,
}


def _nothing(field: UnischemaField) -> Values:
    dtype = {"str": "U1", "bytes": "S1"}.get(field.dtype, field.dtype)
    return Values(np.empty(0, dtype), np.empty((0, len(field.shape)), np.int64))


def _sizes(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(shape, np.int64)


def native(values: Array, place: Place) -> Array:
    """Returns the values in the dtype of their Arrow type: native byte order, uint64 as int64, float16 as float32.

    A `ColumnError` refuses a uint64 value above 2**63 - 1.
    """
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        if (values > np.uint64(2**63 - 1)).any():
            raise ColumnError(
                f"{place.field.describe()} has values beyond 2**63 - 1, which Spark has no type for",
                hint="leave it out with columns=[...]",
                column=place.field.name,
            )
        return values.astype(np.int64)
    if values.dtype.kind in "US":
        return values
    wider = ARROW_TYPES[place.field.dtype].to_pandas_dtype()
    return values.astype(wider, copy=False)
