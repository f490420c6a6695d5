"""Which rank has which place in a mesh, by the hosts that the ranks are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["groups_along", "layout"]


def layout(hosts: Sequence[str], sizes: Sequence[int], *, ascending: bool) -> torch.Tensor:
    """Returns the ranks in the shape `sizes`; `hosts` has the host of each rank.

    Ranks of a host follow each other, and so groups along inner dimensions are on one host where it has enough ranks.
    Rank 0 is the first. A mesh with one dimension has the ranks in their order, as its only group has all of them.

    With `ascending`, the ranks of each group ascend, but for those along the outermost dimension. Where those of a host
    do not, the ranks of each index of that dimension are sorted, and their groups may be spread over hosts.
    """
    count = len(hosts)
    if max(sizes) == count:
        return torch.arange(count).view(*sizes)
    by_host = torch.tensor(sorted(range(count), key=lambda rank: hosts.index(hosts[rank]))).view(*sizes)
    if not ascending or all((by_host.diff(dim=axis) > 0).all() for axis in range(1, len(sizes))):
        return by_host
    return by_host.flatten(1).sort().values.view(*sizes)


def groups_along(ranks: torch.Tensor, axis: int) -> list[list[int]]:
    """Returns the ranks of each group along one dimension of a layout."""
    groups: list[list[int]] = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return groups
