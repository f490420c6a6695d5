"""Losses and metrics of rankings, over the groups of a batch at once.

A batch has the rows of one group after the other, and the number of rows of each; a loss or metric has a value for each
group, whose rows are ordered by score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch.nn import functional as F

from sparktorch.errors import ModuleError

__all__ = ["LOSSES", "measured", "ndcg", "reciprocal_rank"]


GroupLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_members(loss: GroupLoss) -> GroupLoss:
    """Lets a loss take the scores of several members, `(rows, members)`: it returns the mean of the members' losses.

    A network for tables trains its members so. Labels then have the same shape.
    """

    @wraps(loss)
    def of_members(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if scores.dim() != 2 or scores.shape != labels.shape:
            return loss(scores, labels, sizes)
        members = scores.shape[1]  # The groups of each are groups of their own.
        losses = loss(scores.t().flatten(), labels.t().flatten(), sizes.repeat(members))
        return losses.view(members, -1).mean(0)

    return of_members


@_of_members
def listnet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy between the softmax of a group's labels and that of its scores, of shape `(groups,)`.

    Source: Cao et al., "Learning to rank: from pairwise approach to listwise approach", ICML 2007, with top-one
    probabilities.
    """
    _check(scores, labels)
    group = _group_of_rows(sizes)
    target = _log_softmax(labels, group, sizes).exp()
    return _sums(-target * _log_softmax(scores, group, sizes), group, sizes)


@_of_members
def ranknet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the mean logistic loss over the pairs of a group with different labels; 0 for one without pairs.

    Source: Burges et al., "Learning to rank using gradient descent", ICML 2005.
    """
    _check(scores, labels)
    better, worse, group = _pairs(labels, sizes)
    losses = F.softplus(scores[worse] - scores[better])
    count = _sums(torch.ones_like(losses), group, sizes)
    return _sums(losses, group, sizes) / count.clamp(min=1)


@_of_members
def lambdarank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the logistic losses of a group's pairs, each times the NDCG that swapping the two changes.

    Source: Burges, "From RankNet to LambdaRank to LambdaMART: an overview", MSR-TR-2010-82; the gain is the label.
    """
    _check(scores, labels)
    group_of_row = _group_of_rows(sizes)
    better, worse, group = _pairs(labels, sizes)
    discount = _discounts(_positions(sizes), scores.dtype)
    ideal = _sums(labels[_ranked(labels, group_of_row)] * discount, group_of_row, sizes).clamp(
        min=torch.finfo(scores.dtype).tiny
    )
    discount_of_row = torch.empty_like(discount)
    discount_of_row[_ranked(scores.detach(), group_of_row)] = discount
    change = (labels[better] - labels[worse]) * (discount_of_row[better] - discount_of_row[worse]).abs() / ideal[group]
    return _sums(change * F.softplus(scores[worse] - scores[better]), group, sizes)


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
    return shifted - _sums(shifted.exp(), group, sizes).log()[group]


def _pairs(labels: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows of each pair of a group with different labels, that with the larger one first, and the group."""
    group = _group_of_rows(sizes)
    row = torch.arange(len(group), device=sizes.device)
    partners = sizes[group]
    first_of_group = (row - _positions(sizes)).repeat_interleave(partners)
    better, worse = row.repeat_interleave(partners), first_of_group + _positions(partners)
    differs = labels[better] > labels[worse]
    better, worse = better[differs], worse[differs]
    return better, worse, group[better]


def measured(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the metrics of each group that a validation shows."""
    return {"ndcg_at_10": ndcg(scores, labels, sizes, k=10), "mrr": reciprocal_rank(scores, labels, sizes)}


def ndcg(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor, *, k: int | None = None) -> torch.Tensor:
    """Returns the normalised discounted cumulative gain of the first `k` rows of each group, of shape `(groups,)`.

    The gain is the label, and rows with equal scores share theirs, as in scikit-learn's `ndcg_score`. A group without
    labels above 0 has 0.

    Source: Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 20 (2002).
    """
    group, position = _group_of_rows(sizes), _positions(sizes)
    discount = _discounts(position, labels.dtype)
    if k is not None:
        discount = discount * (position < k)
    order = _ranked(scores, group)
    best, gains = scores[order], labels[order]
    run = ((best[1:] != best[:-1]) | (group[1:] != group[:-1])).cumsum(0)
    run = torch.cat([run.new_zeros(1), run])  # A run is the rows of a group that have equal scores.
    count = labels.new_zeros(len(run)).index_add(0, run, torch.ones_like(gains))
    shared = (labels.new_zeros(len(run)).index_add(0, run, gains) / count)[run]
    gained = _sums(shared * discount, group, sizes)
    ideal = _sums(labels[_ranked(labels, group)] * discount, group, sizes)
    return torch.where(ideal > 0, gained / ideal, 0)


def reciprocal_rank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns one over the rank of the first row with a label above 0, of shape `(groups,)`; 0 where there is none.

    Rows with the same score and the label 0 come before it.
    """
    group, relevant = _group_of_rows(sizes), labels > 0
    least = scores.new_full((), -torch.inf)
    best = least.expand(len(sizes)).scatter_reduce(0, group, torch.where(relevant, scores, least), "amax")
    ahead = _sums((~relevant & (scores >= best[group])).to(scores.dtype), group, sizes)
    return torch.where(best > least, 1 / (1 + ahead), 0)


def _discounts(position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the factors of gains at positions, which count from 0."""
    return 1 / (position + 2).to(dtype).log2()


def _group_of_rows(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the number of the group of each row, int64 of shape `(rows,)`."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def _positions(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the position of each row in its group, from 0, int64 of shape `(rows,)`."""
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.arange(len(starts), device=sizes.device) - starts


def _ranked(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns the order that sorts the rows of each group by falling values, equal ones as they come."""
    order = values.argsort(descending=True, stable=True)
    return order[group[order].argsort(stable=True)]


def _sums(values: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the values of each group, of shape `(groups,)`."""
    return values.new_zeros(len(sizes)).index_add(0, group, values)
