"""Heartbeats: sends a rank's own, and tells which ranks are silent or make no progress.

All times are taken from the observing process's clock: clocks of other hosts may differ.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

__all__ = ["Heart", "OpenStore", "Pulse", "Pulses", "alive", "waited_for"]

_BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.05
_BODY = "sparktorch/worker/"
_LEAVING_SECONDS = 2.0  # that a rank whose driver is gone gets to end by itself

R = TypeVar("R")


class OpenStore(Protocol):
    """Opens a connection to the store; see `connect`."""

    def __call__(self, *, token: str = ..., timeout: timedelta = ...) -> dist.Store:
        """Returns a new connection."""
        ...


class Heart:
    """Two threads: one sends a rank's heartbeats and log lines, one ends the process when the driver is gone.

    They are separate because a store behind a broken network neither answers nor refuses: a request may block for
    minutes.
    """

    def __init__(self, beat: Callable[[dist.Store], object], rank: int, open_store: OpenStore, patience: float) -> None:
        """Takes what sends a heartbeat."""
        self._send, self._rank, self._open_store, self._patience = beat, rank, open_store, patience
        self._owner = threading.get_ident()
        self._driver: bytes | None = None
        self._heard = 0
        self._over = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Sends heartbeats until `stop` is set; ends the process if the driver is gone or has cancelled the fit."""
        beats = threading.Thread(target=self._beat, args=(stop,), name="sparktorch-beat", daemon=True)
        beats.start()
        heard, silent = self._heard, 0.0  # counts checks, not clock time: the process may have been suspended
        while silent < self._patience and not self._over.is_set():
            if stop.wait(_BEAT_SECONDS):
                beats.join(_LEAVING_SECONDS)
                return
            silent = silent + _BEAT_SECONDS if self._heard == heard else 0.0
            heard = self._heard
        if not stop.wait(_LEAVING_SECONDS):
            silence = f"has not been heard of for driverTimeout ({self._patience:g} s)"
            why = silence if silent >= self._patience else "has gone, or has given up the fit"
            print(f"rank {self._rank} ends: its driver {why}", file=sys.stderr, flush=True)
            os._exit(1)

    def _beat(self, stop: threading.Event) -> None:
        store = self._open()
        while store is not None and not stop.wait(_BEAT_SECONDS):
            try:
                self._send(store)
                self._answer(store)
                if store.check(["cancel"]):
                    break
                self._listen(store)
            except (dist.DistError, RuntimeError):
                store = self._open()  # a broken connection does not mean that the driver is gone
        self._over.set()

    def _open(self) -> dist.Store | None:
        try:
            return self._open_store(timeout=timedelta(seconds=self._patience))
        except (dist.DistError, RuntimeError):
            return None

    def _answer(self, store: dist.Store) -> None:
        """Sends the rank's Python stack if the driver has asked for it."""
        if store.check(["stacks wanted"]):
            store.set(f"stack/{self._rank}", json.dumps({"stack": _stack_of(self._owner)}))

    def _listen(self, store: dist.Store) -> None:
        """Checks the driver's heartbeat. If a rank hosts the store there is none, and any answer counts."""
        beat = store.get("driver") if store.check(["driver"]) else None
        if beat is None or beat != self._driver:
            self._heard += 1
        self._driver = beat


@dataclass
class Pulse(Generic[R]):
    """A rank's last heartbeat, when it last changed, and when its progress last changed, by `time.monotonic`."""

    beat: float
    moved: float
    record: R


class Pulses(dict[int, Pulse[R]]):
    """The last heartbeat of each rank, and when it last changed."""

    def __init__(self, moves: Callable[[R], Any] = lambda record: record) -> None:
        """Takes a function that returns the progress fields of a heartbeat, by default all of it."""
        super().__init__()
        self._moves = moves

    def note(self, rank: int, record: R, *, at: float | None = None) -> None:
        """Records a rank's heartbeat, seen at time `at` of `time.monotonic`, by default now."""
        now = time.monotonic() if at is None else at
        last = self.get(rank)
        if last is None:
            self[rank] = Pulse(now, now, record)
            return
        beat = last.beat if last.record == record else now
        moved = last.moved if self._moves(last.record) == self._moves(record) else now
        self[rank] = Pulse(beat, moved, record)

    def silence(self, rank: int) -> float:
        """Returns the seconds since a rank's heartbeat last changed."""
        return time.monotonic() - self[rank].beat


def alive(ranks: set[int], seconds: float, beat_of: Callable[[int], Any], ended: Callable[[int], bool]) -> set[int]:
    """Returns those of the ranks that send a heartbeat or end within `seconds` from now."""
    before, found, deadline = {rank: beat_of(rank) for rank in ranks}, set[int](), time.monotonic() + seconds
    while found < ranks and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        found |= {rank for rank in ranks - found if beat_of(rank) != before[rank] or ended(rank)}
    return found


def waited_for(pulses: Mapping[int, Pulse[dict[str, Any]]]) -> list[int]:
    """Returns the ranks that wait for no other rank; all other ranks may be waiting for them.

    A rank that has started more collectives than another one waits for that one.
    """
    begun = [pulse.record["collectives"] for pulse in pulses.values()]
    least = min((count for count in begun if count is not None), default=None)
    return [
        rank
        for rank, pulse in pulses.items()
        if not pulse.record["waiting"] and (least is None or pulse.record["collectives"] in (least, None))
    ]


def _stack_of(thread: int) -> str:
    """Returns the Python stack of a thread, without Spark's frames outside `worker`."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    body = [index for index, frame in enumerate(frames) if _BODY in frame.filename]
    return "".join(traceback.format_list(frames[body[0] :] if body else frames))
