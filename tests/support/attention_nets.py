"""Networks of torch's transformer layers, of a row of five numbers."""

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
        self.encoder = nn.TransformerEncoder(layer, layers)
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


class Translator(nn.Module):
    """Encoder and decoder, positions first, with a causal mask and attention to fewer positions; one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(5, 3 * 8), nn.Linear(5, 4 * 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source = self.source(x).unflatten(1, (3, 8)).transpose(0, 1)
        target = self.target(x).unflatten(1, (4, 8)).transpose(0, 1)
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
        found = self.decoder(target, self.encoder(source), tgt_mask=mask, tgt_is_causal=True)
        out: torch.Tensor = self.last(found.mean(0)).squeeze(-1)
        return out


class Sequences(nn.Module):
    """A stack with a norm behind it, and a decoder layer; four ranks have two, two, one and none of the positions."""

    def __init__(
        self, dropout: float = 0.0, *, norm_first: bool = False, layers: int = 2, feedforward: int = 12
    ) -> None:
        super().__init__()
        kind = {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
        self.first, self.last = nn.Linear(5, 5 * 8), nn.Linear(8, 1)
        layer = nn.TransformerEncoderLayer(8, 4, feedforward, **kind)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(8), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(8, 4, feedforward, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.first(x).unflatten(1, (5, 8))
        padding = torch.arange(5, device=x.device) >= 4 + (x[:, :1] > 0)
        mask = torch.ones(3, 3, dtype=torch.bool, device=x.device).triu(1)
        memory = self.encoder(src=positions, src_key_padding_mask=padding)
        found = self.decoder(positions[:, :3], memory, tgt_mask=mask, memory_key_padding_mask=padding)
        out: torch.Tensor = self.last(found.mean(1)).squeeze(-1)
        return out
