"""Images, which are stored as the bytes that arrive, and decoded by Pillow when rows are taken."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparktorch.base.devices import upload
from sparktorch.base.imports import pillow
from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import byte_rows
from sparktorch.data.fields.base import Elements, ElementSpool, Field
from sparktorch.data.sampling.row_keys import RowDigests
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError

__all__ = ["Images", "black_image", "image_size"]

_FORMATS = ("JPEG", "PNG")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_DEEP = ("I", "F")  # Modes of more than 8 bits a channel begin with these.
# These stand in place of the size, which only images that Spark has decoded have.
_ENCODED = 0
_NULL = -1

Pixels = npt.NDArray[np.uint8]


class Images(Field):
    """Encoded images, and images that Spark's `image` source has decoded: one tensor of shape `(rows, *spec.shape)`.

    The channels are the first axis of `spec.shape` if its size is 1, 3 or 4, otherwise the last.

    Attributes:
        files: The bytes of each image: a file, or pixels.
        dims: Height, width and number of channels of each image of pixels, int32 of shape `(rows, 3)`; `_ENCODED` for a
            file, and `_NULL` for a null.
    """

    decodes = True
    files: Elements
    dims: torch.Tensor

    def __init__(self, spec: TensorSpec, storage: RowStorage) -> None:
        """Creates an empty field."""
        self._bytes = ElementSpool(np.uint8, storage)
        self._sizes = storage.spool(np.int32, (3,))
        super().__init__(spec, files=self._bytes, dims=self._sizes)
        self._channels_first, self._shape = _axes(spec)
        # The threads start with the first step, and end with this field and the fields that `read` returned.
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()), "sparktorch-decode")

    def append(self, column: pa.Array, *, first_row: int = 0, digests: RowDigests | None = None) -> None:
        """Checks the size of each image and stores the rows; see `Field.append`."""
        sizes = np.full((len(column), 3), _ENCODED, np.int32)
        content = column
        if pa.types.is_struct(column.type):
            content = pc.struct_field(column, "data")  # It is null where the struct is, too.
            for axis, name in enumerate(("height", "width", "nChannels")):
                sizes[:, axis] = column.field(name).fill_null(_ENCODED).to_numpy()
        valid = content.is_valid().to_numpy(zero_copy_only=False)
        sizes[~valid] = _NULL
        offsets, data = byte_rows(content.fill_null(b"") if content.null_count else content)
        lengths = np.diff(offsets)
        for row in np.flatnonzero(valid):
            self._check(data[offsets[row] : offsets[row + 1]], sizes[row], first_row + int(row))
        self._bytes.append(data, lengths)
        self._sizes.append(sizes)

    def take(self, index: torch.Tensor, device_index: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Returns one tensor of shape `(rows, *spec.shape)`: uint8, or float32 between 0 and 1.

        Images are decoded on the CPU and copied to the device as uint8.
        """
        rows = index.tolist()
        pixels = np.empty((len(rows), *self._shape), np.uint8)
        null = (self.dims[index] == _NULL).all(dim=1)

        def decode(number: int) -> None:
            pixels[number] = 0 if null[number] else self._pixels(rows[number])

        threads = min(torch.get_num_threads(), len(rows))
        if threads > 1:  # Pillow releases the GIL while it decodes.
            list(self._pool.map(decode, range(len(rows))))
        else:
            for number in range(len(rows)):
                decode(number)
        images = upload(torch.from_numpy(pixels), self._device)
        if self._channels_first:
            images = images.permute(0, 3, 1, 2).contiguous()
        if self._spec.dtype != "uint8":
            images = images.to(torch.float32).div_(255)
        if null.any():
            assert self._spec.fill is not None
            images[null.to(self._device)] = self._spec.fill
        return (images,)

    def _pixels(self, row: int) -> Any:
        """Returns the decoded image of a row, uint8 of shape `(height, width, channels)`."""
        start = int(self.files.starts[row])
        data: Pixels = self.files.values.numpy()[start : start + int(self.files.lengths[row])]
        height, width, channels = self._shape
        try:
            image = _opened(data, self.dims[row].numpy())
            if self._spec.resize and image.format == "JPEG":
                # The JPEG decoder scales down to about this size, which is faster than to resize all pixels.
                image.draft(None, (width, height))
            image = image.convert(_MODES[channels])
            if image.size != (width, height):
                image = image.resize((width, height), pillow().Resampling.BILINEAR)
        except Exception as error:  # Pillow raises many types for corrupt files.
            raise ColumnError(
                f"an image of column {self._spec.column!r} cannot be decoded: {error}",
                hint="leave broken files out: open them in a UDF before fit",
                column=self._spec.column,
                code="ST-IMAGE",
            ) from error
        return np.asarray(image).reshape(self._shape)

    def _check(self, data: Pixels, size: npt.NDArray[np.int32], row: int) -> None:
        """Checks that the bytes of a row are an image of the right size."""
        if not size.any():
            shape = image_size(data, self._spec, row=row)
        elif size.prod() != len(data) or int(size[2]) not in _MODES:
            why = f"{len(data)} bytes for {size[0]} x {size[1]} pixels of {size[2]} channels"
            raise _no_image(self._spec, row, why)
        else:
            shape = int(size[0]), int(size[1])
        if not self._spec.resize and shape != self._shape[:2]:
            raise ColumnError(
                f"an image of column {self._spec.column!r} is {shape[0]} x {shape[1]} pixels, the first is "
                f"{self._shape[0]} x {self._shape[1]}",
                hint=f"set inputShapes={{{self._spec.column!r}: {list(self._spec.shape)}}} to have all resized",
                column=self._spec.column,
                row=row,
                code="ST-IMAGE",
            )


