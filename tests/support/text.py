"""Callables that make tensors of text, and a module that takes them."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import torch
from torch import nn


def lengths(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Number of letters of each row, beside the epoch, -1 for none."""
    count = torch.from_numpy(pc.utf8_length(columns["text"]).to_numpy(zero_copy_only=False).copy()).float()
    return {"x": torch.stack([count, torch.full_like(count, -1.0 if epoch is None else epoch)], 1)}


def noisy(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Noise, whatever the text."""
    return {"x": torch.rand(len(columns["text"]), 2, generator=generator)}


class Bag(nn.Module):
    """Sums its input, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.sum(1)
