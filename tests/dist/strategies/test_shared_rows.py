"""Batches of the ranks that compute on the same rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ModuleError
from sparktorch.train.tensor_parallel.shared_rows import shared_rows
from tests.support.ranks import in_group

HOST = torch.device("cpu")


def part(world: World) -> Batch:
    """Returns a batch of one row in rank 0, and of three in rank 1, which has weights and longer rows."""
    rows, length = (3, 4) if world.rank else (1, 2)
    padded, mask = torch.full((rows, length), 1.0 + world.rank), torch.ones(rows, length, dtype=torch.bool)
    weight = torch.tensor([1.0, 2.0, 3.0]) if world.rank else None
    lengths = {0: torch.full((rows,), length)}
    label = torch.arange(rows) + 10 * world.rank
    return Batch((padded, mask), label, weight, rows, lengths=lengths, names=("x", "mask"), pads={0: -5.0})


def group() -> Any:
    return dist.group.WORLD


def of_both(world: World) -> list[Any]:
    before = torch.get_rng_state()
    with shared_rows(part(world), group(), HOST) as batch:
        drawn = float(torch.rand(()))
    torch.randint(2**31, ())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**31, ()), torch.randint(2**31, ())
    assert torch.equal(after, torch.get_rng_state())  # An exchange takes one number of a rank's generator.
    assert batch.rows == 4
    assert batch.label is not None
    assert batch.weight is not None
    return [batch.inputs[0].tolist(), batch.label.tolist(), batch.weight.tolist(), batch.lengths[0].tolist(), drawn]


def test_each_rank_gets_the_rows_of_all_padded_to_the_longest_and_all_draw_the_same_numbers() -> None:
    first, second = in_group(2, of_both)
    assert first == second
    assert first[:4] == [[[1, 1, -5, -5], *[[2, 2, 2, 2]] * 3], [0, 10, 11, 12], [1, 1, 2, 3], [2, 4, 4, 4]]


def without_rows(world: World) -> list[Any]:
    """Shares rows of which rank 0 has none, and then none at all."""
    mine = part(world)
    none = replace(mine, rows=0, weight=torch.zeros(mine.sample_count), loss_weight=torch.zeros(mine.sample_count))
    with shared_rows(mine if world.rank else none, group(), HOST) as batch, shared_rows(none, group(), HOST) as nothing:
        assert batch.label is not None
        assert batch.loss_weight is not None
        assert nothing.weight is not None
        return [batch.rows, batch.label.tolist(), batch.loss_weight.tolist(), nothing.rows, nothing.weight.tolist()]


def test_placeholders_are_left_out_where_another_rank_has_rows() -> None:
    assert in_group(2, without_rows) == [[3, [10, 11, 12], [1, 1, 1], 0, [0, 0, 0, 0]]] * 2


def of_groups(world: World) -> list[Any]:
    """Shares two groups of one and two rows, and one group of three."""
    sizes = torch.tensor([3]) if world.rank else torch.tensor([1, 2])
    values, weight = torch.full((3, 1), float(world.rank)), torch.ones(len(sizes)) + world.rank
    batch = Batch((values,), torch.arange(3), weight, len(sizes), sizes=sizes)
    with shared_rows(batch, group(), HOST) as every:
        assert every.sizes is not None
        assert every.weight is not None
        return [every.rows, every.sizes.tolist(), every.weight.tolist(), every.inputs[0][:, 0].tolist()]


def test_groups_stay_whole() -> None:
    assert in_group(2, of_groups) == [[3, [1, 2, 3], [1, 1, 2], [0, 0, 0, 1, 1, 1]]] * 2


def refused(world: World) -> None:
    sparse = Batch((torch.eye(2).to_sparse_csr() if world.rank else torch.eye(2),), None, None, 2)
    other = Batch((torch.ones(2, 3 + world.rank),), None, None, 2)
    for batch, says in ((sparse, "inputs are sparse or nested"), (other, "tensors of other shapes or dtypes")):
        with pytest.raises(ModuleError, match=says), shared_rows(batch, group(), HOST):
            pass


def test_rows_that_cannot_be_put_together_are_refused_in_all_ranks() -> None:
    in_group(2, refused)
