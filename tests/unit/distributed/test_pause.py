"""Where ranks stop is what the rank that is furthest can still do, however late each of them hears of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sparktorch.distributed.pause import Pause


class Exchange:
    """What two ranks tell each other."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.complete = threading.Event()

    def post(self, topic: str, value: dict[str, Any]) -> None:
        self.posted.append(value)
        if len(self.posted) == 2:
            self.complete.set()

    def collect(self, topic: str) -> list[dict[str, Any]]:
        assert self.complete.wait(10)
        return self.posted


@pytest.mark.parametrize(("heard", "stops"), [((3, 3), 4), ((3, 5), 6), ((5, 2), 6)])
def test_ranks_that_hear_at_different_steps_stop_after_the_same_one(heard: tuple[int, int], stops: int) -> None:
    exchange, ended = Exchange(), dict[int, int]()
    both = threading.Barrier(2)

    def train(rank: int) -> None:
        pause = Pause(exchange)
        pause.begin(1)
        for step in range(1, 9):
            if step == heard[rank] + 1:
                pause.answer()
                both.wait(10)
            if pause.stops_after(step):
                ended[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert ended == {0: stops, 1: stops}
