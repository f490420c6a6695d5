"""Networks in stages, for pipelines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.nets import Paired, Unit


class _Scaled(nn.Linear):
    """Computes with buffers, one of which no state dict has, and with a tensor that is neither."""

    factor: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("factor", torch.empty(1))
        self.register_buffer("shift", torch.empty(1), persistent=False)
        self.plain = torch.empty(1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "plain"):  # not yet where the layer is made
            for made, value in ((self.factor, 1.4), (self.shift, 0.3), (self.plain, 0.7)):
                nn.init.constant_(made, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.shift * self.plain


class Keeping(Paired):
    """Has a parameter between layers, and one under two names; the same layer is a part under two names, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((5,), 1.1))
        self.head = nn.Linear(1, 1)
        self.out = _Scaled()
        self.head.weight = self.out.weight
        self.aliases = nn.ModuleDict({"out": self.out})

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.gain, 1.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x * self.gain)
        result: torch.Tensor = self.out(out.unsqueeze(-1)).squeeze(-1)
        return result

    def stages(self) -> list[nn.Module]:
        last = Unit(lambda x: self.out(x.unsqueeze(-1)).squeeze(-1), self.out, self.head)
        return [Unit(lambda x, gain: x * gain, gain=self.gain), *super().stages(), last]


def normed() -> nn.Module:
    norm: Any = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Linear(8, 1), nn.Flatten(0))
