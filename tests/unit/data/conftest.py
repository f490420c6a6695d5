"""The rows of a rank, wherever it keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparktorch.data.columns import GROUP, KEY, ORDER, VALIDATION
from sparktorch.data.dataset.base import Shard
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.storage import RowStorage
from tests.support.frames import Table

__all__ = ["Make"]

Make = Callable[..., Shard]


@pytest.fixture(params=["memory", "disk", "disk, in order"])
def shard_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes placed shards, kept in memory or on disk, there of rows that arrive in their order or in any."""
    made = []

    def make(
        table: Table, *, plan: SamplingPlan | None = None, first: int = 0, batch_size: int = 20, **options: Any
    ) -> Shard:
        arrays = table.arrays
        if request.param == "disk, in order" and GROUP in arrays:
            table = table.take(np.lexsort((arrays[ORDER], arrays[GROUP].view(np.uint64))))
        elif request.param == "disk, in order":
            held_out = arrays.get(VALIDATION, np.zeros(len(table), np.bool_))
            table = table.take(np.lexsort((arrays[KEY].view(np.uint64), held_out)))
        storage = RowStorage() if request.param == "memory" else RowStorage(tmp_path, budget=0)
        shard = read_shard(table.batches(size=30), table.columns, storage=storage, **options)
        shard.schedule(first, plan or SamplingPlan(rows=shard.rows, batch_size=batch_size, seed=3))
        made.append(shard)
        return shard

    yield make
    for shard in made:
        shard.close()
    assert not list(tmp_path.iterdir())
