"""Networks with attention, of a row of five numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.nets import Unit


class Encoder(nn.Module):
    """A classifier's body of `nn.TransformerEncoder`, whose rows have three or four positions; one number a row."""

    def __init__(self, width: int = 8, heads: int = 4, *, padded: bool = True, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4 * width)
        layer = nn.TransformerEncoderLayer(width, heads, 12, dropout=0.0, batch_first=True)
        # Nested tensors, which padding makes in evaluation, warn that they are a prototype.
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 1)
        self.padded = padded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.first(x).unflatten(1, (4, -1))
        padding = torch.arange(4, device=x.device) >= 3 + (x[:, :1] > 0) if self.padded else None
        found = self.encoder(positions, src_key_padding_mask=padding)
        if padding is not None:
            found = found.masked_fill(padding[:, :, None], 0)
        out: torch.Tensor = self.last(found.mean(1)).squeeze(-1)
        return out

    def stages(self) -> list[nn.Module]:
        def enter(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            positions = self.first(x).unflatten(1, (4, -1))
            return positions, torch.arange(4, device=x.device) >= 3 + ((x[:, :1] > 0) | (not self.padded))

        def deeper(layer: nn.Module) -> nn.Module:
            return Unit(lambda found, padding: (layer(found, src_key_padding_mask=mask_of(padding)), padding), layer)

        def mask_of(padding: torch.Tensor) -> torch.Tensor | None:
            return padding if self.padded else None

        def last(found: torch.Tensor, padding: torch.Tensor) -> Any:
            return self.last(found.masked_fill(padding[:, :, None], 0).mean(1)).squeeze(-1)

        return [Unit(enter, self.first), *map(deeper, self.encoder.layers), Unit(last, self.last)]


class Heads(nn.Module):
    """Attention whose queries, keys and values have a linear layer each; a row has four positions, and one number."""

    plan = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}

    def __init__(self, width: int = 8, head: int = 2) -> None:
        super().__init__()
        self.head = head
        self.first, self.last = nn.Linear(5, 4 * width), nn.Linear(width, 1)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.first(x).unflatten(1, (4, -1))
        q, k, v = (part(positions).unflatten(2, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.last((positions + self.out(attended)).mean(1)).squeeze(-1)
        return out
