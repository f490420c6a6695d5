"""Losses and metrics of rankings, computed for all groups of a batch at once.

They take `scores` and `labels` of shape `(rows,)`, with the rows of one group after the other, and `sizes`, int64 of
shape `(groups,)`, with the number of rows in each group. They return a value for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch.nn import functional as F

from sparktorch.errors import ModuleError

__all__ = ["LOSSES", "measured", "ndcg", "reciprocal_rank"]


GroupLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _accepts_members(loss: GroupLoss) -> GroupLoss:
    """Lets a loss also take the scores of several members, `(rows, members)`: it returns the mean of their losses.

    Labels then have the same shape. The network for tables trains its members in this way.
    """

    @wraps(loss)
    def loss_of_members(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if scores.dim() != 2 or scores.shape != labels.shape:
            return loss(scores, labels, sizes)
        members = scores.shape[1]
        # The rows of all members become one batch, in which each member has its own groups.
        losses = loss(scores.t().flatten(), labels.t().flatten(), sizes.repeat(members))
        return losses.view(members, -1).mean(0)

    return loss_of_members


@_accepts_members
def listnet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy between the softmax of a group's labels and the softmax of its scores.

    Source: Cao et al., "Learning to rank: from pairwise approach to listwise approach", ICML 2007, with top-one
    probabilities.
    """
    _check(scores, labels)
    group = _group_of_rows(sizes)
    probabilities = _log_softmax(labels, group, sizes).exp()
    return _sums(-probabilities * _log_softmax(scores, group, sizes), group, sizes)


@_accepts_members
def ranknet(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the mean logistic loss over the pairs of rows with different labels; 0 for a group without such pairs.

    Source: Burges et al., "Learning to rank using gradient descent", ICML 2005.
    """
    _check(scores, labels)
    better, worse, group = _pairs(labels, sizes)
    losses = F.softplus(scores[worse] - scores[better])
    count = _sums(torch.ones_like(losses), group, sizes)
    return _sums(losses, group, sizes) / count.clamp(min=1)


@_accepts_members
def lambdarank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the logistic losses of pairs, each times the change of NDCG when the two rows are swapped.

    Source: Burges, "From RankNet to LambdaRank to LambdaMART: an overview", MSR-TR-2010-82; the gain is the label.
    """
    _check(scores, labels)
    group_of_row = _group_of_rows(sizes)
    better, worse, group = _pairs(labels, sizes)
    discount = _discounts(_positions(sizes), scores.dtype)
    ideal = _sums(labels[_order_in_groups(labels, group_of_row)] * discount, group_of_row, sizes)
    ideal = ideal.clamp(min=torch.finfo(scores.dtype).tiny)
    discount_of_row = torch.empty_like(discount)
    discount_of_row[_order_in_groups(scores.detach(), group_of_row)] = discount
    change = (labels[better] - labels[worse]) * (discount_of_row[better] - discount_of_row[worse]).abs() / ideal[group]
    return _sums(change * F.softplus(scores[worse] - scores[better]), group, sizes)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"listnet": listnet, "ranknet": ranknet, "lambdarank": lambdarank}


def _check(scores: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuses scores that are not one for each label."""
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
    """Returns all pairs of rows in a group with different labels: the better rows, the worse rows, and the groups."""
    group = _group_of_rows(sizes)
    row = torch.arange(len(group), device=sizes.device)
    # Each row is paired with all rows of its group, itself among them.
    partners = sizes[group]
    first_of_group = (row - _positions(sizes)).repeat_interleave(partners)
    left = row.repeat_interleave(partners)
    right = first_of_group + _positions(partners)
    is_better = labels[left] > labels[right]
    better = left[is_better]
    return better, right[is_better], group[better]


def measured(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the metrics that a validation shows, by name: a value for each group."""
    return {"ndcg_at_10": ndcg(scores, labels, sizes, k=10), "mrr": reciprocal_rank(scores, labels, sizes)}


def ndcg(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor, *, k: int | None = None) -> torch.Tensor:
    """Returns the normalised discounted cumulative gain of the first `k` rows of each group, of shape `(groups,)`.

    The gain is the label, and rows with equal scores share their gains, as in scikit-learn's `ndcg_score`. A group
    without labels above 0 has 0.

    Source: Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 20 (2002).
    """
    group = _group_of_rows(sizes)
    position = _positions(sizes)
    discount = _discounts(position, labels.dtype)
    if k is not None:
        discount = discount * (position < k)
    order = _order_in_groups(scores, group)
    sorted_scores = scores[order]
    gains = labels[order]
    # A run is the rows of a group that have equal scores.
    begins_run = (sorted_scores[1:] != sorted_scores[:-1]) | (group[1:] != group[:-1])
    run = begins_run.cumsum(0)
    run = torch.cat([run.new_zeros(1), run])
    run_sizes = labels.new_zeros(len(run)).index_add(0, run, torch.ones_like(gains))
    shared_gains = (labels.new_zeros(len(run)).index_add(0, run, gains) / run_sizes)[run]
    discounted = _sums(shared_gains * discount, group, sizes)
    ideal = _sums(labels[_order_in_groups(labels, group)] * discount, group, sizes)
    return torch.where(ideal > 0, discounted / ideal, 0)


def reciprocal_rank(scores: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns one over the rank of the first row with a label above 0, of shape `(groups,)`; 0 where there is none.

    Rows with the same score and the label 0 count as before it.
    """
    group = _group_of_rows(sizes)
    is_relevant = labels > 0
    least = scores.new_full((), -torch.inf)
    best_relevant = least.expand(len(sizes)).scatter_reduce(0, group, torch.where(is_relevant, scores, least), "amax")
    is_ahead = ~is_relevant & (scores >= best_relevant[group])
    ahead = _sums(is_ahead.to(scores.dtype), group, sizes)
    return torch.where(best_relevant > least, 1 / (1 + ahead), 0)


def _discounts(position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the factors of gains at positions in the order, which count from 0."""
    return 1 / (position + 2).to(dtype).log2()


def _group_of_rows(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the index of each row's group, int64 of shape `(rows,)`."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def _positions(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the position of each row in its group, from 0, int64 of shape `(rows,)`."""
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.arange(len(starts), device=sizes.device) - starts


def _order_in_groups(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns the indices that sort the rows of each group by descending values; equal values keep their order."""
    order = values.argsort(descending=True, stable=True)
    return order[group[order].argsort(stable=True)]


def _sums(values: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the values of each group, of shape `(groups,)`."""
    return values.new_zeros(len(sizes)).index_add(0, group, values)
