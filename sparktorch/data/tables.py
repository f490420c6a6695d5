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

from sparktorch.data.table_layers import CategoryEmbedding, MemberLinear, MemberOutput, NumberEmbedding

__all__ = [
    *("BINS", "TableColumns", "TableNetwork", "as_doubles", "category_indices", "network_settings", "perceptron"),
    "scaled_edges",
]

_UNKNOWN, _NULL = 0, 1
_KNOWN = 2  # index of the first category
BINS = 48  # the most of a column of numbers
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
        indices = [category_indices(columns[name], values) for name, values in self.categories.items()]
        for name, parts in self.times.items():
            instants = columns[name].cast(pa.timestamp("us"))
            indices += [category_indices(_PARTS[part][0](instants), _PARTS[part][1]) for part in parts]
        rows = len(next(iter(columns.values())))
        values = _beside([as_doubles(columns[name]) for name in self.numbers], rows, np.float64).numpy()
        numbers = [*_scaled(values, list(self.numbers.values()), self.bound).T]
        numbers += [pc.is_null(columns[name], nan_is_null=True).to_numpy(zero_copy_only=False) for name in self.missing]
        return {"categories": _beside(indices, rows, np.int64), "numbers": _beside(numbers, rows, np.float32)}


def category_indices(column: pa.Array, known: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns the index of each value's category: 0 for one that is not known, 1 for null, from 2 on those known."""
    found = pc.index_in(column, value_set=pa.array(known, column.type))
    places = pc.fill_null(pc.add(found, _KNOWN), _UNKNOWN)
    indices: npt.NDArray[Any] = pc.if_else(pc.is_null(column, nan_is_null=True), _NULL, places).to_numpy()
    return indices


def as_doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    """Returns numbers as float64, and dates and timestamps as seconds since 1970, in UTC; NaN for nulls."""
    if pa.types.is_temporal(column.type):
        column = pc.divide(column.cast(pa.timestamp("us")).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    # Whole numbers beyond 2**53 are rounded, as Spark rounds them when it casts them to double.
    values: npt.NDArray[np.float64] = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def _scaled(
    values: npt.NDArray[np.float64], centres_and_scales: Sequence[Sequence[float]], bound: float
) -> npt.NDArray[np.float64]:
    """Returns columns less their centres in units of their scales, and 0 for NaN and in columns of scale 0.

    With a bound, the scaled value z becomes z / sqrt(1 + (z / bound)^2), the smooth clipping of RealMLP (arXiv
    2407.04491). It is about z where that is small, and keeps outliers apart from each other.
    """
    centres, scales = np.array(centres_and_scales, np.float64).reshape(-1, 2).T
    units = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    found: npt.NDArray[np.float64] = np.nan_to_num((values - centres) * units, nan=0.0)
    if bound:
        found /= np.hypot(1.0, found / bound)
    return found


def scaled_edges(edges: npt.NDArray[np.float64], centre_and_scale: Sequence[float], bound: float) -> list[float]:
    """Returns ascending edges of a column's bins as `TableColumns` scales its numbers: two or more, none too near."""
    found = np.sort(_scaled(edges[:, None], [centre_and_scale], bound).astype(np.float32)[:, 0])
    found = found[np.diff(found, prepend=-np.inf) > _LEAST_WIDTH]
    return found.tolist() if len(found) > 1 else [0.0, 1.0]


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


def network_settings(rows: int) -> dict[str, Any]:
    """Returns the sizes of a `TableNetwork` for a number of rows that train: few members for many rows."""
    return {"hidden": [128, 64], "members": 4 if rows < 40_000 else 2 if rows < 150_000 else 1}


class TableNetwork(nn.Module):
    """Multilayer perceptrons of categories and numbers, each in an embedding of its column's own.

    Several of them, the members, share most of their weights, and their mean is returned (TabM, arXiv 2410.24210).
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        numbers: int,
        outputs: int,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        scales: Sequence[Sequence[float]] = (),
        edges: Sequence[Sequence[float]] = (),
        members: int = 1,
        number_width: int = 16,
    ) -> None:
        """Makes the layers.

        Args:
            cardinalities: Number of indices of each column of categories.
            numbers: Number of columns of numbers.
            outputs: Number of values returned for each row.
            hidden: Sizes of the hidden layers.
            dropout: Probability with which a hidden value is left out in training.
            scales: Mean and standard deviation of each output's labels, if they are numbers to predict.
            edges: Ascending edges of the bins of the first columns of numbers, which get an embedding; none do without.
            members: Number of perceptrons.
            number_width: Size of the embedding of a number.
        """
        super().__init__()
        self.embeddings = nn.ModuleList(CategoryEmbedding.of(count) for count in cardinalities)
        self.numbers = NumberEmbedding(edges, number_width) if edges else None
        self.embedded, self.members = len(edges), members
        width = numbers + number_width * len(edges)
        width += sum(embedding.embedding_dim for embedding in self.embeddings)  # type: ignore[misc]
        if members == 1:
            self.layers = perceptron(width, hidden, outputs, dropout)
        else:
            self.layers = _members(width, hidden, outputs, dropout, members)
        self.scales = [(mean, deviation or 1.0) for mean, deviation in scales]

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Returns the outputs, of shape `(rows, outputs)`.

        In training, several members return the outputs of each, `{"members": (rows, members, outputs)}`: it is the
        mean of their losses that is to be small, or they would learn the same.
        """
        columns = [embedding(categories[:, place]) for place, embedding in enumerate(self.embeddings)]
        columns.append(numbers)
        if self.numbers is not None:
            columns.append(self.numbers(numbers[:, : self.embedded]))
        inputs = torch.cat(columns, dim=1)
        found: torch.Tensor = self.layers(inputs)
        if self.scales:
            scaled = [found[..., place] * deviation + mean for place, (mean, deviation) in enumerate(self.scales)]
            found = torch.stack(scaled, dim=-1)
        if self.members == 1:
            return found
        return {"members": found} if self.training else found.mean(1)


def _members(width: int, hidden: Sequence[int], outputs: int, dropout: float, members: int) -> nn.Sequential:
    """Returns the layers of a perceptron for each of several members."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [MemberLinear(width, size, members, first=not layers), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = size
    return nn.Sequential(*layers, MemberOutput(width, outputs, members))
