"""Decodes Petastorm data sets without the petastorm package: encoded Arrow columns in, ordinary columns out.

It unpickles nothing: arrays of Python objects are refused.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sparktorch.adapters.petastorm.unischema import UnischemaField, read_unischema
from sparktorch.base.imports import pillow
from sparktorch.data.columns import KEY, VALIDATION, Columns
from sparktorch.errors import ColumnError, DatasetError

__all__ = ["ARROW_TYPES", "SHAPE_SUFFIX", "Decoder", "Layout", "reader_batches", "schema_in"]

Array = npt.NDArray[Any]
Layout = Literal["nested", "flat"]

# Arrow types of decoded values. Spark has no unsigned integers and no float16: those become wider, uint64 int64.
ARROW_TYPES = {
    **{name: pa.type_for_alias(name) for name in ("bool", "int8", "int16", "int32", "int64", "float32", "float64")},
    **{"uint8": pa.int16(), "uint16": pa.int32(), "uint32": pa.int64(), "uint64": pa.int64(), "float16": pa.float32()},
    **{"str": pa.string(), "bytes": pa.binary()},
}
_NUMPY_NAMES = {"U": "str", "S": "bytes"}  # These types have another width in each array.

SHAPE_SUFFIX = "_shape"

_UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
_FIRST_ROWS = 64


def schema_in(common_metadata: bytes) -> tuple[tuple[UnischemaField, ...], frozenset[str]]:
    """Returns all fields of a data set, in the order of the Unischema, and the names of its files' columns.

    `common_metadata` is the content of `_common_metadata`. A field without such a column is a partition column. A
    `DatasetError` says that there is no Unischema, or one that `read_unischema` refuses.
    """
    try:
        metadata = pq.read_metadata(pa.BufferReader(common_metadata))
    except pa.ArrowException as error:
        raise DatasetError(f"_common_metadata is no Parquet file: {error}") from None
    pickled = (metadata.metadata or {}).get(_UNISCHEMA_KEY)
    if pickled is None:
        raise DatasetError(
            "_common_metadata holds no Unischema",
            hint="a data set that Petastorm has not written is read with spark.read.parquet",
        )
    return read_unischema(pickled), frozenset(metadata.schema.to_arrow_schema().names)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Decodes the record batches of a data set; `mapInArrow` calls it on the executors.

    Attributes:
        encoded: Fields to decode; other columns pass unchanged.
        layout: `nested` makes lists, nested once per dimension. `flat` makes one list of all values in C order; a shape
            of several dimensions, one of them `None`, adds a column `NAME_shape`.
        batch_bytes: Approximate size of a decoded batch in bytes; a batch has at least one row.
    """

    encoded: tuple[UnischemaField, ...]
    layout: Layout = "nested"
    batch_bytes: int = 32 << 20

    def check(self) -> None:
        """Refuses fields that cannot be decoded, with a `DatasetError`; reads no rows."""
        for field in self.encoded:
            colours = field.codec == "image" and len(field.shape) == 3
            if field.dtype not in ARROW_TYPES or (colours and field.dtype == "uint16"):
                what = "is of 16-bit colours, which Pillow reads as 8-bit ones" if colours else "cannot become a column"
                hint = "read it undecoded with undecoded=[...], or leave it out with columns=[...]"
                raise DatasetError(f"{field.describe()} {what}", hint=hint, field=field.name)

    def columns(self, field: UnischemaField) -> dict[str, pa.DataType]:
        """Returns the Arrow types of the columns that a field becomes, by column name."""
        kind = ARROW_TYPES[field.dtype]
        if not field.shape:
            return {field.name: kind}
        if self.layout == "nested":
            for _ in field.shape:
                kind = pa.list_(kind)
            return {field.name: kind}
        return {field.name: pa.list_(kind)} | (
            {field.name + SHAPE_SUFFIX: pa.list_(pa.int32())} if len(field.shape) > 1 and None in field.shape else {}
        )

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields decoded batches of about `batch_bytes`; a `ColumnError` names column and row of a corrupt value."""
        first_row, rows = 0, _FIRST_ROWS
        for batch in batches:
            start = 0
            while start < batch.num_rows:
                decoded = self._decode(batch.slice(start, rows), first_row)
                start += decoded.num_rows
                first_row += decoded.num_rows
                rows = max(1, self.batch_bytes * decoded.num_rows // max(1, decoded.nbytes))
                yield decoded

    def _decode(self, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        fields = {field.name: field for field in self.encoded}
        columns: dict[str, pa.Array] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns |= self._column(column, fields[name], first_row) if name in fields else {name: column}
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _column(self, column: pa.Array, field: UnischemaField, first_row: int) -> dict[str, pa.Array]:
        present = column.is_valid().to_numpy(zero_copy_only=False)
        flat, shapes = _decoded(column, field, first_row)
        if not field.shape:
            return {field.name: flat.take(pa.array(np.cumsum(present) - 1, mask=~present))}
        if self.layout == "nested":
            for axis in range(len(field.shape) - 1, 0, -1):
                flat = _lists(flat, np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1)), None)
            return {field.name: _lists(flat, shapes[:, 0], present)}
        columns = {field.name: _lists(flat, shapes.prod(axis=1), present)}
        if len(self.columns(field)) > 1:
            sizes = pa.array(shapes.reshape(-1), pa.int32())
            columns[field.name + SHAPE_SUFFIX] = _lists(sizes, np.full(len(shapes), shapes.shape[1]), present)
        return columns


def _lists(values: pa.Array, lengths: npt.NDArray[np.int64], present: npt.NDArray[np.bool_] | None) -> pa.ListArray:
    """Returns lists of `lengths` values where `present` is true (`None`: everywhere), and nulls elsewhere."""
    if present is not None:
        spread = np.zeros(len(present), np.int64)
        spread[present] = lengths
        lengths = spread
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert offsets[-1] <= np.iinfo(np.int32).max, "a batch has about `batch_bytes`"
    mask = None if present is None or present.all() else np.append(~present, False)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32), mask=mask), values)


def _decoded(column: pa.Array, field: UnischemaField, first_row: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Decodes the rows of a binary column that are not null.

    Returns their elements, row after row in C order, and each row's shape, int64 of shape `(rows, dimensions)`. A
    `ColumnError` names the row of a value that is broken, or not what the field says; `first_row` is that of the first.
    """
    if field.codec == "image":
        pillow()  # It says whether Pillow is missing.
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
    if values.dtype.kind == "u":  # Arrow refuses what int64 does not hold.
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
        value = _DECODE[field.codec](blob, field)
        name = _NUMPY_NAMES.get(value.dtype.kind, value.dtype.name)
        fits = [size in (None, length) for length, size in zip(value.shape, field.shape, strict=False)]
        if name != field.dtype or value.ndim != len(field.shape) or not all(fits):
            raise ValueError(f"it is {name} of shape {value.shape}")
    except Exception as error:  # NumPy, zipfile, zlib and Pillow raise many types for corrupt data.
        raise ColumnError(
            f"{field.describe()} has a row that cannot be decoded: {type(error).__name__}: {error}",
            column=field.name,
            row_of_partition=int(number),
        ) from None
    return value


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
    size = 10 + int.from_bytes(blob[8:10], "little")  # Petastorm writes headers of version 1.
    shape, fortran, dtype = _header(blob[:size])
    if not dtype.itemsize:  # All strings are empty.
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


def reader_batches(reader: Iterable[Any], columns: Columns, *, key: str) -> Iterator[pa.RecordBatch]:
    """Converts the batches of Petastorm's readers and loaders to record batches for `worker.train_partition`.

    Args:
        reader: Iterable of batches by column: the named tuples of `make_batch_reader`, or the dictionaries of the
            loader that `SparkDatasetConverter.make_torch_dataloader` opens.
        columns: Which columns become which tensors.
        key: Name of the int64 column with the row keys, which identify and order rows, for example Spark's `xxhash64`
            of the other columns.
    """
    names = {spec.name: spec.column for spec in columns.tensors}
    names |= {VALIDATION: columns.validation} if columns.validation else {}
    for batch in reader:
        by_name = batch._asdict() if hasattr(batch, "_asdict") else batch
        arrays = {wire: _rows(by_name[name]) for wire, name in names.items()}
        arrays[KEY] = _rows(by_name[key])
        yield pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _rows(values: Any) -> pa.Array:
    """Converts a tensor, an array, or an array of arrays to an Arrow column."""
    array = np.asarray(values)
    if array.dtype == object:
        return pa.array(list(array))
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return flat if array.ndim == 1 else _lists(flat, np.full(len(array), math.prod(array.shape[1:])), None)
