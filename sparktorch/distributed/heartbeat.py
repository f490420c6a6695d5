"""Heartbeats: sends those of a rank, and tells which ranks are silent or make no progress.

All times are taken from the observing process's clock: clocks of other hosts may differ.

One thread of the driver serves the store for all ranks. With many ranks, each rank asks the store less often: at most
once in as many milliseconds as there are ranks (`paced`). So the load on that thread stays the same from some hundred
ranks on.
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
    "Beats",
    "Heart",
    "Pulse",
    "Pulses",
    "beat_seconds",
    "paced",
    "silent_among",
    "silent_seconds",
    "suspects",
]

# The store has this time to answer one rank.
_RANK_SECONDS = 0.001
_BEAT_SECONDS = 0.5
# A rank counts as silent after this many beats.
_SILENT_BEATS = 2.4
# The part of a rank's stack that users know begins with the first frame from this folder.
_BODY = "sparktorch/worker/"
# A rank that could not connect tries again after this time.
_RETRY_SECONDS = 0.2
# A rank whose driver is gone has this time to end by itself.
_LEAVING_SECONDS = 2.0

Beat = dict[str, Any]
R = TypeVar("R")


def paced(seconds: float, ranks: int) -> float:
    """Returns the pause, in seconds, after which a rank asks the store again: `seconds`, or longer with many ranks.

    The driver, which asks once for all ranks, keeps the same pauses.
    """
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
        """Takes a function that lists the store's keys, and a function that reads keys which are in the store."""
        self._list_keys = list_keys
        self._read = read
        self._begun: list[int] = []
        self._missing = set(range(ranks))

    def read(self) -> dict[int, Beat]:
        """Returns the last heartbeat of each rank that has begun."""
        # Two threads may read at once, so both collections are replaced, never changed.
        if self._missing:
            keys = set(self._list_keys())
            begun_since = {rank for rank in self._missing if f"beat/{rank}" in keys}
            self._begun = sorted({*self._begun, *begun_since})
            self._missing = self._missing - begun_since
        begun = self._begun
        beats = zip(begun, self._read([f"beat/{rank}" for rank in begun]), strict=True)
        return {rank: beat for rank, beat in beats if beat is not None}


class Heart:
    """Two threads: one sends a rank's heartbeats and log lines, the other ends the process when the driver is gone.

    The threads are separate because a store behind a broken network neither answers nor refuses: a request may block
    for minutes.
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
        """Takes the rank's functions for its heartbeats, and its connection to the store.

        Args:
            beat: Sends a heartbeat over a connection.
            pause: Answers, over a connection, the driver that asks for a pause.
            rank: The rank.
            store: The connection.
            open_store: Opens another connection when the first one is broken.
            interval: Seconds between two heartbeats.
            patience: Seconds for which the driver's heartbeats may stay away.
        """
        self._send = beat
        self._pause = pause
        self._rank = rank
        self._store = store
        self._open_store = open_store
        self._patience = patience
        self._interval = min(interval, patience / 4)
        # A rank that waits for others sees only with its next look, one interval later at most, that it must end.
        self._leaving_seconds = max(_LEAVING_SECONDS, 2 * interval)
        self._owner = threading.get_ident()
        # The driver's last heartbeat, and the number of answers that have shown so far that the driver lives.
        self._driver_beat: bytes | None = None
        self._beats_of_driver = 0
        self._has_ended = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Sends heartbeats until `stop` is set, and a last one; ends the process if the driver is gone or cancels.

        The last heartbeat takes the connection of all earlier ones, so none overtakes it. With it, the rank also
        answers a driver that asks for a pause.
        """
        beat_thread = threading.Thread(target=self._beat, args=(stop,), name="sparktorch-beat", daemon=True)
        beat_thread.start()
        beats_before = self._beats_of_driver
        silent_for = 0.0
        while silent_for < self._patience and not self._has_ended.is_set():
            if stop.wait(self._interval):
                beat_thread.join(_LEAVING_SECONDS)
                return
            # Waits are added up instead of reading the clock, which goes on while the process is suspended.
            silent_for = silent_for + self._interval if self._beats_of_driver == beats_before else 0.0
            beats_before = self._beats_of_driver
        if not stop.wait(self._leaving_seconds):
            why = "has gone, or has given up the fit"
            if silent_for >= self._patience:
                why = f"has not been heard of for driverTimeout ({self._patience:g} s)"
            print(f"rank {self._rank} ends: its driver {why}", file=sys.stderr, flush=True)
            os._exit(1)

    def _beat(self, stop: threading.Event) -> None:
        """Sends heartbeats until `stop` is set, the driver cancels, or no connection can be opened any more."""
        store: SealedStore | None = self._store
        self._store.set_timeout(timedelta(seconds=self._patience))
        while store is not None:
            is_last = stop.wait(self._interval)
            try:
                self._send(store)
                if self._obey_driver(store, is_last=is_last) or is_last:
                    break
            except (dist.DistError, RuntimeError):
                # A broken connection does not mean that the driver is gone.
                store = None if is_last else self._open(stop)
        self._has_ended.set()

    def _open(self, stop: threading.Event) -> SealedStore | None:
        """Returns a new connection; `None` if there is none in time, or once `stop` is set: the store may be closed."""
        deadline = time.monotonic() + self._patience
        while not stop.is_set() and time.monotonic() < deadline:
            with suppress(dist.DistError, RuntimeError):
                store = self._open_store()
                store.set_timeout(timedelta(seconds=self._patience))
                return store
            stop.wait(_RETRY_SECONDS)
        return None

    def _obey_driver(self, store: SealedStore, *, is_last: bool) -> bool:
        """Reads the driver's heartbeat, and does what it asks for; returns whether the driver has cancelled the fit.

        It may ask for a pause, or for the rank's Python stack. If a rank hosts the store, the driver sends no
        heartbeats, and any answer of the store counts as one.
        """
        message = store.peek("driver")
        if message is None and self._driver_beat is not None:
            return True  # This is the store of a later attempt, at the same port.
        if message is None or message != self._driver_beat:
            self._beats_of_driver += 1
        self._driver_beat = message
        request: dict[str, Any] = {"cancelled": False, "pause": False, "stacks": []}
        if message is not None:
            request = json.loads(message)
        # A rank that ends answers before the driver asks: ranks that are asked later wait for its answer.
        if request["pause"] or is_last:
            self._pause(store)
        if self._rank in request["stacks"]:
            store.set(f"stack/{self._rank}", json.dumps({"stack": _stack_of(self._owner)}))
        return bool(request["cancelled"])


