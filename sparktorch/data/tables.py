"""Tables of categories, numbers and times: what is learned of their columns, as a `preprocess`; a network for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

__all__ = ["TableColumns", "TableNetwork", "perceptron"]

_UNKNOWN, _NULL = 0, 1
_KNOWN = 2  # index of the first category
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
        numbers: Mean and standard deviation by column. Nulls and NaN become 0, the mean.
        missing: Columns of `numbers` of which another column says where they are null or NaN.
    """

    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    times: Mapping[str, Sequence[str]] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    takes_nulls: ClassVar[bool] = True

    @property
    def known(self) -> dict[str, list[Any]]:
        """The known categories of each column of the tensor `categories`, in order; a part of a time is `time.part`."""
        parts = {f"{name}.{part}": _PARTS[part][1] for name, parts in self.times.items() for part in parts}
        return {name: list(values) for name, values in {**self.categories, **parts}.items()}

    @property
    def cardinalities(self) -> list[int]:
        """Number of indices of each column of the tensor `categories`."""
        parts = [part for parts in self.times.values() for part in parts]
        return [_KNOWN + len(known) for known in (*self.categories.values(), *(_PARTS[part][1] for part in parts))]

    @property
    def width(self) -> int:
        """Number of columns of the tensor `numbers`."""
        return len(self.numbers) + len(self.missing)

    def __call__(
        self, columns: Mapping[str, pa.Array], *, epoch: int | None, generator: Any
    ) -> dict[str, torch.Tensor]:
        """Returns `categories`, int64 of shape `(rows, columns)`, and `numbers`, float32 of shape `(rows, columns)`."""
        indices = [_indices(columns[name], values) for name, values in self.categories.items()]
        for name, parts in self.times.items():
            instants = columns[name].cast(pa.timestamp("us"))
            indices += [_indices(_PARTS[part][0](instants), _PARTS[part][1]) for part in parts]
        numbers = [_standardised(columns[name], *values) for name, values in self.numbers.items()]
        numbers += [pc.is_null(columns[name], nan_is_null=True).to_numpy(zero_copy_only=False) for name in self.missing]
        rows = len(next(iter(columns.values())))
        return {"categories": _beside(indices, rows, np.int64), "numbers": _beside(numbers, rows, np.float32)}


def _indices(column: pa.Array, known: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns the index of each value's category."""
    found = pc.index_in(column, value_set=pa.array(known, column.type))
    places = pc.fill_null(pc.add(found, _KNOWN), _UNKNOWN)
    indices: npt.NDArray[Any] = pc.if_else(pc.is_null(column, nan_is_null=True), _NULL, places).to_numpy()
    return indices


def _standardised(column: pa.Array, mean: float, deviation: float) -> npt.NDArray[Any]:
    """Returns numbers less their mean in units of their standard deviation, and 0 for nulls and NaN."""
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    found: npt.NDArray[Any] = np.nan_to_num((values - mean) / (deviation or 1.0), nan=0.0)
    return found


def _beside(columns: Sequence[npt.NDArray[Any]], rows: int, dtype: Any) -> torch.Tensor:
    """Returns columns as one tensor of shape `(rows, columns)`."""
    made = np.empty((rows, len(columns)), dtype)
    for place, column in enumerate(columns):
        made[:, place] = column
    return torch.from_numpy(made)


def perceptron(width: int, hidden: Sequence[int], outputs: int, dropout: float | None = None) -> nn.Sequential:
    """Returns linear layers of those sizes, with a ReLU and, if there is one, a dropout behind each but the last."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(), *([] if dropout is None else [nn.Dropout(dropout)])]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class TableNetwork(nn.Module):
    """A multilayer perceptron of categories, each in an embedding of its column's own, and numbers."""

    def __init__(
        self,
        cardinalities: Sequence[int],
        numbers: int,
        outputs: int,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        scales: Sequence[Sequence[float]] = (),
    ) -> None:
        """Makes the layers.

        Args:
            cardinalities: Number of indices of each column of categories.
            numbers: Number of columns of numbers.
            outputs: Number of values returned for each row.
            hidden: Sizes of the hidden layers.
            dropout: Probability with which a hidden value is left out in training.
            scales: Mean and standard deviation of each output's labels, if they are numbers to predict.
        """
        super().__init__()
        self.embeddings = nn.ModuleList(_Embedding(count, min(32, (count + 1) // 2)) for count in cardinalities)
        width = numbers + sum(embedding.embedding_dim for embedding in self.embeddings)  # type: ignore[misc]
        self.layers = perceptron(width, hidden, outputs, dropout)
        self.scales = [(mean, deviation or 1.0) for mean, deviation in scales]

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the outputs, of shape `(rows, outputs)`."""
        embedded = [embedding(categories[:, place]) for place, embedding in enumerate(self.embeddings)]
        found: torch.Tensor = self.layers(torch.cat([*embedded, numbers], dim=1))
        if not self.scales:
            return found
        scaled = [found[:, place] * deviation + mean for place, (mean, deviation) in enumerate(self.scales)]
        return torch.stack(scaled, dim=1)


class _Embedding(nn.Embedding):
    """An embedding whose weights begin small, and those of unknown and null as zeros: rows may lack a category."""

    def reset_parameters(self) -> None:
        """Draws the weights of the categories."""
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:_KNOWN].zero_()
