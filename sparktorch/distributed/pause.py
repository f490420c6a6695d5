"""Ends an attempt of a training early: all ranks stop after the same step, and the steps before send no messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from sparktorch.base.world import World
from sparktorch.distributed.store import SealedStore

__all__ = ["Pause", "Paused"]

_TOPIC = "pause"


class Paused(BaseException):
    """All ranks end here, after a checkpoint; another attempt goes on from it.

    It is no `Exception`, so that it passes through a user's function, which may catch exceptions.
    """


class Pause:
    """A rank's part in a pause, for which the driver asks by `ControlServer.pause`.

    1. The training calls `begin`, and `stops_after` after every step. Ranks do not wait for each other meanwhile.
    2. When the driver asks, the thread of the heartbeats calls `answer`: it writes down the first step after which this
       rank can still stop.
    3. All ranks stop after the last of the steps that they have answered: no rank has gone past it, and each rank gets
       there. Rank 0 finds out this step, also in the thread of its heartbeats, because its training may be waiting for
       a rank that waits in `stops_after`.
    """

    def __init__(self, world: World, read: Callable[[str], dict[str, Any]]) -> None:
        """Takes the rank's world, and a function that waits for a value in the store, see `Client.read`."""
        self._world = world
        self._read = read
        self._lock = threading.Lock()
        # The first step after which this rank can stop; `None` before it trains.
        self._next: int | None = None
        # The step that it has answered the driver; `None` before the driver has asked.
        self._answer: int | None = None
        # The step after which all ranks stop; `None` before this rank has read it.
        self._last: int | None = None
        # Whether the rank has ended in a pause.
        self.paused = False

    def begin(self, step: int) -> None:
        """Notes that this rank trains: it can stop after `step` or a later one."""
        self._next = step

    def answer(self, store: SealedStore) -> None:
        """Answers the driver, which asks for a pause, once this rank trains; rank 0 also tells where all ranks stop.

        It is called with each heartbeat after the driver has asked, and gives the same answer each time.
        """
        with self._lock:
            if self._answer is None:
                self._answer = self._next
        if self._answer is None:
            return
        store.set(f"{_TOPIC}/{self._world.rank}", json.dumps({"step": self._answer}))
        if self._world.is_main:
            keys = [f"{_TOPIC}/{rank}" for rank in range(self._world.world_size)]
            if store.check(keys):
                last = max(json.loads(value)["step"] for value in store.multi_get(keys))
                store.set(_TOPIC, json.dumps({"step": last}))

    def stops_after(self, step: int) -> bool:
        """Returns whether all ranks stop after this step; each rank calls it after every step, with the same numbers.

        After the driver has asked, it waits once until all ranks have answered, and raises as `Client.collect` does.
        """
        with self._lock:
            if self._answer is None:
                self._next = step + 1
                return False
        if self._last is None:
            self._last = self._read(_TOPIC)["step"]
        return step == self._last
