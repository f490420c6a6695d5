"""The network for tables: perceptrons of embedded categories and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparktorch.tasks.shared.layers import CategoryEmbedding, perceptron
from sparktorch.tasks.tables.layers import MemberLinear, MemberOutput, NumberEmbedding

__all__ = ["TableNetwork", "network_settings"]


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
        columns = [embedding(categories[:, column]) for column, embedding in enumerate(self.embeddings)]
        columns.append(numbers)
        if self.numbers is not None:
            columns.append(self.numbers(numbers[:, : self.embedded]))
        inputs = torch.cat(columns, dim=1)
        outputs: torch.Tensor = self.layers(inputs)
        if self.scales:
            scaled = [outputs[..., column] * deviation + mean for column, (mean, deviation) in enumerate(self.scales)]
            outputs = torch.stack(scaled, dim=-1)
        if self.members == 1:
            return outputs
        return {"members": outputs} if self.training else outputs.mean(1)


def _members(width: int, hidden: Sequence[int], outputs: int, dropout: float, members: int) -> nn.Sequential:
    """Returns the layers of a perceptron for each of several members."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [MemberLinear(width, size, members, first=not layers), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = size
    return nn.Sequential(*layers, MemberOutput(width, outputs, members))
