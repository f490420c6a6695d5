"""The size of an image by its row or file; and that of the network, which only the column of images has."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image
from pyspark.sql import Row

from sparktorch import ImageClassifier
from sparktorch.errors import ConfigError
from sparktorch.tasks.images.image_size import _size_of


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("L", (12, 10)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (picture(), (10, 12)),
        (Row(content=picture()), (10, 12)),
        (Row(height=5, width=7, data=b""), (5, 7)),
        (Row(height=None, width=7, data=b""), None),
        (Row(height=5, width=None, data=b""), None),
        (b"no image", None),
    ],
)
def test_an_image_says_its_size_and_one_that_cannot_be_read_says_none(image: Any, size: Any) -> None:
    assert _size_of(image) == size


def test_an_image_that_pillow_refuses_for_its_size_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert _size_of(picture()) is None


def test_a_shape_of_a_column_that_is_not_that_of_the_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="inputShapes names 'image', and the column of images is 'photo'"):
        ImageClassifier(imageCol="photo", inputShapes={"image": [3, 96, 96]}).completed()
    shaped = ImageClassifier(imageCol="photo", inputShapes={"photo": [3, 96, 96]}).completed()
    assert shaped.completed().getModuleParams()["shape"] == [3, 96, 96]
