"""The size to which images are resized where nobody has said one."""

from __future__ import annotations

import io
import statistics
from contextlib import suppress
from typing import Any

from pyspark.sql import DataFrame, Row

from sparktorch.base.imports import pillow
from sparktorch.spark.column_names import ColumnNames

__all__ = ["usual_size"]

_LOOKED_AT = 32  # So many images are read.
_MOST_PIXELS = 128  # Sides are not made longer than this.


def usual_size(dataset: DataFrame, column: str) -> tuple[int, int] | None:
    """Returns the median height and width of the first images, of at most 128 pixels; `None` if none can be read.

    Images of one size, as those of most data sets, have theirs in any partitioning.
    """
    images = ColumnNames.of(dataset).column(column)
    rows = dataset.select(images.alias("image")).where("image IS NOT NULL").limit(_LOOKED_AT).collect()
    sizes = [size for size in (_size_of(row.image) for row in rows) if size is not None]
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
    # Whatever cannot be read says no size; the ranks name it if it has to be read.
    with suppress(Exception), pillow().open(io.BytesIO(fields["content"])) as opened:
        return opened.height, opened.width
    return None
