"""A rank's client of the key-value store that connects it to the driver and to the other ranks.

The ranks use it to exchange values before a process group exists, to report progress, logs and failures to the
driver, to learn that the fit was cancelled, and to notice that the driver has died. All values are JSON, signed with
the attempt's token. Nothing is unpickled but the tasks of a pool, once their signatures have been checked.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from sparktorch.base.host_memory import out_of_memory_kills, resident_bytes
from sparktorch.base.world import World
from sparktorch.distributed.heartbeat import Beats, Heart, Pulses, beat_seconds, paced, silent_among, silent_seconds
from sparktorch.distributed.log_capture import LogCapture, excerpt, last_lines
from sparktorch.distributed.pause import Pause
from sparktorch.distributed.process_group import collectives_begun, is_communication
from sparktorch.distributed.store import OpenStore, SealedStore
from sparktorch.errors import SHIP_HINT, ClusterError, RankError, SparkTorchError, users_part

__all__ = ["Cancelled", "Client", "Order", "PeerFailure"]

# A rank that waits asks the store again after a pause, which grows from the first of these to the longest.
_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.05
# After pauses of at most this length, rank 0 looks whether all ranks have posted what they are to agree on.
_GATHER_SECONDS = 0.01
# A process that has used more processor time between two heartbeats has worked.
_BUSY_SECONDS = 0.05
# A rank that has failed waits this long for the driver's answer. Meanwhile, the driver looks about twenty times for
# reports of errors.
_ANSWER_SECONDS = 1.0

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 - control flow between rank and driver, no user meets it
    """The driver has cancelled the fit."""


class PeerFailure(Exception):  # noqa: N818 - control flow between ranks, no user meets it
    """Another rank has failed; that rank reports the cause."""


@dataclass(frozen=True)
class Order:
    """A pickled task for the ranks of a pool, and its number there, from 0."""

    number: int
    content: bytes


class Client:
    """One rank's client of the store.

    Attributes:
        store: The rank's connection to the store.
        pause: The rank's part in a pause.
    """

    def __init__(
        self, open_store: OpenStore, world: World, *, console: LogCapture | None = None, patience: float = 30.0
    ) -> None:
        """Opens the rank's connection to the store, and one for heartbeats; raises what `open_store` does.

        `console` captures what the rank logs and prints. After `patience` seconds without a heartbeat from the driver,
        the rank ends its process.
        """
        self.store = open_store()
        self._heart_store = open_store()
        self._open_store = open_store
        self._world = world
        self._console = LogCapture() if console is None else console
        self._patience = patience
        self._state: dict[str, Any] = {"phase": "starting", "epoch": None, "step": None}
        self._moves = 0
        # Whether the thread that made this client waits at the store.
        self._waiting = False
        self._owner = threading.get_ident()
        # The processor seconds of the process at the last heartbeat, and whether processor time counts as progress.
        self._worked = 0.0
        self._counts_work = False
        self._kills = out_of_memory_kills()
        self._publishes_progress = True
        self._publishes_epochs = True
        self._judged = False
        self._ended = False
        self._failure: SparkTorchError | None = None
        # The client must be in no cycle of references, so that its connections close with the last reference to it.
        weak_read: Any = weakref.WeakMethod(self.read)

        def read(key: str) -> dict[str, Any]:
            value: dict[str, Any] = weak_read()(key)
            return value

        self.pause = Pause(world, read)
        # Parcels are counted here, not in the store, whose counters can be changed without the token.
        self._sent = {"lines": 0, "warning": 0}
        self._sending = threading.Lock()
        self._beats = Beats(self.store.list_keys, self.store.read_all, world.world_size)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Context that sends heartbeats and log lines from a background thread.

        Inside it, the process exits when the driver is gone or has cancelled the fit.
        """
        stop = threading.Event()
        heart = Heart(
            self.beat,
            self.pause.answer,
            self._world.rank,
            self._heart_store,
            self._open_store,
            interval=beat_seconds(self._world.world_size),
            patience=self._patience,
        )
        thread = threading.Thread(target=heart.run, args=(stop,), name="sparktorch-heart", daemon=True)
        self.beat(self.store)
        thread.start()
        try:
            with self._console.overhearing():
                yield
            self._ended = True
        finally:
            stop.set()
            thread.join()
        with suppress(dist.DistError, RuntimeError):
            self._set(self.store, f"ended/{self._world.rank}", {"paused": self.pause.paused})

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Reports to the driver which phase the rank enters, such as "training"."""
        self._state = {"phase": phase, "epoch": epoch, "step": step}
        self.moved()
        self.beat(self.store)

    def at_step(self, step: int) -> None:
        """Records the rank's current step, for the next heartbeat or error report."""
        self._state["step"] = step
        self.moved()

    def moved(self) -> None:
        """Counts a sign of progress, which keeps the rank from being reported as stalled."""
        self._moves += 1

    def count_work(self) -> None:
        """Makes processor time and printed lines count as progress, too, for code that reports no progress itself."""
        self._worked = time.process_time()
        self._counts_work = True

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """Context for a phase whose code reports no progress itself: work counts in it, as after `count_work`."""
        self.enter(phase)
        counted = self._counts_work
        self.count_work()
        try:
            yield
        finally:
            self._counts_work = counted

    def moving(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items; each item counts as progress, as in `moved`."""
        for item in items:
            self.moved()
            yield item

    def agree(self, topic: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchanges one JSON object with every rank; returns the objects in rank order; raises as `collect` does.

        Rank 0 gathers the objects, and writes them down once for all others: if each rank read the object of each other
        rank, the store would send as many values as the square of the number of ranks.
        """
        self.post(topic, value)
        key = f"{topic}/all"
        if self._world.is_main:
            values = self.collect(topic, longest=paced(_GATHER_SECONDS, self._world.world_size // 20))
            pieces = self.store.set_pieces(key, zlib.compress(json.dumps(values).encode(), 1))
            self._set(self.store, key, {"pieces": pieces})
            return values
        content = self.store.get_pieces(key, self.read(key)["pieces"])
        agreed: list[dict[str, Any]] = json.loads(zlib.decompress(content))
        return agreed

    def read(self, key: str) -> dict[str, Any]:
        """Waits until a JSON object has been written under a key, and returns it; raises as `collect` does."""
        value: dict[str, Any] = json.loads(self._wait(partial(self.store.peek, key)))
        return value

    def post(self, topic: str, value: dict[str, Any]) -> None:
        """Writes this rank's JSON object under a topic, for ranks that call `collect`."""
        self._set(self.store, f"{topic}/{self._world.rank}", value)

    def collect(
        self, topic: str, *, patience: float | None = None, longest: float | None = None
    ) -> list[dict[str, Any]]:
        """Waits until every rank has posted under a topic; returns the objects in rank order. One rank alone calls it.

        Raises `Cancelled` if the driver cancels, and `PeerFailure` if a rank fails or sends no heartbeat for `patience`
        seconds (`None` sets no limit). `longest` is the longest pause between two looks, by default that of all ranks.
        """
        keys = [f"{topic}/{rank}" for rank in range(self._world.world_size)]

        def all_posted() -> bool | None:
            return self.store.check(keys) or None

        self._wait(all_posted, patience, longest)
        return self.store.read_all(keys)

    def orders(self) -> Iterator[Order]:
        """Yields the tasks that the driver sends to the ranks of a pool, until it ends or cancels (`Cancelled`) it.

        While a task runs, this rank counts as waiting here: the task's own client reports its progress.
        """
        for number in itertools.count():
            key = f"order/{number}"
            pieces = self.read(key)["pieces"]
            if pieces is None:
                return
            content = self.store.get_pieces(key, pieces)
            self._waiting = self._console.paused = True
            yield Order(number, content)
            self._waiting = self._console.paused = False
            self.moved()

    def joined(self, order: Order) -> Client:
        """Returns a client of the same store for a task of a pool, under a token of its own."""
        token = self.store.token_of(order.number)
        open_store, console = partial(self._open_store, token=token), self._console.another()
        return Client(open_store, self._world, console=console, patience=self._patience)

    def await_verdicts(self) -> None:
        """Makes `told_to_stop` wait for the driver's verdict on each epoch."""
        self._judged = True

    def told_to_stop(self, epoch: int) -> bool:
        """Returns whether the driver ends the training after an epoch, counted from 1.

        It waits for the driver's decision, which is the same in every rank; without `await_verdicts`, the training goes
        on. It raises as `collect` does.
        """
        if not self._judged:
            return False
        return bool(self.read(f"verdict/{epoch}")["stop"])

    def deliver(self, meta: dict[str, Any], payload: bytes) -> None:
        """Sends the rank's result of a pool's task to the driver."""
        key = f"result/{self._world.rank}"
        pieces = self.store.set_pieces(key, payload, self.moved)
        self._set(self.store, key, {"meta": meta, "pieces": pieces})

    def warn(self, text: str) -> None:
        """Makes the driver log a warning; the fit goes on."""
        record = {"rank": self._world.rank, "host": self._world.host, "text": text}
        self._set(self.store, f"warning/{self._world.rank}/{self._number('warning')}", record)
        self.beat(self.store)  # The heartbeat says how many warnings there are for the driver to read.

    def leave(self) -> None:
        """Reports that this rank no longer needs the store. Rank 0 hosts it, and waits for all other ranks."""
        self._set(self.store, f"left/{self._world.rank}", {})
        if self._world.is_main:
            self.collect("left")

    def publish(self, *, progress: bool, epochs: bool) -> None:
        """Turns `progress` and `epoch_done` of this rank on or off; by default both are on."""
        self._publishes_progress, self._publishes_epochs = progress, epochs

    def progress(self, **record: Any) -> None:
        """Publishes the training's position; each call replaces the previous record."""
        if self._publishes_progress:
            self._set(self.store, "progress", record)

    def epoch_done(self, number: int, record: dict[str, Any]) -> None:
        """Publishes the metrics of a finished epoch; `number` counts from 1."""
        if self._publishes_epochs:
            self._set(self.store, f"epoch/{number}", record)
            self.store.set("epochs", str(number))

    def fail(self, error: BaseException) -> SparkTorchError:
        """Reports the failure to the driver, at most once; returns it with rank, host, epoch, step and traceback."""
        if self._failure is not None:
            return self._failure
        form = self.describe(error).to_dict()
        form |= {name: excerpt(form[name]) for name in ("what", "hint", "trace")}
        self._failure = failure = SparkTorchError.from_dict(form)
        order = self.store.add("errors", 1)
        secondary = isinstance(error, PeerFailure | Cancelled) or is_communication(error)
        report = {"secondary": secondary, "order": order, "out_of_memory_kills": out_of_memory_kills() - self._kills}
        self._set(self.store, f"error/{self._world.rank}", {**form, **report})
        self.store.claim("halt", "failed")  # Ranks that wait for this one see it, and end: see `_check_peers`.
        if not isinstance(error, Cancelled):
            with suppress(RuntimeError, ClusterError):  # The store may be gone; the failure is already reported.
                self._tell_who_is_silent(first=order == 1, look=secondary)
        return failure

    def is_heard(self, error: BaseException) -> bool:
        """Returns whether the driver ends the fit by itself, after this rank has reported its error.

        The driver does so once it knows the root cause, of which this rank's error may be a consequence. This waits up
        to a second for the driver to say so.
        """
        if isinstance(error, Cancelled):
            return True
        pause = min(paced(_LONGEST_PAUSE, self._world.world_size), _ANSWER_SECONDS / 2)
        deadline = time.monotonic() + _ANSWER_SECONDS
        with suppress(RuntimeError):  # The store may be gone.
            while time.monotonic() < deadline:
                message = self.store.peek("driver")
                if message is not None and json.loads(message)["cause"]:
                    return True
                time.sleep(pause)
        return False

    def describe(self, error: BaseException) -> SparkTorchError:
        """Returns the error as one that carries rank, host, epoch, step, and its traceback from the user's code on."""
        state = self._state
        position: dict[str, Any] = {
            "rank": self._world.rank,
            "host": self._world.host,
            "epoch": state["epoch"],
            "step": state["step"],
        }
        lines = last_lines(self._world.rank, self._console.last())
        if isinstance(error, SparkTorchError) and not isinstance(error, RankError):
            return error.at(**position)
        if isinstance(error, RankError) and error.trace:
            return SparkTorchError.from_dict({**error.at(**position).to_dict(), "trace": lines + error.trace})
        trace = "".join(traceback.format_exception(type(error), error, users_part(error) or error.__traceback__))
        what = f"{type(error).__name__} while {state['phase']}: {error}"
        hint, code = (SHIP_HINT, "ST-PACKAGES") if isinstance(error, ModuleNotFoundError) else ("", "")
        trace = f"{lines}Traceback of rank {self._world.rank}:\n{trace}"
        return RankError(what, hint=hint, code=code, trace=trace, **position)

    def beat(self, store: SealedStore) -> None:
        """Sends the lines logged since the last heartbeat, and a heartbeat: all that the driver reads from each rank.

        The heartbeat has position, progress counters, memory, and how many parcels of lines and warnings were sent.
        """
        # The lines come first: a driver that reads the heartbeat must find the parcels that the heartbeat counts.
        lines, lost = self._console.drain()
        self._look_at_work(printed=bool(lines))
        if lines:
            self._set(store, f"lines/{self._world.rank}/{self._number('lines')}", {"lines": lines, "lost": lost})
        record = {
            "host": self._world.host,
            "pid": os.getpid(),
            "time": time.time(),
            "moves": self._moves,
            "waiting": self._waiting,
            "collectives": collectives_begun(),
            "memory": resident_bytes(),
            "ended": self._ended,
            **self._sent,
            **self._state,
        }
        self._set(store, f"beat/{self._world.rank}", record)

    def _number(self, kind: str) -> int:
        """Returns the number of the next parcel of lines, or warning."""
        with self._sending:
            self._sent[kind] += 1
            return self._sent[kind] - 1

    def _look_at_work(self, *, printed: bool) -> None:
        """Counts printed lines and processor time since the last heartbeat as progress, if `count_work` was called."""
        now = time.process_time()
        if self._counts_work and (printed or now - self._worked > _BUSY_SECONDS):
            self.moved()
        self._worked = now

    def _wait(self, ready: Callable[[], T | None], patience: float | None = None, longest: float | None = None) -> T:
        """Asks the store by `ready` until it returns an answer, and returns the answer; see `collect`."""
        # `Store.wait` of torch would not notice failed ranks, and would log each time-out.
        if longest is None:
            longest = paced(_LONGEST_PAUSE, self._world.world_size)
        pause = min(paced(_FIRST_PAUSE, self._world.world_size // 4), longest)
        pulses = Pulses[Any]()
        # The checkpoint's thread may wait while the training goes on: then the rank does not count as waiting.
        in_main_thread = threading.get_ident() == self._owner
        if in_main_thread:
            self._waiting = True
        try:
            while True:
                answer = ready()
                if answer is not None:
                    return answer
                self._check_peers()
                if patience is not None:
                    self._check_pulses(pulses, patience)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        finally:
            if in_main_thread:
                self._waiting = False

    def _tell_who_is_silent(self, *, first: bool, look: bool) -> None:
        """Reports dead ranks to the driver before this rank exits: once one task ends, Spark kills all others.

        The rank that failed `first` looks for silent ranks; the others wait for its report. `look` says that a dead
        peer may have caused this rank's error, as for a broken connection.
        """
        if first:
            self._set(self.store, "silent", {"ranks": self._silent_peers() if look else []})
        deadline = time.monotonic() + 2 * silent_seconds(self._world.world_size)
        while not self.store.check(["silent"]) and time.monotonic() < deadline:
            # `_wait` would raise, now that a rank has failed.
            time.sleep(paced(_LONGEST_PAUSE, self._world.world_size))

    def _silent_peers(self) -> list[int]:
        """Returns the ranks that have stopped sending heartbeats without reporting an end or an error."""
        begun = self._beats.read().keys() - {self._world.rank}
        silent = silent_among(begun, self._beats.read, Pulses(), silent_seconds(self._world.world_size))
        return sorted(rank for rank in silent if not self.store.check([f"error/{rank}"]))

    def _check_pulses(self, pulses: Pulses[Any], patience: float) -> None:
        """Raises `PeerFailure` for a rank that has not ended, and has sent no heartbeat for `patience` seconds."""
        for rank, beat in self._beats.read().items():
            pulses.note(rank, beat)
            if pulses.silence(rank) > patience and not beat["ended"]:
                raise PeerFailure(f"rank {rank} has not been heard of for {patience:.0f} s")

    def _check_peers(self) -> None:
        """Raises `Cancelled` if the driver has cancelled the fit, and `PeerFailure` if another rank has failed."""
        halt = self.store.peek("halt")
        if halt == b"cancelled":
            raise Cancelled("the fit was cancelled on the driver")
        if halt is not None:
            raise PeerFailure("another rank failed; it reports the cause")

    @staticmethod
    def _set(store: SealedStore, key: str, value: dict[str, Any]) -> None:
        store.set(key, json.dumps(value))
