"""Heartbeats: sends a rank's own, and tells which ranks are silent or make no progress.

All times are taken from the observing process's clock: clocks of other hosts may differ.

One thread of the driver serves the store for all ranks. Each rank asks it at most once in as many milliseconds as there
are ranks (`paced`), so what it does in a second stays the same from some hundred ranks on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from sparktorch.distributed.store import OpenStore, SealedStore

__all__ = [
    *("Beats", "Heart", "Pulse", "Pulses"),
    *("beat_seconds", "paced", "silent_among", "silent_seconds", "waited_for"),
]

_RANK_SECONDS = 0.001
_BEAT_SECONDS = 0.5
_SILENT_BEATS = 2.4
_BODY = "sparktorch/worker/"
# After a try to connect, a rank waits so long for the next one.
_RETRY_SECONDS = 0.2
# A rank whose driver is gone gets so long to end by itself.
_LEAVING_SECONDS = 2.0

Beat = dict[str, Any]
R = TypeVar("R")


def paced(seconds: float, ranks: int) -> float:
    """Returns how often a rank, or the driver for all ranks, asks the store: `seconds`, or with many ranks longer."""
    return max(seconds, ranks * _RANK_SECONDS)


def beat_seconds(ranks: int) -> float:
    """Returns the seconds between two heartbeats of a rank."""
    return paced(_BEAT_SECONDS, ranks)


def silent_seconds(ranks: int) -> float:
    """Returns the seconds without a heartbeat after which a rank counts as silent: more than two beats."""
    return _SILENT_BEATS * beat_seconds(ranks)


class Beats:
    """Reads the last heartbeats of all ranks at once."""

    def __init__(
        self, list_keys: Callable[[], list[str]], read: Callable[[list[str]], Sequence[Beat | None]], ranks: int
    ) -> None:
        """Takes functions that list the store's keys, and that read keys which are in the store."""
        self._list_keys, self._read = list_keys, read
        self._begun, self._missing = list[int](), set(range(ranks))

    def read(self) -> dict[int, Beat]:
        """Returns the last heartbeat of each rank that has begun."""
        if self._missing:
            keys = set(self._list_keys())
            begun_since = {rank for rank in self._missing if f"beat/{rank}" in keys}
            self._begun, self._missing = sorted({*self._begun, *begun_since}), self._missing - begun_since
        begun = self._begun
        beats = zip(begun, self._read([f"beat/{rank}" for rank in begun]), strict=True)
        return {rank: beat for rank, beat in beats if beat is not None}


class Heart:
    """Two threads: one sends a rank's heartbeats and log lines, one ends the process when the driver is gone.

    They are separate because a store behind a broken network neither answers nor refuses: a request may block for
    minutes.
    """

    def __init__(
        self,
        beat: Callable[[SealedStore], object],
        pause: Callable[[SealedStore], object],
        rank: int,
        store: SealedStore,
        open_store: OpenStore,
        *,
        interval: float,
        patience: float,
    ) -> None:
        """Takes a function that sends a heartbeat, and one that answers the driver when it asks for a pause.

        Both get a connection: `store`, and, when that is broken, one that `open_store` opens. `interval` is the time
        between two heartbeats, and `patience` the time for which those of the driver may stay away, in seconds.
        """
        self._send, self._pause, self._rank, self._open_store = beat, pause, rank, open_store
        self._store = store
        self._patience = patience
        self._interval = min(interval, patience / 4)
        self._leaving = max(_LEAVING_SECONDS, 2 * interval)  # A rank that waits looks as often as it beats.
        self._owner = threading.get_ident()
        self._driver: bytes | None = None
        self._beats_of_driver = 0
        self._over = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Sends heartbeats until `stop` is set, and a last one; ends the process if the driver is gone or cancels.

        The last one takes the connection of all others, so none overtakes it. It answers a question for a pause, too.
        """
        beats = threading.Thread(target=self._beat, args=(stop,), name="sparktorch-beat", daemon=True)
        beats.start()
        # Checks are counted, not the time of the clock: the process may have been suspended.
        beats_before, silent = self._beats_of_driver, 0.0
        while silent < self._patience and not self._over.is_set():
            if stop.wait(self._interval):
                beats.join(_LEAVING_SECONDS)
                return
            silent = silent + self._interval if self._beats_of_driver == beats_before else 0.0
            beats_before = self._beats_of_driver
        if not stop.wait(self._leaving):
            silence = f"has not been heard of for driverTimeout ({self._patience:g} s)"
            why = silence if silent >= self._patience else "has gone, or has given up the fit"
            print(f"rank {self._rank} ends: its driver {why}", file=sys.stderr, flush=True)
            os._exit(1)

    def _beat(self, stop: threading.Event) -> None:
        """Sends heartbeats until `stop` is set, the driver cancels, or no connection can be opened any more."""
        store: SealedStore | None = self._store
        self._store.set_timeout(timedelta(seconds=self._patience))
        while store is not None:
            last = stop.wait(self._interval)
            try:
                self._send(store)
                if self._is_cancelled(store, last=last) or last:
                    break
            except (dist.DistError, RuntimeError):
                # A broken connection does not mean that the driver is gone.
                store = None if last else self._open(stop)
        self._over.set()

    def _open(self, stop: threading.Event) -> SealedStore | None:
        """Returns a connection; `None` if there is none in time, or once `stop` is set: the store may be closed."""
        deadline = time.monotonic() + self._patience
        while not stop.is_set() and time.monotonic() < deadline:
            with suppress(dist.DistError, RuntimeError):
                store = self._open_store()
                store.set_timeout(timedelta(seconds=self._patience))
                return store
            stop.wait(_RETRY_SECONDS)
        return None

    def _is_cancelled(self, store: SealedStore, *, last: bool) -> bool:
        """Reads the driver's heartbeat, and does what it asks for: a pause, or the rank's Python stack.

        If a rank hosts the store there is none, and any answer counts.
        """
        message = store.peek("driver")
        if message is None and self._driver is not None:
            return True  # This is the store of a later attempt, at the same port.
        if message is None or message != self._driver:
            self._beats_of_driver += 1
        self._driver = message
        request: dict[str, Any] = {"cancelled": False, "pause": False, "stacks": []}
        if message is not None:
            request = json.loads(message)
        if request["pause"] or last:
            self._pause(store)
        if self._rank in request["stacks"]:
            store.set(f"stack/{self._rank}", json.dumps({"stack": _stack_of(self._owner)}))
        return bool(request["cancelled"])


@dataclass
class Pulse(Generic[R]):
    """A rank's last heartbeat, when it last changed, and when its progress last changed, by `time.monotonic`."""

    beat: float
    moved: float
    record: R


