"""The `preprocess` of tables: it makes tensors from columns by the categories and scales that a fit has learned."""

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

BINS = 48  # A column of numbers has at most this number of bins.
_LEAST_WIDTH = 1e-5  # Narrower bins are left out.
# Each part of a time has a function that computes it, and its categories. Dates have no hour.
_PARTS: dict[str, tuple[Any, list[int]]] = {
    "month": (pc.month, list(range(1, 13))),
    "weekday": (pc.day_of_week, list(range(7))),
    "hour": (pc.hour, list(range(24))),
}


@dataclass(frozen=True)
class TableColumns:
    """A `preprocess` that makes two tensors from the columns of a table: `categories` and `numbers`.

    Attributes:
        categories: The known categories, by column. Index 0 stands for an unknown category, 1 for null, and 2 for the
            first known category.
        times: The parts of dates or timestamps, by column: "month", "weekday" (0 is Monday) and "hour", in UTC.
        numbers: Centre and scale, by column. Dates and timestamps are seconds since 1970, in UTC. Nulls and NaN become
            0, the centre. All numbers of a column with scale 0, which was the same in all training rows, become 0, too.
        missing: Columns of `numbers` for which the tensor has another column, which is 1 where they are null or NaN.
        bound: The bound of scaled numbers, which they come near the farther they are from the centre, and do not
            exceed; 0 for no bound.
    """

    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    times: Mapping[str, Sequence[str]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    bound: float = 0.0
    takes_nulls: ClassVar[bool] = True

    @property
    def vocabulary(self) -> dict[str, list[Any]]:
        """The categories by column of the tensor `categories`, from index 2 on; a part of a time is `time.part`."""
        parts = {f"{name}.{part}": _PARTS[part][1] for name, parts in self.times.items() for part in parts}
        return {name: list(values) for name, values in {**self.categories, **parts}.items()}

    @property
    def cardinalities(self) -> list[int]:
        """The number of indices in each column of the tensor `categories`."""
        parts = [_PARTS[part][1] for parts in self.times.values() for part in parts]
        return [FIRST_CATEGORY + len(values) for values in (*self.categories.values(), *parts)]

    @property
    def width(self) -> int:
        """The number of columns of the tensor `numbers`."""
        return len(self.numbers) + len(self.missing)

    def __call__(
        self, columns: Mapping[str, pa.Array], *, epoch: int | None, generator: Any
    ) -> dict[str, torch.Tensor]:
        """Returns `categories`, int64 of shape `(rows, columns)`, and `numbers`, float32 of shape `(rows, columns)`."""
        indices = [category_indices(columns[name], values) for name, values in self.categories.items()]
        for name, parts in self.times.items():
            instants = columns[name].cast(pa.timestamp("us"))
            for part in parts:
                compute, categories = _PARTS[part]
                indices.append(category_indices(compute(instants), categories))
        rows = len(next(iter(columns.values())))
        doubles = _as_tensor([as_doubles(columns[name]) for name in self.numbers], rows, np.float64).numpy()
        numbers = list(_scaled(doubles, list(self.numbers.values()), self.bound).T)
        numbers += [pc.is_null(columns[name], nan_is_null=True).to_numpy(zero_copy_only=False) for name in self.missing]
        return {"categories": _as_tensor(indices, rows, np.int64), "numbers": _as_tensor(numbers, rows, np.float32)}


def _scaled(
    values: npt.NDArray[np.float64], centres_and_scales: Sequence[Sequence[float]], bound: float
) -> npt.NDArray[np.float64]:
    """Subtracts its centre from each column and divides by its scale; NaN and columns with scale 0 become 0.

    With a bound, the scaled value z becomes z / sqrt(1 + (z / bound)^2), the smooth clipping of RealMLP (arXiv
    2407.04491). This is about z for a small z, and tells outliers apart.
    """
    centres, scales = np.array(centres_and_scales, np.float64).reshape(-1, 2).T
    factors = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    scaled: npt.NDArray[np.float64] = np.nan_to_num((values - centres) * factors, nan=0.0)
    if bound:
        scaled /= np.hypot(1.0, scaled / bound)
    return scaled


def scaled_edges(edges: npt.NDArray[np.float64], centre_and_scale: Sequence[float], bound: float) -> list[float]:
    """Scales the ascending edges of a column's bins as `TableColumns` scales its numbers; returns at least two.

    Edges that are too near to the one before are left out.
    """
    scaled = np.sort(_scaled(edges[:, None], [centre_and_scale], bound).astype(np.float32)[:, 0])
    scaled = scaled[np.diff(scaled, prepend=-np.inf) > _LEAST_WIDTH]
    return scaled.tolist() if len(scaled) > 1 else [0.0, 1.0]


def _as_tensor(columns: Sequence[npt.NDArray[Any]], rows: int, dtype: Any) -> torch.Tensor:
    """Returns a tensor of shape `(rows, columns)`, also if there are no columns."""
    array = np.empty((rows, len(columns)), dtype)
    for index, column in enumerate(columns):
        array[:, index] = column
    return torch.from_numpy(array)
