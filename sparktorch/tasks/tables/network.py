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
    """Returns the sizes of a `TableNetwork` for a number of training rows: the more rows, the fewer members."""
    members = 1
    if rows < 40_000:
        members = 4
    elif rows < 150_000:
        members = 2
    return {"hidden": [128, 64], "members": members}


class TableNetwork(nn.Module):
    """Multilayer perceptrons, whose inputs are categories and numbers in embeddings, one for each column.

    Several perceptrons, the members, share most of their weights; the network returns the mean of their outputs (TabM,
    arXiv 2410.24210).
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
            edges: Ascending edges of bins, for each of the first columns of numbers. These columns get an embedding.
            members: Number of perceptrons.
            number_width: Number of elements in the embedding of a number.
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

        In training, a network of several members returns `{"members": (rows, members, outputs)}`: the loss is the mean
        of the members' losses. With the loss of their mean, the members would learn the same.
        """
        parts = [embedding(categories[:, column]) for column, embedding in enumerate(self.embeddings)]
        parts.append(numbers)
        if self.numbers is not None:
            parts.append(self.numbers(numbers[:, : self.embedded]))
        inputs = torch.cat(parts, dim=1)
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
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, MemberOutput(width, outputs, members))