def _all_fields(record: R) -> R:
    """Returns a heartbeat of which every field says that the rank makes progress."""
    return record


class Pulses(dict[int, Pulse[R]]):
    """The last heartbeat of each rank, and when it last changed."""

    def __init__(self, moves: Callable[[R], Any] = _all_fields) -> None:
        """Takes a function that returns the progress fields of a heartbeat, by default all of them."""
        super().__init__()
        self._moves = moves

    def note(self, rank: int, record: R, *, at: float | None = None) -> None:
        """Records a rank's heartbeat, seen at time `at` of `time.monotonic`, by default now."""
        now = time.monotonic() if at is None else at
        last = self.get(rank)
        if last is None:
            self[rank] = Pulse(now, now, record)
            return
        pulse = Pulse(last.beat, last.moved, record)
        if last.record != record:
            pulse.beat = now
            if self._moves(last.record) != self._moves(record):
                pulse.moved = now
        self[rank] = pulse

    def silence(self, rank: int) -> float:
        """Returns the seconds since a rank's heartbeat last changed."""
        return time.monotonic() - self[rank].beat


def silent_among(
    ranks: Iterable[int], read: Callable[[], Mapping[int, Beat]], pulses: Pulses[Beat], seconds: float
) -> set[int]:
    """Returns the ranks whose heartbeats do not change for `seconds` though they have not said that they end.

    It waits until each rank has sent another heartbeat, or has been silent for so long. `pulses` says since when a
    heartbeat has not changed.
    """
    before = beats = read()
    waiting, silent = set(ranks), set[int]()
    while True:
        now = time.monotonic()
        for rank in waiting & beats.keys():
            pulses.note(rank, beats[rank], at=now)
        silent |= {rank for rank in waiting if rank in pulses and now - pulses[rank].beat >= seconds}
        waiting = {rank for rank in waiting & beats.keys() if beats[rank] == before.get(rank)} - silent
        if not waiting:
            return {rank for rank in silent if not pulses[rank].record["ended"]}
        time.sleep(seconds / 20)
        beats = read()


def waited_for(pulses: Mapping[int, Pulse[dict[str, Any]]]) -> list[int]:
    """Returns the ranks that wait for no other rank; all other ranks may be waiting for them.

    A rank that has started more collectives than another one waits for that one.
    """
    begun = [pulse.record["collectives"] for pulse in pulses.values()]
    fewest = min((count for count in begun if count is not None), default=None)
    return [
        rank
        for rank, pulse in pulses.items()
        if not pulse.record["waiting"] and (fewest is None or pulse.record["collectives"] in (fewest, None))
    ]


def _stack_of(thread: int) -> str:
    """Returns the Python stack of a thread, without Spark's frames outside `worker`."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    body = [index for index, frame in enumerate(frames) if _BODY in frame.filename]
    return "".join(traceback.format_list(frames[body[0] :] if body else frames))
