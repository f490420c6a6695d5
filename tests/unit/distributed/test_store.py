"""The port on which a store listens, and the step after which ranks that hear of a pause at different ones stop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch.distributed as dist

from sparktorch.base.world import World
from sparktorch.distributed.pause import Pause
from sparktorch.distributed.store import SealedStore, host_store
from sparktorch.errors import ConfigError
from tests.support.proxy import free_port


def test_a_store_takes_the_first_free_port_of_the_range_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setenv("SPARKTORCH_PORTS", f"{first}-{first + 30}")
    (one, taken), (two, next_one) = host_store("127.0.0.1"), host_store("127.0.0.1")
    assert taken == one.port == first
    assert first < next_one == two.port <= first + 30

    monkeypatch.setenv("SPARKTORCH_PORTS", str(first))
    with pytest.raises(OSError, match="in use"):
        host_store("127.0.0.1")


@pytest.mark.parametrize("given", ["some", "40001-40000", "-40000"])
def test_what_is_no_range_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SPARKTORCH_PORTS", given)
    with pytest.raises(ConfigError, match="is no range of ports"):
        host_store("127.0.0.1")


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
