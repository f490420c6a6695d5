"""The driver's server: hosts the store and reads what the ranks write to it."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from sparktorch.distributed.client import last_lines
from sparktorch.distributed.log_capture import KEPT_LINES
from sparktorch.distributed.store import Rendezvous, SealedStore, host_store, pieces_of
from sparktorch.errors import ClusterError, SparkTorchError

__all__ = ["ControlServer"]

_LOG = logging.getLogger(__name__)
_BEAT_SECONDS = 1.0


class ControlServer:
    """The store of one attempt, seen from the driver."""

    def __init__(self, bind: str, advertise: str, *, beside: ControlServer | None = None) -> None:
        """Starts the store at the local address `bind`, and a thread that sends the driver's heartbeat.

        Executors reach it at `advertise`. `beside` shares the store of that server, under the token of its next task.
        """
        self._server: dist.TCPStore
        self._server, port = host_store(bind) if beside is None else (beside._server, beside.rendezvous.port)
        token = secrets.token_hex(16) if beside is None else beside._store.token_of(beside._orders)
        self.rendezvous: Rendezvous = Rendezvous(advertise, port, token)
        self._store: SealedStore = SealedStore(self.rendezvous.prefix, self._server)
        self._forged = False  # whether a value without a valid signature was found
        self._epochs_seen: int = 0
        self._orders: int = 0
        self._earlier: list[SealedStore] = []  # of the tasks of a pool whose keys may still be there
        self._warnings_seen: dict[int, int] = defaultdict(int)
        self._lines_seen: dict[int, int] = defaultdict(int)
        self._last_lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self._closed = threading.Event()
        self._heart = threading.Thread(
            target=_beat, args=(self._store, self._closed), name="sparktorch-driver-beat", daemon=True
        )
        self._heart.start()

    def progress(self) -> dict[str, Any] | None:
        """Returns the last progress record of rank 0, or `None` before the first one."""
        record: dict[str, Any] | None = self._read("progress")
        return record

    def new_epochs(self) -> list[dict[str, Any]]:
        """Returns the records of the epochs finished since the last call, each exactly once."""
        done = self._read("epochs")
        if done is None:
            return []
        numbers = range(self._epochs_seen + 1, done + 1)
        self._epochs_seen = done
        # A training that resumes from a checkpoint starts with a later epoch.
        return [record for record in (self._read(f"epoch/{number}") for number in numbers) if record is not None]

    def new_warnings(self, world_size: int) -> list[dict[str, Any]]:
        """Returns the ranks' warnings since the last call, each with rank, host and text."""
        return [
            warning
            for rank in range(world_size)
            for warning in self._new(f"warning/{rank}", self._warnings_seen, rank)
            if warning is not None
        ]

    def new_lines(self, world_size: int) -> list[tuple[int, int, str]]:
        """Returns the lines that ranks have logged and printed since the last call, each with rank and level."""
        new: list[tuple[int, int, str]] = []
        for rank in range(world_size):
            for parcel in self._new(f"lines/{rank}", self._lines_seen, rank):
                if parcel is None:
                    continue
                if parcel["lost"]:
                    new.append((rank, 0, f"... {parcel['lost']} more lines"))
                new += [(rank, level, line) for level, line in parcel["lines"]]
                self._last_lines[rank].extend(line for _, line in parcel["lines"])
        return new

    def last_lines(self, rank: int) -> str:
        """Returns a rank's last lines under a heading, as far as `new_lines` has read them."""
        return last_lines(rank, list(self._last_lines[rank]))

    def beats(self, world_size: int) -> list[dict[str, Any] | None]:
        """Returns each rank's last heartbeat, in rank order; `None` for a rank that has not started."""
        return [self.beat(rank) for rank in range(world_size)]

    def beat(self, rank: int) -> dict[str, Any] | None:
        """Returns a rank's last heartbeat; `None` if it has not started."""
        record: dict[str, Any] | None = self._read(f"beat/{rank}")
        return record

    def ask_for_stacks(self) -> None:
        """Asks every rank for its Python stack; see `stack`."""
        self._store.set("stacks wanted", "1")

    def stack(self, rank: int) -> str | None:
        """Returns a rank's answer to `ask_for_stacks`, its Python stack; `None` before it answers."""
        record = self._read(f"stack/{rank}")
        return None if record is None else record["stack"]

    def first_failure(self) -> tuple[SparkTorchError | None, bool]:
        """Returns the first reported failure, if any, and whether it may be the root cause.

        Failures that ranks report because a peer is lost are consequences, and rank after all others.
        """
        forms = self._failures()
        if not forms:
            return None, False
        first = min(forms, key=lambda form: (form["secondary"], form["order"]))
        return SparkTorchError.from_dict(first), not first["secondary"]

    def acknowledge(self) -> SparkTorchError | None:
        """Returns the root cause once a rank has reported it, and tells the ranks that it is known: see `is_heard`."""
        failure, primary = self.first_failure()
        if not primary:
            return None
        self._store.set("cause known", "1")
        return failure

    def silent(self) -> set[int]:
        """Returns the ranks whose heartbeats had stopped when the first failed rank looked, before it ended."""
        found = self._read("silent")
        return set() if found is None else set(found["ranks"])

    def quiet(self, world_size: int) -> dict[int, dict[str, Any]]:
        """Returns the last heartbeats, by rank, of ranks that have started and reported no failure."""
        reported = {form["where"].get("rank") for form in self._failures()}
        beats = enumerate(self.beats(world_size))
        return {rank: beat for rank, beat in beats if beat is not None and rank not in reported}

    def ended(self, rank: int) -> bool:
        """Returns whether a rank has ended without raising."""
        return bool(self._store.check([f"ended/{rank}"]))

    def out_of_memory_kills(self, host: str) -> int:
        """Returns how many processes the out-of-memory killer has killed on a host, as its failed ranks reported."""
        there = [form for form in self._failures() if form["where"].get("host") == host]
        return max((form["out_of_memory_kills"] for form in there), default=0)

    def cancel(self) -> None:
        """Tells the ranks that the fit is over."""
        self._store.set("cancel", "1")

    def pause(self) -> None:
        """Asks the ranks to save a checkpoint and to end, all after the same step; see `Pause`."""
        self._store.set("pause", "1")

    def close(self) -> None:
        """Closes the store and its port."""
        self._closed.set()
        self._heart.join()
        self._earlier.clear()
        del self._store, self._server

    def another(self) -> ControlServer:
        """Returns a server for the next task of a pool, which shares the store under a token of its own."""
        task = ControlServer("", self.rendezvous.host, beside=self)
        self._earlier.append(task._store)
        return task

    def send(self, content: bytes) -> None:
        """Sends the ranks of a pool their next task, for which `another` has made a server.

        Every rank has taken the task before. So none still writes what belongs to those before that one: it is deleted.
        """
        for key in self._store.list_keys():
            if key.startswith("order/") and int(key.split("/")[1]) < self._orders - 1:
                self._store.delete_key(key)
        for store in self._earlier[:-2]:
            for key in store.list_keys():
                store.delete_key(key)
        del self._earlier[:-2]
        pieces = pieces_of(content)
        for number, piece in enumerate(pieces):
            self._store.set(f"order/{self._orders}/{number}", piece)
        self._order(len(pieces))

    def end_orders(self) -> None:
        """Tells the ranks of a pool that there are no more tasks."""
        self._order(None)

    def _order(self, pieces: int | None) -> None:
        self._store.set(f"order/{self._orders}", json.dumps({"pieces": pieces}))
        self._orders += 1

    def judge(self, epoch: int, *, stop: bool) -> None:
        """Tells the ranks whether to end the training after that epoch, counted from 1."""
        self._store.set(f"verdict/{epoch}", json.dumps({"stop": stop}))

    def ready(self, world_size: int) -> list[dict[str, Any]] | None:
        """Returns what the ranks of a pool tell of their rows, in rank order; `None` until all have read them."""
        if not self._store.check([f"ready/{rank}" for rank in range(world_size)]):
            return None
        return [self._read(f"ready/{rank}") for rank in range(world_size)]

    def over(self, world_size: int) -> bool:
        """Returns whether every rank has ended a pool's task, with a result or with an error."""
        return all(self.ended(rank) or self._store.check([f"error/{rank}"]) for rank in range(world_size))

    def results(self, world_size: int) -> list[tuple[dict[str, Any], bytes]]:
        """Returns and deletes `(meta, payload)` of each rank of a pool's task, in rank order."""
        found = []
        for rank in range(world_size):
            result = json.loads(self._store.get(f"result/{rank}"))
            pieces = []
            for number in range(result["pieces"]):
                pieces.append(self._store.get(f"result/{rank}/{number}"))
                self._store.delete_key(f"result/{rank}/{number}")
            found.append((result["meta"], b"".join(pieces)))
        return found

    def _failures(self) -> list[dict[str, Any]]:
        if not self._store.check(["errors"]):
            return []
        found = [self._read(key) for key in self._store.list_keys() if key.startswith("error/")]
        return [form for form in found if form is not None]

    def _new(self, topic: str, seen: dict[int, int], rank: int) -> Iterator[dict[str, Any] | None]:
        """Yields and deletes a rank's new records under a topic; `None` for one without a valid signature."""
        while self._store.check([key := f"{topic}/{seen[rank]}"]):
            yield self._read(key)
            self._store.delete_key(key)
            seen[rank] += 1

    def _read(self, key: str) -> Any:
        """Returns the JSON value of a key; `None` if it is missing or has no valid signature."""
        if not self._store.check([key]):
            return None
        try:
            return json.loads(self._store.get(key))
        except ClusterError as error:
            if not self._forged:
                _LOG.warning("%s", error)
            self._forged = True
            return None


def _beat(store: dist.Store, closed: threading.Event) -> None:
    """Sends the driver's heartbeat until `closed` is set."""
    count = 0
    while True:
        count += 1
        store.set("driver", str(count))
        if closed.wait(_BEAT_SECONDS):
            return
