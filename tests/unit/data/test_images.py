"""Images: what Pillow decodes is what `forward` gets, whichever way a row arrived."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from sparktorch.data.columns import TensorSpec
from sparktorch.data.fields.images import Images
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError, ConfigError

HEIGHT, WIDTH = 5, 7
STRUCT = pa.struct({"height": pa.int32(), "width": pa.int32(), "nChannels": pa.int32(), "data": pa.binary()})

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (4, HEIGHT, WIDTH, 3), dtype=np.uint8)


def spec_of(**more: Any) -> TensorSpec:
    form = {"name": "x0", "column": "photo", "dtype": "uint8", "kind": "binary", "layout": "image"}
    return TensorSpec(**{**form, "shape": (HEIGHT, WIDTH, 3), **more})


def encoded(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, kind)
    return file.getvalue()


def as_struct(pixels: np.ndarray) -> dict[str, Any]:
    """What Spark's `image` source makes of it: blue first."""
    height, width, channels = pixels.shape
    data = np.ascontiguousarray(pixels[:, :, [2, 1, 0, 3][:channels]] if channels > 1 else pixels).tobytes()
    return {"height": height, "width": width, "nChannels": channels, "data": data}


def taken(spec: TensorSpec, column: pa.Array, index: list[int] | None = None) -> torch.Tensor:
    field = Images(spec, RowStorage())
    field.append(column)
    field.finish()
    (images,) = field.take(torch.arange(len(column)) if index is None else torch.tensor(index))
    return images


def test_rows_are_decoded_in_the_order_asked_for() -> None:
    column = pa.array([encoded(pixels) for pixels in PIXELS], pa.binary())
    index = [3, 0, 3, 1]
    images = taken(spec_of(), column, index)
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), PIXELS[index])
    sliced = pa.concat_arrays([column, column]).slice(2, 3)
    assert np.array_equal(taken(spec_of(), sliced).numpy(), PIXELS[[2, 3, 0]])


def test_channels_come_first_as_float_or_as_the_shape_says() -> None:
    column = pa.array([encoded(pixels) for pixels in PIXELS], pa.binary())
    images = taken(spec_of(shape=(3, HEIGHT, WIDTH), dtype="float32"), column)
    assert images.is_contiguous()
    assert torch.equal(images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255)
    grey = taken(spec_of(shape=(1, HEIGHT, WIDTH)), column)
    assert np.array_equal(grey[0, 0].numpy(), np.asarray(Image.fromarray(PIXELS[0]).convert("L")))
    assert taken(spec_of(shape=(4, HEIGHT, WIDTH)), column)[0, 3].unique().tolist() == [255]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_of_the_image_source_are_those_of_the_file(channels: int) -> None:
    pixels = DRAW.integers(0, 256, (HEIGHT, WIDTH, channels), dtype=np.uint8)
    images = taken(spec_of(shape=(HEIGHT, WIDTH, channels)), pa.array([as_struct(pixels)], STRUCT))
    assert np.array_equal(images[0].numpy(), pixels)


def test_other_sizes_are_resized_where_a_size_was_asked_for() -> None:
    large = np.asarray(Image.fromarray(PIXELS[0]).resize((70, 50)))
    rows = [encoded(large, "JPEG"), encoded(large), encoded(PIXELS[0])]
    images = taken(spec_of(resize=True), pa.array(rows, pa.binary())).float()
    expected = torch.from_numpy(np.array(Image.fromarray(large).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)))
    assert torch.equal(images[1], expected.float())
    assert (images[0] - expected).abs().mean() < 30  # another file format, and decoded at a smaller scale
    assert torch.equal(images[2], torch.from_numpy(PIXELS[0]).float())


def test_a_missing_image_is_filled() -> None:
    column = pa.array([None, encoded(PIXELS[0])], pa.binary())
    images = taken(spec_of(fill=9), column)
    assert images[0].unique().tolist() == [9]
    assert np.array_equal(images[1].numpy(), PIXELS[0])
    bright = taken(spec_of(fill=0.25, dtype="float32", shape=(3, HEIGHT, WIDTH)), column)
    assert bright[0].unique().tolist() == [0.25]
    assert torch.equal(bright[1], torch.from_numpy(PIXELS[0]).permute(2, 0, 1) / 255)
    structs = pa.array([as_struct(PIXELS[0]), None, {**as_struct(PIXELS[0]), "data": None}], STRUCT)
    assert [int(image.max()) for image in taken(spec_of(fill=3), structs)[1:]] == [3, 3]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([encoded(PIXELS[0]), b"no image"], pa.binary()), "it is neither JPEG nor PNG"),
        (pa.array([encoded(PIXELS[0]), encoded(PIXELS[0], "BMP")], pa.binary()), "it is neither JPEG nor PNG"),
        (pa.array([encoded(PIXELS[0]), encoded(PIXELS[0][:4])], pa.binary()), "is 4 x 7 pixels, the first is 5 x 7"),
        (pa.array([encoded(PIXELS[0]), encoded(PIXELS[0], mode="I;16")], pa.binary()), "its mode is I;16"),
        (pa.array([as_struct(PIXELS[0]), {**as_struct(PIXELS[0]), "height": 9}], STRUCT), "105 bytes for 9 x 7 pixels"),
    ],
)
def test_what_is_no_image_is_named_before_training(column: pa.Array, message: str) -> None:
    with pytest.raises(ColumnError) as caught:
        Images(spec_of(), RowStorage()).append(column, first_row=40)
    assert message in caught.value.what
    assert caught.value.where == {"column": "photo", "row": 41}
    assert caught.value.hint


def test_a_file_that_breaks_off_is_an_error_when_it_is_decoded() -> None:
    noise = DRAW.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    broken = encoded(noise, "JPEG")[:2000]
    with pytest.raises(ColumnError, match="an image of column 'photo' cannot be decoded: image file is truncated"):
        taken(spec_of(shape=(64, 64, 3)), pa.array([broken], pa.binary()))


def test_without_pillow_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"Pillow, which is not installed(.|\n)*\[images\]"):
        Images(spec_of(), RowStorage()).append(pa.array([b"x"], pa.binary()))
