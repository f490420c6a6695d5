"""Layers of the network for tables: embeddings of numbers, and linear layers of several members."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["MemberLinear", "MemberOutput", "NumberEmbedding"]


class NumberEmbedding(nn.Module):
    """Turns each number into a vector, by a learned function for each column that is linear between the edges of bins.

    These are the piecewise linear embeddings of Gorishniy et al. (arXiv 2203.05556) in the form that TabM (2410.24210)
    has: the sum of a linear function and a piecewise linear one, which begins as zero, goes through a ReLU.
    """

    # Both have the shape (columns, 1, bins), and are zero for bins that a column lacks. Factors are the inverse widths
    # of the bins; offsets are the negative left edges times the factors.
    factors: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, edges: Sequence[Sequence[float]], width: int) -> None:
        """Makes the weights for the ascending edges of each column's bins, and for vectors of size `width`."""
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
        """Draws the linear functions, sets the piecewise linear ones to zero, and computes factors and offsets."""
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
        """Returns the vectors of numbers `(rows, columns)`, side by side: `(rows, columns * width)`."""
        columns = numbers.t().unsqueeze(-1)
        # A share is the part of a bin that lies below the number.
        shares = torch.addcmul(self.offsets, columns, self.factors).clamp(0.0, 1.0)
        pieces = torch.baddbmm(self.bias.unsqueeze(1), shares, self.pieces)
        vectors = torch.relu(torch.addcmul(pieces, columns, self.slopes.unsqueeze(1)))
        return vectors.transpose(0, 1).flatten(1)


class MemberLinear(nn.Module):
    """A linear layer whose weights several members share. Each member has factors of inputs and outputs, and a bias.

    It is the layer of BatchEnsemble (arXiv 2002.06715). As in TabM (2410.24210), the factors of the first layer's
    inputs begin as random signs, so that the members begin different; all other factors begin as ones.
    """

    def __init__(self, inputs: int, outputs: int, members: int, *, first: bool) -> None:
        """Makes the layer; `first` says whether it is the first of the network."""
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
            # All members begin with the same bias.
            self.bias.copy_(torch.empty_like(self.bias[0]).uniform_(-bound, bound).expand_as(self.bias))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the members, `(members, rows, outputs)`.

        In the first layer, the inputs are the same for all members, `(rows, inputs)`; in other layers, they have the
        shape `(members, rows, inputs)`. The factors scale the weights, because a batch has more inputs and outputs than
        there are weights.
        """
        weight = self.weight * self.input_factors.unsqueeze(1) * self.output_factors.unsqueeze(2)
        if self.first:
            outputs_of_all = nn.functional.linear(inputs, weight.flatten(0, 1), self.bias.flatten())
            return outputs_of_all.view(-1, *self.bias.shape).transpose(0, 1)
        return torch.baddbmm(self.bias.unsqueeze(1), inputs, weight.transpose(1, 2))


class MemberOutput(nn.Module):
    """The last layer, of which each member has its own weights."""

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
        """Returns the outputs of the members, `(rows, members, outputs)`, for inputs `(members, rows, inputs)`."""
        return torch.baddbmm(self.bias.unsqueeze(1), inputs, self.weight).transpose(0, 1)
