"""The networks that more than one benchmark trains."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Mlp"]


class Mlp(nn.Module):
    """`layers` hidden layers of `width` with ReLU, over 100 inputs; one number a row, shape `(rows,)`."""

    inputs = 100

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [self.inputs, *[width] * layers]
        hidden = [part for i in range(layers) for part in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, 100)` to `(rows,)`."""
        out: torch.Tensor = self.layers(x).squeeze(-1)
        return out
