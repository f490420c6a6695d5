"""Losses of rankings: a value for each group, whose rows are ordered by score."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from sparktorch.data.ranking.metrics import discounts
from sparktorch.data.ranking.segments import group_of_rows, places, ranked, sums
from sparktorch.errors import ModuleError

__all__ = ["LOSSES", "lambdarank", "listnet", "ranknet"]


def listnet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy between the softmax of a group's labels and that of its scores, of shape `(groups,)`.

    Source: Cao et al., "Learning to rank: from pairwise approach to listwise approach", ICML 2007, with top-one
    probabilities.
    """
    _check(scores, labels)
    group = group_of_rows(sizes)
    wanted = _log_softmax(labels, group, sizes).exp()
    return sums(-wanted * _log_softmax(scores, group, sizes), group, sizes)


def ranknet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the mean logistic loss over the pairs of a group with different labels; 0 for one without pairs.

    Source: Burges et al., "Learning to rank using gradient descent", ICML 2005.
    """
    _check(scores, labels)
    better, worse, group = _pairs(labels, sizes)
    losses = F.softplus(scores[worse] - scores[better])
    count = sums(torch.ones_like(losses), group, sizes)
    return sums(losses, group, sizes) / count.clamp(min=1)


def lambdarank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the logistic losses of a group's pairs, each times the NDCG that swapping the two changes.

    Source: Burges, "From RankNet to LambdaRank to LambdaMART: an overview", MSR-TR-2010-82; the gain is the label.
    """
    _check(scores, labels)
    every = group_of_rows(sizes)
    better, worse, group = _pairs(labels, sizes)
    discount = discounts(places(sizes), scores.dtype)
    ideal = sums(labels[ranked(labels, every)] * discount, every, sizes).clamp(min=torch.finfo(scores.dtype).tiny)
    shown = torch.empty_like(discount)
    shown[ranked(scores.detach(), every)] = discount
    change = (labels[better] - labels[worse]) * (shown[better] - shown[worse]).abs() / ideal[group]
    return sums(change * F.softplus(scores[worse] - scores[better]), group, sizes)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"listnet": listnet, "ranknet": ranknet, "lambdarank": lambdarank}


def _check(scores: torch.Tensor, labels: torch.Tensor) -> None:
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ModuleError(
            f"the module returns scores of shape {tuple(scores.shape)} for labels of shape {tuple(labels.shape)}",
            hint="a ranker's module returns one score a row, (rows,) or (rows, 1), and each row has one label",
            param="module",
        )


def _log_softmax(values: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of the softmax over each group."""
    most = values.new_full((len(sizes),), -torch.inf).scatter_reduce(0, group, values.detach(), "amax")
    shifted = values - most[group]
    return shifted - sums(shifted.exp(), group, sizes).log()[group]


def _pairs(labels: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows of each pair of a group with different labels, that with the larger one first, and the group."""
    group = group_of_rows(sizes)
    first = torch.arange(len(group), device=sizes.device)
    partners = sizes[group]
    start = (first - places(sizes)).repeat_interleave(partners)
    left, right = first.repeat_interleave(partners), start + places(partners)
    kept = labels[left] > labels[right]
    left, right = left[kept], right[kept]
    return left, right, group[left]
