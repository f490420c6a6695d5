"""Where ranks stop is what the rank that is furthest can still do, however late each of them hears of it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from sparktorch.base.world import World
from sparktorch.distributed.pause import Pause
from sparktorch.distributed.store import SealedStore


@pytest.mark.parametrize(("heard", "stops"), [((3, 3), 4), ((3, 5), 6), ((5, 2), 6)])
def test_ranks_that_hear_at_different_steps_stop_after_the_same_one(heard: tuple[int, int], stops: int) -> None:
    store, ended = SealedStore("token", dist.HashStore()), dict[int, int]()
    both = threading.Barrier(2)

    def read(key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(store.get(key))
        return found

    def train(rank: int) -> None:
        pause = Pause(World(rank=rank, world_size=2), read)
        pause.begin(1)
        for step in range(1, 9):
            if step == heard[rank] + 1:
                pause.answer(store)
                both.wait(10)
                pause.answer(store)
            if pause.stops_after(step):
                ended[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert ended == {0: stops, 1: stops}
