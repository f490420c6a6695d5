"""A rank's line to the driver and to the other ranks: one key-value store, four uses.

The ranks agree over it before there is a process group, tell the driver how far they are, tell it
why they failed, and learn from it that the fit was cancelled. Everything on it is JSON; nothing
that is read from it is ever unpickled.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparktorch.errors import RankError, SparkTorchError
from sparktorch.world import World

__all__ = ["Cancelled", "Link", "PeerFailure", "connect"]

_BEAT_SECONDS = 0.5
_LONGEST_PAUSE = 0.05


class Cancelled(Exception):  # noqa: N818 - control flow between rank and driver, no user meets it
    """The driver has cancelled the fit."""


class PeerFailure(Exception):  # noqa: N818 - control flow between ranks, no user meets it
    """Another rank has failed; that rank reports the cause."""


def connect(host: str, port: int, prefix: str, *, timeout: timedelta = timedelta(seconds=60)) -> dist.Store:
    """Connects to the store of a job attempt; keys live under the attempt's own prefix."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return dist.PrefixStore(prefix, store)


class Link:
    """One rank's end of the line."""

    def __init__(self, open_store: Callable[[], dist.Store], world: World) -> None:
        """Opens a connection for the rank itself; its heart beats over a second one."""
        self.store = open_store()
        self._open_store = open_store
        self._world = world
        self._state: dict[str, Any] = {"phase": "starting", "epoch": None, "step": None}

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beats in the background, with phase, epoch, step, host and pid, until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop,), name="sparktorch-beat", daemon=True)
        self._set(self.store, f"beat/{self._world.rank}", self._beat_record())
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Tells the driver what the rank does now."""
        self._state = {"phase": phase, "epoch": epoch, "step": step}
        self._set(self.store, f"beat/{self._world.rank}", self._beat_record())

    def at_step(self, step: int) -> None:
        """Notes the step the rank is at; the next beat, or an error, carries it."""
        self._state["step"] = step

    def agree(self, topic: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges one JSON object with every rank and returns them all, by rank.

        Raises:
            Cancelled: The driver cancelled while waiting.
            PeerFailure: A rank failed while waiting.
        """
        self.post(topic, value)
        return self.collect(topic)

    def post(self, topic: str, value: dict[str, Any]) -> None:
        """Lays down a JSON object for one rank that collects them."""
        self._set(self.store, f"{topic}/{self._world.rank}", value)

    def collect(self, topic: str, *, patience: float | None = None) -> list[dict[str, Any]]:
        """Waits for what every rank posts under a topic, and returns it, by rank.

        Args:
            topic: Of the posts.
            patience: Give up on a rank whose heart has stood still for so many seconds.

        Raises:
            Cancelled: The driver cancelled while waiting.
            PeerFailure: A rank failed while waiting.
        """
        keys = [f"{topic}/{rank}" for rank in range(self._world.world_size)]
        self._wait(keys, patience)
        return [json.loads(raw) for raw in self.store.multi_get(keys)]

    def warn(self, text: str) -> None:
        """Has the driver warn of something that does not end the fit."""
        index = self.store.add("warnings", 1)
        self._set(self.store, f"warning/{index}", {"rank": self._world.rank, "host": self._world.host, "text": text})

    def leave(self) -> None:
        """Says that this rank needs the store no more; rank 0, where it hosts it, goes last."""
        self._set(self.store, f"left/{self._world.rank}", {})
        if self._world.is_main:
            self._wait([f"left/{rank}" for rank in range(self._world.world_size)])

    def progress(self, **record: Any) -> None:
        """Publishes how far the training is; each call replaces the last one."""
        self._set(self.store, "progress", record)

    def epoch_done(self, number: int, record: dict[str, Any]) -> None:
        """Publishes the metrics of a finished epoch; `number` counts from 1."""
        self._set(self.store, f"epoch/{number}", record)
        self.store.set("epochs", str(number))

    def fail(self, error: BaseException) -> SparkTorchError:
        """Reports the failure to the driver and returns it with its place and traceback."""
        failure = self.describe(error)
        index = self.store.add("errors", 1)
        secondary = isinstance(error, PeerFailure | Cancelled) or _is_communication(error)
        self._set(self.store, f"error/{index}", {**failure.to_dict(), "secondary": secondary})
        return failure

    def describe(self, error: BaseException) -> SparkTorchError:
        """Returns the error as one that carries rank, host, epoch, step and traceback."""
        state = self._state
        place: dict[str, Any] = {
            "rank": self._world.rank,
            "host": self._world.host,
            "epoch": state["epoch"],
            "step": state["step"],
        }
        if isinstance(error, SparkTorchError) and (error.trace or not isinstance(error, RankError)):
            return error.at(**place)
        trace = "".join(traceback.format_exception(error))
        return RankError(
            f"{type(error).__name__} while {state['phase']}: {error}",
            trace=f"Traceback of rank {self._world.rank}:\n{trace}",
            **place,
        )

    def _wait(self, keys: list[str], patience: float | None = None) -> None:
        # The store's own `wait` cannot look out for failures, and logs each of its time-outs.
        pause, pulses = 0.002, _Pulses(self.store, self._world.world_size)
        while not self.store.check(keys):
            self._check_peers()
            if patience is not None:
                pulses.check(patience)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _check_peers(self) -> None:
        if self.store.check(["cancel"]):
            raise Cancelled("the fit was cancelled on the driver")
        if self.store.check(["errors"]):
            raise PeerFailure("another rank failed; it reports the cause")

    def _beat(self, stop: threading.Event) -> None:
        try:
            store = self._open_store()
            while not stop.wait(_BEAT_SECONDS):
                self._set(store, f"beat/{self._world.rank}", self._beat_record())
        except (dist.DistError, RuntimeError):
            return  # the driver is gone; Spark ends this task

    def _beat_record(self) -> dict[str, Any]:
        return {"host": self._world.host, "pid": os.getpid(), "time": time.time(), **self._state}

    @staticmethod
    def _set(store: dist.Store, key: str, value: dict[str, Any]) -> None:
        store.set(key, json.dumps(value))


class _Pulses:
    """Whether hearts beat, by this process's own clock: those of other hosts may differ."""

    def __init__(self, store: dist.Store, world_size: int) -> None:
        self._store = store
        self._keys = [f"beat/{rank}" for rank in range(world_size)]
        self._last: dict[str, tuple[bytes, float]] = {}

    def check(self, patience: float) -> None:
        """Raises `PeerFailure` for a rank that has not beaten for `patience` seconds."""
        now = time.monotonic()
        for rank, key in enumerate(self._keys):
            beat = self._store.get(key) if self._store.check([key]) else b""
            before, since = self._last.setdefault(key, (beat, now))
            if beat != before:
                self._last[key] = (beat, now)
            elif now - since > patience:
                raise PeerFailure(f"rank {rank} has not been heard of for {patience:.0f} s")


def _is_communication(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, is what a rank sees when another one has died."""
    if error.__cause__ is not None and _is_communication(error.__cause__):
        return True
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("Connection reset by peer", "Connection closed by peer", "gloo", "NCCL")
    )
