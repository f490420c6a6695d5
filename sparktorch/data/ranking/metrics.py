"""Metrics of rankings: a value for each group."""

from __future__ import annotations

import torch

from sparktorch.data.ranking.segments import group_of_rows, places, ranked, sums

__all__ = ["discounts", "measured", "ndcg", "reciprocal_rank"]


def measured(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns what a validation shows of each group."""
    return {"ndcg_at_10": ndcg(scores, labels, sizes, k=10), "mrr": reciprocal_rank(scores, labels, sizes)}


def ndcg(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor, *, k: int | None = None) -> torch.Tensor:
    """Returns the normalised discounted cumulative gain of the first `k` rows of each group, of shape `(groups,)`.

    The gain is the label, and rows with equal scores share theirs, as in scikit-learn's `ndcg_score`. A group without
    labels above 0 has 0.

    Source: Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 20 (2002).
    """
    group, place = group_of_rows(sizes), places(sizes)
    discount = discounts(place, labels.dtype)
    if k is not None:
        discount = discount * (place < k)
    order = ranked(scores, group)
    best, gains = scores[order], labels[order]
    run = ((best[1:] != best[:-1]) | (group[1:] != group[:-1])).cumsum(0)
    run = torch.cat([run.new_zeros(1), run])  # of equal scores in a group
    count = labels.new_zeros(len(run)).index_add(0, run, torch.ones_like(gains))
    shared = (labels.new_zeros(len(run)).index_add(0, run, gains) / count)[run]
    found = sums(shared * discount, group, sizes)
    ideal = sums(labels[ranked(labels, group)] * discount, group, sizes)
    return torch.where(ideal > 0, found / ideal, 0)


def reciprocal_rank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns one over the rank of the first row with a label above 0, of shape `(groups,)`; 0 where there is none.

    Rows with the same score and the label 0 come before it.
    """
    group, relevant = group_of_rows(sizes), labels > 0
    least = scores.new_full((), -torch.inf)
    best = least.expand(len(sizes)).scatter_reduce(0, group, torch.where(relevant, scores, least), "amax")
    ahead = sums((~relevant & (scores >= best[group])).to(scores.dtype), group, sizes)
    return torch.where(best > least, 1 / (1 + ahead), 0)


def discounts(place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a gain at a place, from 0, is multiplied by."""
    return 1 / (place + 2).to(dtype).log2()
