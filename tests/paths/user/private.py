"""A user's own module file that travels with a model of MLflow's, and in no other way."""

from __future__ import annotations

import torch
from torch import nn


class Private(nn.Module):
    """One linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out
