"""Layers that networks of several tasks have: embeddings of categories, perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["UNTRAINED", "CategoryEmbedding", "perceptron"]

UNTRAINED = 2  # The first two indices are those of unknown and null, whose vectors begin as zeros.


class CategoryEmbedding(nn.Embedding):
    """An embedding whose weights begin small, and those of unknown and null as zeros: rows may lack a category."""

    @classmethod
    def of(cls, count: int) -> CategoryEmbedding:
        """Makes one for a number of indices, whose vectors have half as many elements, and 32 at most."""
        return cls(count, min(32, (count + 1) // 2))

    def reset_parameters(self) -> None:
        """Draws the weights of the categories."""
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:UNTRAINED].zero_()


def perceptron(width: int, hidden: Sequence[int], outputs: int, dropout: float | None = None) -> nn.Sequential:
    """Returns linear layers of those sizes, with a ReLU and, if there is one, a dropout behind each but the last."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU(), *([] if dropout is None else [nn.Dropout(dropout)])]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
