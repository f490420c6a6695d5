"""A user's own module file: what it holds is known to executors only where it is shipped or lies beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn


class Net(nn.Module):
    """Lays all arguments side by side, whatever their shapes, for one linear layer."""

    def __init__(self, width: int, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(torch.cat([x.reshape(len(x), -1).float() for x in inputs], 1))
        return out


class Wide(nn.Module):
    """More weights than travel with a task, between rows of `width` values and one number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(width, 5000), nn.Linear(5000, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Ragged(Net):
    """Takes rows of up to `width` values, and which of them there are."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        values, mask = inputs
        return super().forward(nn.functional.pad(values * mask, (0, self.linear.in_features - values.shape[1])))


def read(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Counts the letters a and b of a text, beside a number, hours since the start of 2026, and minutes of the hour."""
    counts = [pc.count_substring(columns["text"], letter).to_numpy(zero_copy_only=False) for letter in "ab"]
    minutes = (columns["at"] - np.datetime64("2026-01-01", "us")).astype("timedelta64[m]").astype(np.int64)
    rows = [*counts, columns["extra"], minutes // 60 / 60, minutes % 60 / 60]
    return {"x": torch.from_numpy(np.stack(rows, 1).astype(np.float32))}
