"""Modules that look at the arguments they get before they take them as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn


class Flat(nn.Module):
    """Lays all arguments side by side, whatever their shapes, for one linear layer."""

    def __init__(self, width: int = 6, outputs: int = 1, expects: list[str] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.expects = expects

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.expects is not None:
            assert [f"{_kind(tensor)} {tensor.dim()}" for tensor in inputs] == self.expects
        if inputs[0].layout == torch.sparse_csr:
            rows = inputs[0]
        else:
            rows = torch.cat([tensor.reshape(len(tensor), -1).float() for tensor in inputs], 1)
        out: torch.Tensor = self.linear(rows)
        return out


class Padded(nn.Module):
    """Lays ragged rows into six places each, for one linear layer."""

    def __init__(self, width: int = 6, expects: str = "float32", pad: float = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.width, self.expects, self.pad = width, expects, pad

    def forward(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert _kind(values) == self.expects
        if mask is None:
            assert values.is_nested
            rows = torch.nested.to_padded_tensor(values, 0.0, (len(values), self.width))
        else:
            assert mask.dtype == torch.bool
            assert values.shape == mask.shape
            assert bool((values[~mask] == self.pad).all())
            rows = nn.functional.pad(values * mask, (0, self.width - values.shape[1]))
        out: torch.Tensor = self.linear(rows.float())
        return out


class Mixed(nn.Module):
    """Sparse, jagged, padded, raw and reshaped columns, each in its own tensor, for one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(30, 1)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        sparse, jagged, values, mask, blob, plain = inputs
        assert [_kind(tensor) for tensor in (sparse, values, blob, plain)] == ["sparse", "int64", "float64", "int64"]
        full = torch.nested.to_padded_tensor(jagged, 0.0, (len(jagged), 6))
        turned = [blob.transpose(1, 2), plain.transpose(1, 2)]
        parts = [sparse.to_dense(), full, values, mask, *turned]
        out: torch.Tensor = self.linear(torch.cat([part.reshape(len(values), -1).float() for part in parts], 1))
        return out


def _kind(tensor: torch.Tensor) -> str:
    return "sparse" if tensor.layout == torch.sparse_csr else str(tensor.dtype).removeprefix("torch.")


def letters(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Counts the letters a and b of a text, beside a number."""
    counts = [pc.count_substring(columns["text"], letter).to_numpy() for letter in "ab"]
    return {"x": torch.from_numpy(np.stack([*counts, columns["extra"]], 1).astype(np.float32))}


def widened(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Brings padded rows to three places."""
    values, mask = columns["words"]
    return {"x": nn.functional.pad((values * mask).float(), (0, 3 - values.shape[1]))}


def fails(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Looks for what is not there."""
    return {"x": columns["txt"]}
