"""What is learned of a table's columns, as a `preprocess` that makes tensors of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparktorch.tasks.shared.columns import FIRST_CATEGORY, as_doubles, category_indices

__all__ = ["BINS", "TableColumns", "scaled_edges"]

BINS = 48  # A column of numbers has so many at most.
_LEAST_WIDTH = 1e-5  # Narrower bins are left out.
# Parts of a time, and the categories of each. Dates have no hour.
_PARTS: dict[str, tuple[Any, list[int]]] = {
    "month": (pc.month, list(range(1, 13))),
    "weekday": (pc.day_of_week, list(range(7))),
    "hour": (pc.hour, list(range(24))),
}


@dataclass(frozen=True)
class TableColumns:
    """A `preprocess` that makes two tensors of the columns of a table: `categories` and `numbers`.

    Attributes:
        categories: Known categories by column. Index 0 is any other one, 1 is null, and 2 the first known one.
        times: Parts by column of dates or timestamps, "month", "weekday" (0 is Monday) and "hour", in UTC.
        numbers: Centre and scale by column: of numbers, or of dates and timestamps in seconds since 1970, in UTC. Nulls
            and NaN become 0, the centre; so does a column of scale 0, which was the same in all rows that trained.
        missing: Columns of `numbers` of which another column says where they are null or NaN.
        bound: The value that scaled numbers come near, and do not exceed, as far as they are from their centre; 0 for
            none.
    """

    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    times: Mapping[str, Sequence[str]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    bound: float = 0.0
    takes_nulls: ClassVar[bool] = True

    @property
    def vocabulary(self) -> dict[str, list[Any]]:
        """The categories of each column of the tensor `categories`, from index 2 on; a time's part is `time.part`."""
        parts = {f"{name}.{part}": _PARTS[part][1] for name, parts in self.times.items() for part in parts}
        return {name: list(values) for name, values in {**self.categories, **parts}.items()}

    @property
    def cardinalities(self) -> list[int]:
        """Number of indices of each column of the tensor `categories`."""
        parts = [_PARTS[part][1] for parts in self.times.values() for part in parts]
        return [FIRST_CATEGORY + len(values) for values in (*self.categories.values(), *parts)]

    @property
    def width(self) -> int:
        """Number of columns of the tensor `numbers`."""
        return len(self.numbers) + len(self.missing)

    def __call__(
        self, columns: Mapping[str, pa.Array], *, epoch: int | None, generator: Any
    ) -> dict[str, torch.Tensor]:
        """Returns `categories`, int64 of shape `(rows, columns)`, and `numbers`, float32 of shape `(rows, columns)`."""
        indices = [category_indices(columns[name], values) for name, values in self.categories.items()]
        for name, parts in self.times.items():
            instants = columns[name].cast(pa.timestamp("us"))
            indices += [category_indices(_PARTS[part][0](instants), _PARTS[part][1]) for part in parts]
        rows = len(next(iter(columns.values())))
        values = _stacked([as_doubles(columns[name]) for name in self.numbers], rows, np.float64).numpy()
        numbers = [*_scaled(values, list(self.numbers.values()), self.bound).T]
        numbers += [pc.is_null(columns[name], nan_is_null=True).to_numpy(zero_copy_only=False) for name in self.missing]
        return {"categories": _stacked(indices, rows, np.int64), "numbers": _stacked(numbers, rows, np.float32)}


def _scaled(
    values: npt.NDArray[np.float64], centres_and_scales: Sequence[Sequence[float]], bound: float
) -> npt.NDArray[np.float64]:
    """Returns columns less their centres in units of their scales, and 0 for NaN and in columns of scale 0.

    With a bound, the scaled value z becomes z / sqrt(1 + (z / bound)^2), the smooth clipping of RealMLP (arXiv
    2407.04491). It is about z where that is small, and keeps outliers apart from each other.
    """
    centres, scales = np.array(centres_and_scales, np.float64).reshape(-1, 2).T
    units = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    scaled: npt.NDArray[np.float64] = np.nan_to_num((values - centres) * units, nan=0.0)
    if bound:
        scaled /= np.hypot(1.0, scaled / bound)
    return scaled


def scaled_edges(edges: npt.NDArray[np.float64], centre_and_scale: Sequence[float], bound: float) -> list[float]:
    """Returns ascending edges of a column's bins as `TableColumns` scales its numbers: two or more, none too near."""
    scaled = np.sort(_scaled(edges[:, None], [centre_and_scale], bound).astype(np.float32)[:, 0])
    scaled = scaled[np.diff(scaled, prepend=-np.inf) > _LEAST_WIDTH]
    return scaled.tolist() if len(scaled) > 1 else [0.0, 1.0]


def _stacked(columns: Sequence[npt.NDArray[Any]], rows: int, dtype: Any) -> torch.Tensor:
    """Returns columns as one tensor of shape `(rows, columns)`."""
    array = np.empty((rows, len(columns)), dtype)
    for index, column in enumerate(columns):
        array[:, index] = column
    return torch.from_numpy(array)
