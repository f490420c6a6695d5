"""Layers in the networks of several tasks: embeddings of categories, and perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["UNTRAINED", "CategoryEmbedding", "perceptron"]

UNTRAINED = 2  # The first two indices stand for unknown and null, whose vectors begin as zeros.


class CategoryEmbedding(nn.Embedding):
    """An embedding whose vectors begin small. The vectors of unknown and null begin as zeros: no row may train them."""

    @classmethod
    def of(cls, count: int) -> CategoryEmbedding:
        """Makes an embedding of `count` indices, with half as many elements in a vector, and at most 32."""
        return cls(count, min(32, (count + 1) // 2))

    def reset_parameters(self) -> None:
        """Draws the weights of the categories."""
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            self.weight[:UNTRAINED].zero_()


def perceptron(width: int, hidden: Sequence[int], outputs: int, dropout: float | None = None) -> nn.Sequential:
    """Returns linear layers from `width` inputs to `outputs` outputs, with hidden layers of sizes `hidden` between.

    Behind each hidden layer is a ReLU and, unless `dropout` is `None`, a dropout.
    """
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout is not None:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
