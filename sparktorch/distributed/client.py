"""A rank's line to the driver and to the other ranks: one key-value store, five uses.

The ranks agree over it before there is a process group, tell the driver how far they are and what
they log, tell it why they failed, learn from it that the fit was cancelled, and see that the driver
lives. Everything on it is JSON, sealed with the attempt's token; nothing that is read from it is ever unpickled.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from sparktorch.base.world import World
from sparktorch.distributed.heartbeat import Heart, OpenStore, Pulses, alive
from sparktorch.distributed.log_capture import LogCapture
from sparktorch.distributed.os_memory import out_of_memory_kills, resident_bytes
from sparktorch.distributed.process_group import collectives_begun
from sparktorch.errors import ClusterError, RankError, SparkTorchError

__all__ = ["Cancelled", "Client", "PeerFailure", "last_lines"]

_LONGEST_PAUSE = 0.05
_SILENT_SECONDS = 1.2  # more than two beats

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 - control flow between rank and driver, no user meets it
    """The driver has cancelled the fit."""


class PeerFailure(Exception):  # noqa: N818 - control flow between ranks, no user meets it
    """Another rank has failed; that rank reports the cause."""


class Client:
    """One rank's end of the line."""

    def __init__(
        self, open_store: OpenStore, world: World, *, console: LogCapture | None = None, patience: float = 30.0
    ) -> None:
        """Opens a connection for the rank itself; its heart beats over a second one.

        Args:
            open_store: Connects to the store.
            world: This rank's place.
            console: What the rank logs and prints.
            patience: Seconds without a sign of the driver after which the rank ends its process.
        """
        self.store = open_store()
        self._open_store = open_store
        self._world = world
        self._console = LogCapture() if console is None else console
        self._patience = patience
        self._state: dict[str, Any] = {"phase": "starting", "epoch": None, "step": None}
        self._moves, self._waiting, self._owner = 0, False, threading.get_ident()
        self._kills = out_of_memory_kills()
        self._publishes_progress = self._publishes_epochs = True
        self._failure: SparkTorchError | None = None
        # Of this rank's own, not of the store's: its counters can be moved by who has not the token.
        self._warnings, self._parcels = itertools.count(), itertools.count()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beats in the background, with phase, epoch, step, host and pid, until the block ends.

        Within the block the process belongs to the fit: it ends where the driver has gone.
        """
        stop = threading.Event()
        heart = Heart(self, self._world.rank, self._open_store, self._patience)
        thread = threading.Thread(target=heart.run, args=(stop,), name="sparktorch-heart", daemon=True)
        self.beat(self.store)
        thread.start()
        try:
            with self._console.overhearing():
                yield
            with suppress(dist.DistError, RuntimeError):
                self.beat(self.store)  # with what it has printed last
                self._set(self.store, f"ended/{self._world.rank}", {})
        finally:
            stop.set()
            thread.join()

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Tells the driver what the rank does now."""
        self._state = {"phase": phase, "epoch": epoch, "step": step}
        self.moved()
        self.beat(self.store)

    def at_step(self, step: int) -> None:
        """Notes the step the rank is at; the next beat, or an error, carries it."""
        self._state["step"] = step
        self.moved()

    def moved(self) -> None:
        """Notes that the rank is not standing still."""
        self._moves += 1

    def moving(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, each of which is a move."""
        for item in items:
            self.moved()
            yield item

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
        rank = self._world.rank
        record = {"rank": rank, "host": self._world.host, "text": text}
        self._set(self.store, f"warning/{rank}/{next(self._warnings)}", record)

    def leave(self) -> None:
        """Says that this rank needs the store no more; rank 0, where it hosts it, goes last."""
        self._set(self.store, f"left/{self._world.rank}", {})
        if self._world.is_main:
            self._wait([f"left/{rank}" for rank in range(self._world.world_size)])

    def publish(self, *, progress: bool, epochs: bool) -> None:
        """Sets whether `progress` and `epoch_done` of this rank publish anything; by default both do."""
        self._publishes_progress, self._publishes_epochs = progress, epochs

    def progress(self, **record: Any) -> None:
        """Publishes how far the training is; each call replaces the last one."""
        if self._publishes_progress:
            self._set(self.store, "progress", record)

    def epoch_done(self, number: int, record: dict[str, Any]) -> None:
        """Publishes the metrics of a finished epoch; `number` counts from 1."""
        if self._publishes_epochs:
            self._set(self.store, f"epoch/{number}", record)
            self.store.set("epochs", str(number))

    def fail(self, error: BaseException) -> SparkTorchError:
        """Reports the failure to the driver, once, and returns it with its place and traceback."""
        if self._failure is not None:
            return self._failure
        self._failure = failure = self.describe(error)
        order = self.store.add("errors", 1)
        secondary = isinstance(error, PeerFailure | Cancelled) or _is_communication(error)
        report = {
            "secondary": secondary,
            "order": order,
            "out_of_memory_kills": out_of_memory_kills() - self._kills,
        }
        self._set(self.store, f"error/{self._world.rank}", {**failure.to_dict(), **report})
        if not isinstance(error, Cancelled):
            with suppress(RuntimeError, ClusterError):  # the store is gone; the failure itself has been told
                self._tell_who_is_silent(first=order == 1, look=secondary)
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
        rank, lines = self._world.rank, last_lines(self._world.rank, self._console.last())
        if isinstance(error, SparkTorchError) and not isinstance(error, RankError):
            return error.at(**place)
        if isinstance(error, RankError) and error.trace:
            return SparkTorchError.from_dict({**error.at(**place).to_dict(), "trace": lines + error.trace})
        trace = "".join(traceback.format_exception(error))
        what = f"{type(error).__name__} while {state['phase']}: {error}"
        return RankError(what, trace=f"{lines}Traceback of rank {rank}:\n{trace}", **place)

    def beat(self, store: dist.Store) -> None:
        """Sends a beat: where the rank is, what shows that it moves, and what it has logged since the last one."""
        record = {
            "host": self._world.host,
            "pid": os.getpid(),
            "time": time.time(),
            "moves": self._moves,
            "waiting": self._waiting,
            "collectives": collectives_begun(),
            "memory": resident_bytes(),
            **self._state,
        }
        self._set(store, f"beat/{self._world.rank}", record)
        lines, lost = self._console.drain()
        if lines:
            self._set(store, f"lines/{self._world.rank}/{next(self._parcels)}", {"lines": lines, "lost": lost})

    def _wait(self, keys: list[str], patience: float | None = None) -> None:
        # The store's own `wait` cannot look out for failures, and logs each of its time-outs.
        pause, pulses = 0.002, Pulses[bytes]()
        own = threading.get_ident() == self._owner  # the thread that saves waits beside the training
        if own:
            self._waiting = True
        try:
            while not self.store.check(keys):
                self._check_peers()
                if patience is not None:
                    self._check_pulses(pulses, patience)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            if own:
                self._waiting = False

    def _tell_who_is_silent(self, *, first: bool, look: bool) -> None:
        """Tells the driver which ranks have died, before this one ends: as soon as one does, Spark ends all others.

        Args:
            first: Whether this rank is the first to fail, which looks; the others wait for that.
            look: Whether a rank may have died: what this one failed of is no cause of its own.
        """
        if first:
            self._set(self.store, "silent", {"ranks": self._silent_peers() if look else []})
        deadline = time.monotonic() + 2 * _SILENT_SECONDS
        while not self.store.check(["silent"]) and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE)  # `_wait` would raise, now that a rank has failed

    def _silent_peers(self) -> list[int]:
        """Returns the ranks that had begun to beat, and neither beat nor come to an end while this one looks."""
        begun = {rank for rank, beat in enumerate(self._beats()) if beat and rank != self._world.rank}
        return sorted(begun - alive(begun, _SILENT_SECONDS, self._beat_of, self._ended))

    def _beats(self) -> list[bytes]:
        """Returns the last beat of each rank, by rank; empty for one that has not begun."""
        return [self._beat_of(rank) for rank in range(self._world.world_size)]

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""

    def _ended(self, rank: int) -> bool:
        return bool(self.store.check([f"ended/{rank}"]) or self.store.check([f"error/{rank}"]))

    def _check_pulses(self, pulses: Pulses[bytes], patience: float) -> None:
        """Raises `PeerFailure` for a rank that has not beaten for `patience` seconds."""
        for rank, beat in enumerate(self._beats()):
            pulses.note(rank, beat)
            if pulses.silence(rank) > patience:
                raise PeerFailure(f"rank {rank} has not been heard of for {patience:.0f} s")

    def _check_peers(self) -> None:
        if self.store.check(["cancel"]):
            raise Cancelled("the fit was cancelled on the driver")
        if self.store.check(["errors"]):
            raise PeerFailure("another rank failed; it reports the cause")

    @staticmethod
    def _set(store: dist.Store, key: str, value: dict[str, Any]) -> None:
        store.set(key, json.dumps(value))


def last_lines(rank: int, lines: list[str]) -> str:
    """Returns the last lines that a rank has logged or printed, under a heading; empty where there are none."""
    return "\n".join([f"The last lines of rank {rank}:", *lines, "", ""]) if lines else ""


def _is_communication(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, is what a rank sees when another one has died."""
    if isinstance(error, SparkTorchError) and not isinstance(error, RankError):
        return False  # it says what it is, such as NCCL that cannot be set up
    if error.__cause__ is not None and _is_communication(error.__cause__):
        return True
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("Connection reset by peer", "Connection closed by peer", "gloo", "NCCL")
    )
