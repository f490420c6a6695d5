"""The driver's server: hosts the store and reads what the ranks write to it."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from sparktorch.distributed.heartbeat import Beats, paced
from sparktorch.distributed.log_capture import KEPT_LINES, last_lines
from sparktorch.distributed.store import Rendezvous, SealedStore, host_store
from sparktorch.errors import ClusterError, SparkTorchError

__all__ = ["ControlServer"]

_LOG = logging.getLogger(__name__)
_BEAT_SECONDS = 1.0
# A rank's parcels that have not come after this many looks were lost with a connection.
_LATE_LOOKS = 10


class ControlServer:
    """The store of one attempt, or of one task of a pool, seen from the driver.

    Attributes:
        rendezvous: Address and token with which ranks connect to the store.
    """

    def __init__(self, bind: str, advertise: str, *, pool: ControlServer | None = None) -> None:
        """Starts the store at the local address `bind`, and a thread that sends the driver's heartbeat.

        Executors reach the store at `advertise`. With `pool`, this server shares the store of a pool's server, under
        the token of the pool's next task.
        """
        self._server: dist.TCPStore
        if pool is None:
            self._server, port = host_store(bind)
            token = secrets.token_hex(16)
        else:
            self._server = pool._server
            port = pool.rendezvous.port
            token = pool._store.token_of(len(pool._orders))
        self.rendezvous: Rendezvous = Rendezvous(advertise, port, token)
        self._store: SealedStore = SealedStore(self.rendezvous.prefix, self._server)
        # Whether this server has warned of a value without a valid signature.
        self._has_warned = False
        self._last_epoch: int = 0
        # A pool's orders to its ranks: the number of pieces of each task.
        self._orders: list[int] = []
        # The stores of a pool's tasks whose keys are not deleted yet.
        self._task_stores: list[SealedStore] = []
        # The readers of heartbeats, by number of ranks.
        self._readers: dict[int, Beats] = {}
        # By kind (lines or warnings) and rank: the number of parcels that were read, and of looks at which some were
        # late.
        self._read_parcels: Counter[tuple[str, int]] = Counter()
        self._late: Counter[tuple[str, int]] = Counter()
        # The ranks' reports of failures, by key, and the time from which on further reports are read.
        self._reports: dict[str, dict[str, Any]] = {}
        self._next_failures = 0.0
        self._last_lines: dict[int, deque[str]] = defaultdict(partial(deque, maxlen=KEPT_LINES))
        # The driver's heartbeat; its fields are what the ranks are told.
        self._message: dict[str, Any] = {"count": 0, "cancelled": False, "cause": False, "pause": False, "stacks": []}
        self._message_lock = threading.Lock()
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="sparktorch-driver-beat", daemon=True)
        self._heart.start()

    def progress(self) -> dict[str, Any] | None:
        """Returns the last progress record of rank 0, or `None` before the first one."""
        record: dict[str, Any] | None = self._read("progress")
        return record

    def new_epochs(self) -> list[dict[str, Any]]:
        """Returns the records of the epochs finished since the last call, each exactly once."""
        last_epoch = self._read("epochs")
        if last_epoch is None:
            return []
        records = [self._read(f"epoch/{number}") for number in range(self._last_epoch + 1, last_epoch + 1)]
        self._last_epoch = last_epoch
        # A training that resumes from a checkpoint starts with a later epoch: the earlier ones have no record.
        return [record for record in records if record is not None]

    def new_warnings(self, beats: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Returns the warnings that have come with `beats`, each with rank, host and text."""
        return [warning for _, warning in self._take_parcels("warning", beats)]

    def new_lines(self, beats: Sequence[dict[str, Any] | None]) -> list[tuple[int, int, str]]:
        """Returns the lines, logged and printed, that have come with `beats`, each with rank and level."""
        lines: list[tuple[int, int, str]] = []
        for rank, parcel in self._take_parcels("lines", beats):
            if parcel["lost"]:
                lines.append((rank, 0, f"... {parcel['lost']} more lines"))
            lines += [(rank, level, line) for level, line in parcel["lines"]]
            self._last_lines[rank].extend(line for _, line in parcel["lines"])
        return lines

    def last_lines(self, rank: int) -> str:
        """Returns a rank's last lines under a heading, as far as `new_lines` has read them."""
        return last_lines(rank, list(self._last_lines[rank]))

    def beats(self, world_size: int) -> list[dict[str, Any] | None]:
        """Returns each rank's last heartbeat, in rank order; `None` for a rank that has not started."""
        reader = self._readers.setdefault(world_size, Beats(self._store.list_keys, self._read_all, world_size))
        beats = reader.read()
        return [beats.get(rank) for rank in range(world_size)]

    def ask_for_stacks(self, ranks: list[int]) -> None:
        """Asks ranks for their Python stacks; see `stack`."""
        self._tell(stacks=ranks)

    def stack(self, rank: int) -> str | None:
        """Returns a rank's answer to `ask_for_stacks`, its Python stack; `None` before it answers."""
        record = self._read(f"stack/{rank}")
        return None if record is None else record["stack"]

    def first_failure(self) -> tuple[SparkTorchError | None, bool]:
        """Returns the first reported failure, if any, and whether it may be the root cause.

        Failures that ranks report because a peer is lost are consequences, and rank after all others.
        """
        return _first_failure_in(self._failures())

    def acknowledge(self) -> SparkTorchError | None:
        """Returns the root cause once a rank has reported it, and tells the ranks that the driver knows it.

        Ranks that have failed wait for this word, see `Client.is_heard`.
        """
        # The more failures are reported, the less often the server looks for further ones.
        failures = self._failures() if time.monotonic() >= self._next_failures else list(self._reports.values())
        failure, is_primary = _first_failure_in(failures)
        if not is_primary:
            return None
        if not self._message["cause"]:
            self._tell(cause=True)
        return failure

    def silent_peers(self) -> set[int]:
        """Returns the ranks whose heartbeats had stopped when the first failed rank looked, before it ended."""
        report = self._read("silent")
        return set() if report is None else set(report["ranks"])

    def beats_without_failure(self, world_size: int) -> dict[int, dict[str, Any]]:
        """Returns the last heartbeats, by rank, from ranks that have started and reported no failure."""
        reported = {form["where"].get("rank") for form in self._failures()}
        beats = enumerate(self.beats(world_size))
        return {rank: beat for rank, beat in beats if beat is not None and rank not in reported}

    def have_ended(self, ranks: Iterable[int]) -> bool:
        """Returns whether all of `ranks` have ended without raising."""
        return bool(self._store.check([f"ended/{rank}" for rank in ranks]))

    def out_of_memory_kills(self, host: str) -> int:
        """Returns how many processes the out-of-memory killer has killed on a host, as its failed ranks reported."""
        # The ranks on one host have counted the same kills.
        counts = [form["out_of_memory_kills"] for form in self._failures() if form["where"].get("host") == host]
        return max(counts, default=0)

    def cancel(self) -> None:
        """Tells the ranks that the fit is over."""
        self._store.set("halt", "cancelled")
        self._tell(cancelled=True)

    def pause(self) -> None:
        """Asks the ranks to save a checkpoint and to end, all after the same step; see `Pause`."""
        if not self._message["pause"]:
            self._tell(pause=True)

    def has_paused(self, world_size: int) -> bool:
        """Returns whether the ranks were asked to pause, and all have ended so."""
        if not self._message["pause"]:
            return False
        if self.first_failure()[0] is not None or not self.have_ended(range(world_size)):
            return False
        ends = self._read_all([f"ended/{rank}" for rank in range(world_size)])
        return all(end is not None and end["paused"] for end in ends)

    def close(self) -> None:
        """Closes the store and its port."""
        self._closed.set()
        self._heart.join()
        self._task_stores.clear()
        self._readers.clear()  # The readers hold the store, whose port would stay open.
        del self._store, self._server

    def server_for_next_task(self) -> ControlServer:
        """Returns a server for the next task of a pool, which shares the store under a token of its own."""
        task = ControlServer("", self.rendezvous.host, pool=self)
        self._task_stores.append(task._store)
        return task

    def send(self, content: bytes) -> None:
        """Sends the ranks of a pool their next task, for which `server_for_next_task` has made a server.

        Every rank has taken the previous task. So no rank still writes keys for the tasks before the previous one, and
        those keys are deleted.
        """
        if len(self._orders) > 1:
            taken = len(self._orders) - 2
            self._store.delete_key(f"order/{taken}")
            for number in range(self._orders[taken]):
                self._store.delete_key(f"order/{taken}/{number}")
        for store in self._task_stores[:-2]:
            for key in store.list_keys():
                store.delete_key(key)
        del self._task_stores[:-2]
        self._write_order(self._store.set_pieces(f"order/{len(self._orders)}", content))

    def end_orders(self) -> None:
        """Tells the ranks of a pool that there are no more tasks."""
        self._write_order(None)

    def _write_order(self, pieces: int | None) -> None:
        """Writes the next order: the number of pieces of its task, or `None` for the end of the pool."""
        self._store.set(f"order/{len(self._orders)}", json.dumps({"pieces": pieces}))
        self._orders.append(pieces or 0)

    def judge(self, epoch: int, *, stop: bool) -> None:
        """Tells the ranks whether to end the training after an epoch, counted from 1."""
        self._store.set(f"verdict/{epoch}", json.dumps({"stop": stop}))

    def row_facts(self, world_size: int) -> list[dict[str, Any]] | None:
        """Returns what a pool's ranks report about their rows, in rank order; `None` until all have read their rows."""
        keys = [f"ready/{rank}" for rank in range(world_size)]
        return self._read_all(keys) if self._store.check(keys) else None

    def is_over(self, world_size: int) -> bool:
        """Returns whether every rank has ended a pool's task, with a result or with an error."""
        failed_ranks = {form["where"].get("rank") for form in self._failures()}
        return self.have_ended(rank for rank in range(world_size) if rank not in failed_ranks)

    def results(self, world_size: int) -> list[tuple[dict[str, Any], bytes]]:
        """Returns and deletes `(meta, payload)` of each rank of a pool's task, in rank order."""
        results = []
        heads = self._store.multi_get([f"result/{rank}" for rank in range(world_size)])
        for rank, head in enumerate(heads):
            result = json.loads(head)
            results.append((result["meta"], self._store.get_pieces(f"result/{rank}", result["pieces"])))
            for number in range(result["pieces"]):
                self._store.delete_key(f"result/{rank}/{number}")
        return results

    def _failures(self) -> list[dict[str, Any]]:
        """Returns the ranks' reports of failures."""
        if self._store.check(["errors"]):
            keys = [key for key in self._store.list_keys() if key.startswith("error/") and key not in self._reports]
            forms = zip(keys, self._read_all(keys), strict=True)
            self._reports |= {key: form for key, form in forms if form is not None}
            self._next_failures = time.monotonic() + paced(0.0, len(self._reports))
        return list(self._reports.values())

    def _take_parcels(self, kind: str, beats: Sequence[dict[str, Any] | None]) -> list[tuple[int, dict[str, Any]]]:
        """Returns and deletes the ranks' new parcels of a kind, each with its rank."""
        # A heartbeat says how many parcels its rank has sent.
        sent = {rank: beat[kind] for rank, beat in enumerate(beats) if beat is not None}
        keys_of = {
            rank: [f"{kind}/{rank}/{number}" for number in range(self._read_parcels[kind, rank], count)]
            for rank, count in sent.items()
            if count > self._read_parcels[kind, rank]
        }
        # Nearly always, all parcels have arrived, and one question is enough.
        if keys_of and not self._store.check([key for keys in keys_of.values() for key in keys]):
            arrived_keys = {rank: self._arrived_keys(kind, rank, keys) for rank, keys in keys_of.items()}
            keys_of = {rank: keys for rank, keys in arrived_keys.items() if keys is not None}
        ranks_and_keys = [(rank, key) for rank, keys in keys_of.items() for key in keys]
        parcels = self._read_all([key for _, key in ranks_and_keys])
        for rank in keys_of:
            self._read_parcels[kind, rank] = sent[rank]
            del self._late[kind, rank]
        for _, key in ranks_and_keys:
            self._store.delete_key(key)
        pairs = zip(ranks_and_keys, parcels, strict=True)
        return [(rank, parcel) for (rank, _), parcel in pairs if parcel is not None]

    def _arrived_keys(self, kind: str, rank: int, keys: list[str]) -> list[str] | None:
        """Returns the keys of a rank's parcels that are in the store; `None` if others may be on their way."""
        if self._store.check(keys):
            return keys
        self._late[kind, rank] += 1
        if self._late[kind, rank] < _LATE_LOOKS:
            return None
        return [key for key in keys if self._store.check([key])]

    def _read_all(self, keys: list[str]) -> list[Any]:
        """Returns the JSON values of keys that are in the store; `None` for a value without a valid signature."""
        try:
            # One JSON document is parsed faster than its values one by one.
            values: list[Any] = json.loads(b"[" + b",".join(self._store.multi_get(keys)) + b"]")
            return values
        except ClusterError:
            return [self._read(key) for key in keys]

    def _read(self, key: str) -> Any:
        """Returns the JSON value of a key; `None` if it is missing or has no valid signature."""
        try:
            value = self._store.peek(key)
        except ClusterError as error:
            if not self._has_warned:
                _LOG.warning("%s", error)
            self._has_warned = True
            return None
        return None if value is None else json.loads(value)

    def _beat(self) -> None:
        """Sends the driver's heartbeat until the store is closed."""
        while True:
            self._tell(count=self._message["count"] + 1)
            if self._closed.wait(_BEAT_SECONDS):
                return

    def _tell(self, **changes: Any) -> None:
        """Changes fields of the driver's heartbeat, and sends it."""
        with self._message_lock:
            self._message |= changes
            self._store.set("driver", json.dumps(self._message))


def _first_failure_in(failures: list[dict[str, Any]]) -> tuple[SparkTorchError | None, bool]:
    """Returns the first of the reported failures, if any, and whether it may be the root cause.

    A failure that is the consequence of another one comes after all that are not.
    """
    if not failures:
        return None, False
    first = min(failures, key=lambda form: (form["secondary"], form["order"]))
    return SparkTorchError.from_dict(first), not first["secondary"]
