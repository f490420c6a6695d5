"""The networks that more than one benchmark trains."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Encoder", "EncoderLayer", "Mlp"]


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

    def stages(self) -> list[nn.Module]:
        """Returns the layers, and what makes `(rows,)` of the last one's output."""
        return [*self.layers, nn.Flatten(0)]


class Encoder(nn.Module):
    """Four encoder layers of 256 over 64 positions, of linear layers; one number a row, shape `(rows,)`."""

    positions, width, heads, depth = 64, 256, 8, 4
    inputs = positions * width

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EncoderLayer(self.width, self.width // self.heads) for _ in range(self.depth)))
        self.head = nn.Linear(self.width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, 64 * 256)` to `(rows,)`."""
        out: torch.Tensor = self.head(self.layers(x.unflatten(1, (-1, self.width))).mean(1)).squeeze(-1)
        return out


class EncoderLayer(nn.Module):
    """A layer of `Encoder`."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), _Attention(width, head)
        self.network_norm, self.network = nn.LayerNorm(width), _Network(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, 64, 256)` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.network(self.network_norm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class _Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.relu(self.first(x)))
        return out
