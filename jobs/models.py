"""The modules that the jobs in `conf/` train."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DiabetesMLP", "DigitsCNN", "MatrixFactorization"]


class DigitsCNN(nn.Module):
    """Two convolutions and two linear layers over images of 8 x 8 pixels."""

    def __init__(self, channels: int = 32, hidden: int = 128, dropout: float = 0.5) -> None:
        """Takes the channels of the first convolution, the width of the hidden layer, and its dropout."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape `(rows, 10)` for pixels of shape `(rows, 64)`."""
        scores: torch.Tensor = self.layers(pixels)
        return scores


class DiabetesMLP(nn.Module):
    """One hidden layer over ten measurements; the output is in the units of the label."""

    def __init__(self, hidden: int = 32, dropout: float = 0.1, mean: float = 0.0, scale: float = 1.0) -> None:
        """Takes the hidden width and its dropout, and the label's mean and standard deviation."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))
        self.mean = mean
        self.scale = scale

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Returns predictions of shape `(rows,)` for features of shape `(rows, 10)`."""
        standard: torch.Tensor = self.layers(features).squeeze(1)
        return self.mean + self.scale * standard


class MatrixFactorization(nn.Module):
    """A rating is a constant, a bias of the user, one of the item, and the product of their factors."""

    def __init__(self, users: int, items: int, factors: int = 8, mean: float = 0.0) -> None:
        """Takes the number of users, items and factors, and the mean rating to start from."""
        super().__init__()
        self.user_factors = nn.Embedding(users, factors)
        self.item_factors = nn.Embedding(items, factors)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        self.mean = mean
        for factor in (self.user_factors, self.item_factors):
            nn.init.normal_(factor.weight, std=0.1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Returns ratings of shape `(rows,)` for indices of users and items, each of shape `(rows,)`."""
        product = (self.user_factors(user) * self.item_factors(item)).sum(1)
        ratings: torch.Tensor = product + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.mean
        return ratings
