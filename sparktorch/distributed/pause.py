"""Ends an attempt of a training early: all ranks stop after the same step, and no step needs a message for that."""

from __future__ import annotations

import threading
from typing import Any, Protocol

__all__ = ["Pause", "Paused"]

_TOPIC = "pause"


class Paused(BaseException):  # passes through a user's function, which may catch exceptions
    """All ranks end here, after a checkpoint; another attempt goes on from it."""


class _Client(Protocol):
    def post(self, topic: str, value: dict[str, Any]) -> None: ...

    def collect(self, topic: str) -> list[dict[str, Any]]: ...


class Pause:
    """A rank's part in a pause, for which the driver asks by `ControlServer.pause`.

    The thread of the heartbeats hears of it, and posts the first step after which this rank can still stop. The last of
    those of all ranks is the step after which they stop: no rank has gone past it, and each gets there. Until the
    driver asks, ranks do not wait for each other.
    """

    def __init__(self, client: _Client) -> None:
        """Takes the rank's client, by which ranks tell each other of their steps."""
        self._client = client
        self._lock = threading.Lock()
        self._next: int | None = None  # the first step after which this rank can stop; none before it trains
        self._posted: int | None = None
        self._sent = False
        self._last: int | None = None

    def begin(self, step: int) -> None:
        """From now on, this rank can stop after a step: that number at the earliest."""
        self._next = step

    def answer(self) -> None:
        """Answers the driver, which asks for a pause, once this rank trains; later calls do nothing."""
        if self._sent or self._next is None:
            return
        with self._lock:
            self._posted = self._next
        self._client.post(_TOPIC, {"step": self._posted})
        self._sent = True

    def stops_after(self, step: int) -> bool:
        """Returns whether all ranks stop after this step; each calls it after every step, with the same numbers.

        After the driver has asked, it waits once for the answers of all ranks, and raises as `Client.collect` does.
        """
        with self._lock:
            if self._posted is None:
                self._next = step + 1
                return False
        if self._last is None:
            self._last = max(found["step"] for found in self._client.collect(_TOPIC))
        return step == self._last
