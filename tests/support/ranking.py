"""The losses of rankings by plain loops, group by group."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def _listnet(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(scores, labels.softmax(0))


def _pairs(labels: torch.Tensor) -> list[tuple[int, int]]:
    count = range(len(labels))
    return [(i, j) for i in count for j in count if labels[i] > labels[j]]


def _ranknet(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = [-torch.sigmoid(scores[i] - scores[j]).log() for i, j in _pairs(labels)]
    return torch.stack(losses).mean() if losses else 0 * scores.sum()


def _lambdarank(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    order = sorted(range(len(scores)), key=lambda row: -float(scores[row].detach()))
    discount = {row: 1 / math.log2(place + 2) for place, row in enumerate(order)}
    best = sorted(labels.tolist(), reverse=True)
    ideal = sum(label / math.log2(place + 2) for place, label in enumerate(best))
    found = 0 * scores.sum()
    for i, j in _pairs(labels):
        swapped = abs(float(labels[i] - labels[j]) * (discount[i] - discount[j])) / ideal
        found = found - swapped * torch.sigmoid(scores[i] - scores[j]).log()
    return found


PLAIN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "listnet": _listnet,
    "ranknet": _ranknet,
    "lambdarank": _lambdarank,
}
