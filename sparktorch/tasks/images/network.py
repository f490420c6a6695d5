"""The network that classifies images without a folder of trained weights: a small residual network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["ImageNetwork"]

_GROUPS = 8  # Channels are normalized in this number of groups.
_WIDTH = 32  # The first stage has this number of channels, and each further stage has twice as many as the one before.
_MOST_PIXELS = 32  # The sides of images that are longer than this are halved before the first stage.
_STAGES = 3  # Images with more than twice as many pixels a side go through one stage more.
_PARTS = 4  # The head sees the mean of each of 4 x 4 parts of an image, and so where something is.


class ImageNetwork(nn.Module):
    """Classifies images of one size from random weights: residual blocks of two convolutions, then a linear layer.

    It normalizes groups of channels within an image, not batches of images (batch norm). So any number of workers
    trains what one worker would train, and validation computes what training computes.
    """

    def __init__(self, classes: int, shape: Sequence[int]) -> None:
        """Builds the layers.

        Args:
            classes: The number of classes, and so of outputs.
            shape: Channels, height and width of the images.
        """
        super().__init__()
        channels, *size = shape
        stride = 2 if max(size) > _MOST_PIXELS else 1
        stages = _STAGES + 1 if max(size) > 2 * _MOST_PIXELS else _STAGES
        first = nn.Conv2d(channels, _WIDTH, 3, stride, 1, bias=False)
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
        hidden = torch.relu(self.stem(4.0 * images - 2.0))  # This maps 0 ... 1 to -2 ... 2.
        parts = nn.functional.adaptive_avg_pool2d(self.stages(hidden), _PARTS)
        scores: torch.Tensor = self.head(parts.flatten(1))
        return scores


class _Block(nn.Module):
    """Adds the output of two convolutions to the input.

    Where the number of channels changes, from `before` to `width`, height and width of images are halved.
    """

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
        hidden = torch.relu(self.first_norm(self.first(images)))
        change = self.second_norm(self.second(hidden))
        return torch.relu(change + self.skip(images))