def image_size(data: bytes | Pixels, spec: TensorSpec, *, row: int = 0) -> tuple[int, int]:
    """Returns height and width of a JPEG or PNG file in pixels, from its header.

    A `ColumnError` refuses other data, and more than 8 bits per channel.
    """
    why = "it is neither JPEG nor PNG"
    with suppress(OSError), pillow().open(_file(data), formats=_FORMATS) as image:
        if not image.mode.startswith(_DEEP):
            return image.height, image.width
        why = f"its mode is {image.mode}, more than 8 bits a channel"
    raise _no_image(spec, row, why)


def black_image(spec: TensorSpec) -> bytes:
    """Returns a black PNG file of the size of a column's images."""
    height, width, channels = _axes(spec)[1]
    file = io.BytesIO()
    pillow().new(_MODES[channels], (width, height)).save(file, "PNG")
    return file.getvalue()


def _axes(spec: TensorSpec) -> tuple[bool, tuple[int, int, int]]:
    """Returns whether the channels come first, and an image's height, width and number of channels."""
    if spec.shape[0] in _MODES:
        channels, height, width = spec.shape
        return True, (height, width, channels)
    height, width, channels = spec.shape
    return False, (height, width, channels)


def _opened(data: Pixels, size: npt.NDArray[np.int32]) -> Any:
    """Returns the Pillow image of a file, or of the pixels that Spark's `image` source decoded."""
    if not size.any():
        return pillow().open(_file(data), formats=_FORMATS)
    pixels = data.reshape(size)
    if size[2] == 1:
        return pillow().fromarray(pixels[:, :, 0])
    order = [2, 1, 0, 3][: size[2]]  # Spark has the channels in the order of OpenCV: blue, green, red.
    return pillow().fromarray(np.ascontiguousarray(pixels[:, :, order]))


def _file(data: bytes | Pixels) -> Any:
    """Returns bytes as a file object, without a copy."""
    return pa.BufferReader(pa.py_buffer(data))


def _no_image(spec: TensorSpec, row: int, why: str) -> ColumnError:
    """Returns the error about a row that is no image."""
    return ColumnError(
        f"a row of column {spec.column!r} is no image that can be decoded: {why}",
        hint="images are JPEG or PNG files, or come from Spark's image source, with 8 bits a channel",
        column=spec.column,
        row=row,
        code="ST-IMAGE",
    )