@dataclass
class Pulse(Generic[R]):
    """A rank's last heartbeat, and when it changed.

    Attributes:
        changed_at: When the heartbeat last changed, by `time.monotonic`.
        moved_at: When its progress fields last changed, by `time.monotonic`.
        record: The heartbeat.
    """

    changed_at: float
    moved_at: float
    record: R


def _all_fields(record: R) -> R:
    """Returns the heartbeat: each of its fields counts as progress."""
    return record


class Pulses(dict[int, Pulse[R]]):
    """The last heartbeat of each rank, and when it last changed."""

    def __init__(self, progress_in: Callable[[R], Any] = _all_fields) -> None:
        """Takes a function that returns the progress fields of a heartbeat, by default all fields."""
        super().__init__()
        self._progress_in = progress_in

    def note(self, rank: int, record: R, *, at: float | None = None) -> None:
        """Records a rank's heartbeat, seen at time `at` of `time.monotonic`, by default now."""
        now = time.monotonic() if at is None else at
        last = self.get(rank)
        if last is None:
            self[rank] = Pulse(now, now, record)
            return
        pulse = Pulse(last.changed_at, last.moved_at, record)
        if last.record != record:
            pulse.changed_at = now
            if self._progress_in(last.record) != self._progress_in(record):
                pulse.moved_at = now
        self[rank] = pulse

    def silence(self, rank: int) -> float:
        """Returns the seconds since a rank's heartbeat last changed."""
        return time.monotonic() - self[rank].changed_at


def silent_among(
    ranks: Iterable[int], read: Callable[[], Mapping[int, Beat]], pulses: Pulses[Beat], seconds: float
) -> set[int]:
    """Returns the ranks whose heartbeats do not change for `seconds` though they have not said that they end.

    It waits until each rank has sent another heartbeat, or has been silent for `seconds`. `read` returns the last
    heartbeats, and `pulses` knows since when they have not changed.
    """
    before = beats = read()
    undecided = set(ranks)
    silent: set[int] = set()
    while True:
        now = time.monotonic()
        for rank in undecided & beats.keys():
            pulses.note(rank, beats[rank], at=now)
        silent |= {rank for rank in undecided if rank in pulses and now - pulses[rank].changed_at >= seconds}
        unchanged = {rank for rank in undecided & beats.keys() if beats[rank] == before.get(rank)}
        undecided = unchanged - silent
        if not undecided:
            return {rank for rank in silent if not pulses[rank].record["ended"]}
        time.sleep(seconds / 20)
        beats = read()


def suspects(pulses: Mapping[int, Pulse[dict[str, Any]]]) -> list[int]:
    """Returns the ranks that wait for no other rank: if the job stalls, the others may be waiting for these.

    A rank waits for another one at the store, or in a collective that the other one has not started.
    """
    started = [pulse.record["collectives"] for pulse in pulses.values()]
    fewest = min((count for count in started if count is not None), default=None)

    def waits_for_none(record: Beat) -> bool:
        # A rank without a process group has no number of collectives.
        is_ahead = fewest is not None and record["collectives"] not in (fewest, None)
        return not (record["waiting"] or is_ahead)

    return [rank for rank, pulse in pulses.items() if waits_for_none(pulse.record)]


def _stack_of(thread: int) -> str:
    """Returns the Python stack of a thread, without Spark's frames around those of `worker`."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    start = next((index for index, frame in enumerate(frames) if _BODY in frame.filename), 0)
    return "".join(traceback.format_list(frames[start:]))
