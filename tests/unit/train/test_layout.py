"""The ranks of a mesh are laid out by host, whatever the order in which the cluster manager has numbered them."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from sparktorch.train.sharding.layout import groups_along, layout

DATA, PIPELINE, SHARD, TENSOR = range(4)


def apart(hosts: str, groups: list[list[int]]) -> int:
    """Returns how many groups have ranks on several hosts."""
    return sum(len({hosts[rank] for rank in group}) > 1 for group in groups)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 2, 8), (1, 2, 1, 8), (2, 1, 8, 1), (1, 1, 8, 2), (1, 8, 2, 1), (1, 2, 2, 4), (4, 1, 2, 2)]
)
@pytest.mark.parametrize("hosts", ["AB" * 8, "A" * 8 + "B" * 8, "ABBA" * 4, "ABCD" * 4])
def test_groups_that_fit_into_a_host_are_on_one_however_ranks_are_numbered(
    hosts: str, sizes: tuple[int, int, int, int]
) -> None:
    ranks = layout(hosts, sizes, ascending=False)
    assert sorted(ranks.flatten().tolist()) == list(range(16))
    assert ranks.flatten()[0] == 0
    inner = sizes[TENSOR]
    if inner <= hosts.count("A"):
        assert apart(hosts, groups_along(ranks, TENSOR)) == 0
    if inner * sizes[SHARD] <= hosts.count("A"):
        assert apart(hosts, groups_along(ranks, SHARD)) == 0


@pytest.mark.parametrize("hosts", ["A" * 8, "AB" * 4, "ABBA" * 2, "AAABBABB"])
def test_where_torch_sorts_the_ranks_of_groups_they_ascend_in_the_layout_too(hosts: str) -> None:
    for sizes in {(2, 1, 2, 2), *permutations((1, 1, 4, 2)), *permutations((1, 2, 2, 2))}:
        ranks = layout(hosts, sizes, ascending=True)
        for axis in (PIPELINE, SHARD, TENSOR):
            assert all(group == sorted(group) for group in groups_along(ranks, axis))
    assert apart("AB" * 4, groups_along(layout("AB" * 4, (1, 1, 2, 4), ascending=True), TENSOR)) == 0


@pytest.mark.parametrize("ascending", [False, True])
def test_on_one_host_and_along_one_dimension_ranks_are_in_their_order(ascending: bool) -> None:
    assert layout("A" * 8, (2, 1, 2, 2), ascending=ascending).flatten().tolist() == list(range(8))
    mixed = random.Random(0).choices("AB", k=8)
    assert layout(mixed, (1, 1, 8, 1), ascending=ascending).flatten().tolist() == list(range(8))
