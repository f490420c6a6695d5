"""The network of images that have no trained one: a small residual network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ImageNetwork"]

_GROUPS = 8
_WIDTH = 32  # The first stage has so many channels, and each further one twice as many.
_MOST_PIXELS = 32  # The first stage works at sides up to this; larger images are halved before it.
_STAGES = 3
_PARTS = 4  # The head sees the mean of each of 4 x 4 parts of an image, and so where something is.


class ImageNetwork(nn.Module):
    """Classifies images of one size from random weights: residual blocks of two convolutions, then a linear layer.

    It normalizes groups of channels within an image, not batches of images (batch norm), so any number of workers
    trains what one would, and validation computes what training does.
    """

    def __init__(self, classes: int, shape: Sequence[int]) -> None:
        """Builds the layers.

        Args:
            classes: The number of classes, which is that of the outputs.
            shape: Channels, height and width of the images.
        """
        super().__init__()
        channels, *size = shape
        halved = max(size) > _MOST_PIXELS
        stages = _STAGES + (max(size) > 2 * _MOST_PIXELS)
        first = nn.Conv2d(channels, _WIDTH, 3, 1 + halved, 1, bias=False)
        self.stem = nn.Sequential(first, nn.GroupNorm(_GROUPS, _WIDTH))
        widths = [_WIDTH * 2**stage for stage in range(stages)]
        self.stages = nn.Sequential(
            *(_Block(before, width) for before, width in zip((_WIDTH, *widths), widths, strict=False))
        )
        self.head = nn.Linear(widths[-1] * _PARTS**2, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns a score for each class, of shape `(rows, classes)`.

        Args:
            images: float32 between 0 and 1, of shape `(rows, channels, height, width)`.
        """
        hidden = torch.relu(self.stem(4.0 * images - 2.0))
        parts = nn.functional.adaptive_avg_pool2d(self.stages(hidden), _PARTS)
        scores: torch.Tensor = self.head(parts.flatten(1))
        return scores


class _Block(nn.Module):
    """Adds what two convolutions make of the input to the input, which is halved where the width changes."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(_GROUPS, width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(_GROUPS, width)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(before, width, 1, stride, bias=False)
        nn.init.zeros_(self.second_norm.weight)  # A block begins as its skip, which trains deep networks steadily.

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        changed = self.second_norm(self.second(torch.relu(self.first_norm(self.first(images)))))
        return torch.relu(changed + self.skip(images))
