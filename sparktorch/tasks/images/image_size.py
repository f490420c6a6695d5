"""The size to which images are resized if the user has not set one."""

from __future__ import annotations

import io
import statistics
from contextlib import suppress
from typing import Any

from pyspark.sql import DataFrame, Row

from sparktorch.base.imports import pillow
from sparktorch.spark.column_names import ColumnNames

__all__ = ["usual_size"]

_IMAGES_READ = 32  # This number of images is read.
_MOST_PIXELS = 128  # No side is longer than this.


def usual_size(dataset: DataFrame, column: str) -> tuple[int, int] | None:
    """Returns the median height and width of the first images, scaled down to at most 128 pixels.

    It returns `None` if no image can be read. Which images are first depends on the partitioning, but in most data sets
    all images have one size.
    """
    images = ColumnNames.of(dataset).column(column)
    rows = dataset.select(images.alias("image")).where("image IS NOT NULL").limit(_IMAGES_READ).collect()
    sizes = [size for row in rows if (size := _size_of(row.image)) is not None]
    if not sizes:
        return None
    height, width = (statistics.median_low(side) for side in zip(*sizes, strict=True))
    scale = min(1.0, _MOST_PIXELS / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _size_of(image: Any) -> tuple[int, int] | None:
    """Returns height and width of a file's bytes, or of a row of Spark's `binaryFile` or `image` source."""
    fields = image.asDict() if isinstance(image, Row) else {"content": image}
    height, width = fields.get("height") or 0, fields.get("width") or 0
    if min(height, width) > 0:
        return height, width
    # An image that cannot be read has no size here. If the training reads it, the ranks name it in their error.
    with suppress(Exception), pillow().open(io.BytesIO(fields["content"])) as opened:
        return opened.height, opened.width
    return None
