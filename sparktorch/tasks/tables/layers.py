"""Layers of the network for tables: embeddings of numbers, and linear layers of several members."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["MemberLinear", "MemberOutput", "NumberEmbedding"]


class NumberEmbedding(nn.Module):
    """Vectors of numbers: a learned function of each column, which is linear between the edges of its bins.

    They are the piecewise linear embeddings of Gorishniy et al. (arXiv 2203.05556) as TabM (2410.24210) has them: a
    linear function, and a piecewise linear one that begins as zero, behind a ReLU.
    """

    # Factors are the inverse widths of the bins, of shape (columns, 1, bins), and zero for bins that a column lacks;
    # offsets are the negative left edges in units of these widths.
    factors: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, edges: Sequence[Sequence[float]], width: int) -> None:
        """Takes the ascending edges of each column's bins, and the size of the vectors."""
        super().__init__()
        self.edges = edges
        bins = max(1, *(len(column_edges) - 1 for column_edges in edges))
        self.register_buffer("factors", torch.empty(len(edges), 1, bins))
        self.register_buffer("offsets", torch.empty(len(edges), 1, bins))
        self.pieces = nn.Parameter(torch.empty(len(edges), bins, width))
        self.slopes = nn.Parameter(torch.empty(len(edges), width))
        self.bias = nn.Parameter(torch.empty(len(edges), width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the linear functions, and begins the others as zero."""
        nn.init.zeros_(self.pieces)
        nn.init.uniform_(self.slopes, -1.0, 1.0)
        nn.init.uniform_(self.bias, -1.0, 1.0)
        with torch.no_grad():
            self.factors.zero_()
            self.offsets.zero_()
            for column, column_edges in enumerate(self.edges):
                values = torch.tensor(column_edges, dtype=torch.float64, device=self.factors.device)
                factors = 1.0 / values.diff()
                self.factors[column, 0, : len(factors)] = factors
                self.offsets[column, 0, : len(factors)] = -values[:-1] * factors

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the vectors beside one another, `(rows, columns * width)`, of numbers `(rows, columns)`."""
        columns = numbers.t().unsqueeze(-1)
        # The share of each bin that lies below the number.
        shares = torch.addcmul(self.offsets, columns, self.factors).clamp(0.0, 1.0)
        pieces = torch.baddbmm(self.bias.unsqueeze(1), shares, self.pieces)
        vectors = torch.relu(torch.addcmul(pieces, columns, self.slopes.unsqueeze(1)))
        return vectors.transpose(0, 1).flatten(1)


class MemberLinear(nn.Module):
    """A linear layer that several members share, each with factors of its own for inputs and outputs, and a bias.

    It is that of BatchEnsemble (arXiv 2002.06715); the factors of the first layer's inputs begin as random signs, all
    others as ones, as in TabM (2410.24210), so that the members begin different.
    """

    def __init__(self, inputs: int, outputs: int, members: int, *, first: bool) -> None:
        """Makes the layer; `first` if it is the first of the network."""
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.input_factors = nn.Parameter(torch.empty(members, inputs))
        self.output_factors = nn.Parameter(torch.empty(members, outputs))
        self.bias = nn.Parameter(torch.empty(members, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[1]))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.ones_(self.input_factors)
        nn.init.ones_(self.output_factors)
        with torch.no_grad():
            if self.first:
                self.input_factors.bernoulli_(0.5).mul_(2.0).sub_(1.0)
            self.bias.copy_(torch.empty_like(self.bias[0]).uniform_(-bound, bound).expand_as(self.bias))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the members, `(members, rows, outputs)`.

        Inputs are the same for all members, `(rows, inputs)`, in the first layer, and `(members, rows, inputs)` in
        others. The factors scale the weights, of which there are fewer than inputs and outputs of a batch.
        """
        weight = self.weight * self.input_factors.unsqueeze(1) * self.output_factors.unsqueeze(2)
        if self.first:
            every = nn.functional.linear(inputs, weight.flatten(0, 1), self.bias.flatten())
            return every.view(-1, *self.bias.shape).transpose(0, 1)
        return torch.baddbmm(self.bias.unsqueeze(1), inputs, weight.transpose(1, 2))


class MemberOutput(nn.Module):
    """The last layers of the members, which share nothing."""

    def __init__(self, inputs: int, outputs: int, members: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(members, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights."""
        bound = 1.0 / math.sqrt(max(1, self.weight.shape[1]))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of each member, `(rows, members, outputs)`, of its inputs `(members, rows, inputs)`."""
        return torch.baddbmm(self.bias.unsqueeze(1), inputs, self.weight).transpose(0, 1)
