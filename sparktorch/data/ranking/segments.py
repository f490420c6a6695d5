"""Rows in groups: a batch has the rows of one group after the other, and the number of rows of each."""

from __future__ import annotations

import torch

__all__ = ["group_of_rows", "places", "ranked", "sums"]


def group_of_rows(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the number of the group of each row, int64 of shape `(rows,)`."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)


def places(sizes: torch.Tensor) -> torch.Tensor:
    """Returns the place of each row in its group, from 0, int64 of shape `(rows,)`."""
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return torch.arange(len(starts), device=sizes.device) - starts


def ranked(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Returns the order that sorts the rows of each group by falling values, equal ones as they come."""
    order = values.argsort(descending=True, stable=True)
    return order[group[order].argsort(stable=True)]


def sums(values: torch.Tensor, group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the values of each group, of shape `(groups,)`."""
    return values.new_zeros(len(sizes)).index_add(0, group, values)
