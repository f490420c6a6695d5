"""Networks with something that trains in a way of its own: buffers, dropout, statistics, convolutions."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from tests.support.nets import Score


class Steps(Score):
    """Counts its training steps in a buffer."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().forward(x)


class Dropped(Score):
    """Loses a part of its input, at random."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.4, self.training))


class Drawn(Score):
    """Starts from the generators of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.tensor([random.random(), float(np.random.random())]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.start.sum()


class Marked(Score):
    """Writes with `put_`, which torch does not do in the same order twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        marks = x.new_zeros(1).put_(index, x[:, 0].detach())
        return super().forward(x) + 0 * marks


class NormalisedScore(nn.Module):
    """Normalises its input and its hidden layer, far from zero, where sums of squares would lose the variance."""

    def __init__(self, far: float = 300) -> None:
        super().__init__()
        self._far = far
        self.layers = nn.Sequential(
            nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x + self._far).squeeze(-1)
        return out


class Convolved(nn.Module):
    """Looks at each row as an image of two channels of 2 x 5; keeps the strides it has met."""

    strides: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 2)
        self.last = nn.Linear(16, 1)
        self.register_buffer("strides", torch.zeros(8, dtype=torch.int64))

    def images(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.stack([x, x.flip(1)], 1), torch.stack([x.cos(), x.sin()], 1)], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.look(self.images(x))

    def look(self, images: torch.Tensor) -> torch.Tensor:
        self.strides.copy_(torch.tensor([*images.stride(), *self.convolution.weight.stride()]))
        out: torch.Tensor = self.last(self.convolution(images).tanh().flatten(1)).squeeze(-1)
        return out


class NormalisedImages(Convolved):
    """The same with its channels normalised, without parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, affine=False)

    def images(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(super().images(x))
        return out


class OwnNorm(nn.BatchNorm1d):
    """Normalises in a way of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2
