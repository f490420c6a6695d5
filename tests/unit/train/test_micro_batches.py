"""Which steps `microBatchSize="auto"` tries, and into how many micro-batches it splits them."""

from __future__ import annotations

from unittest import mock

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.train.loop.micro_batches import MicroBatches

WORLD = World(rank=0, world_size=1, local_rank=0, host="here", address="127.0.0.1", device="cpu")
ROWS = [7, 5, 6, 4, 7, 5, 8, 8, 3, 9]


def planned(split: MicroBatches, rows: list[int], *, varies: bool = False) -> list[bool]:
    dataset = mock.Mock(varies=varies)
    dataset.step_rows.return_value = torch.tensor(rows)
    split.begin(dataset, 0, 0)
    for step, tried in enumerate(split.tried):
        if tried:
            assert split.fits(step, full=False)
    return split.tried


def split_of(*, min_rows: int = 1) -> MicroBatches:
    config = TrainConfig(batch_size=32, micro_batch_size="auto")
    return MicroBatches(config, WORLD, steps=len(ROWS), min_rows=min_rows, same_count=False)


def steps(tried: list[bool]) -> list[int]:
    return [step for step, found in enumerate(tried) if found]


def test_first_steps_are_tried_and_then_those_that_need_more_than_any_before() -> None:
    split = split_of()
    assert steps(planned(split, ROWS)) == [0, 1, 2, 3, 4, 6, 9]
    assert steps(planned(split, ROWS)) == []
    assert steps(planned(split, [9, 10, 10, 11, 3, 3, 3, 3, 3, 3])) == [1, 3]


def test_rows_of_different_sizes_are_tried_in_every_step() -> None:
    split = split_of()
    assert [all(planned(split, ROWS, varies=True)) for _ in range(2)] == [True, True]


def test_a_full_device_halves_its_micro_batches_until_they_cannot_be_divided() -> None:
    split = split_of(min_rows=2)
    planned(split, ROWS)
    sizes = []
    while not split.smallest(9):
        assert not split.fits(9, full=True)
        sizes.append((split.size, split.parts[9]))
    assert sizes == [(4, 3), (2, 4)]
