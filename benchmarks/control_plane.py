"""What the driver does for many ranks, and how soon it knows of one that fails or dies; the ranks are simulated.

The driver is a process of its own, with the store, its server and the monitor of a job, which it polls as a job does.
The ranks are threads of a few processes. Each has the client of a real one, with both of its connections and its
heartbeat, but neither rows nor a process group. They share this machine's cores with the driver: what that costs is its
processor time, and latencies hold for a machine that has as much else to do. What each real rank does on a core of its
own is done once in a process here: the parsing of an agreement, and the description of an error.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import Mock

from benchmarks.common import Goal, arguments, machine, report
from sparktorch.base.world import World
from sparktorch.distributed import heartbeat
from sparktorch.distributed.client import Client
from sparktorch.distributed.log_capture import LogCapture
from sparktorch.distributed.monitor import Monitor, Timeouts
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, SealedStore, allow_connections, connect
from sparktorch.errors import SparkTorchError

SIZES = (2, 64, 256, 1024, 4096)
REPEATS, MOST_REPEATED = 5, 1024  # 4,096 ranks are measured once: they take three minutes.
QUICK = (2, 32)
CROWDS = 4  # The ranks are threads of so many processes.
AT_ONCE = 16  # So many ranks of a process connect at the same time.
POLL_SECONDS = 0.05  # The watch of a job looks this often for orders.
STEP_SECONDS = 0.5  # A step takes so long in a training that is paused.
MESSAGES = {"set": 1, "check": 1, "peek": 1, "add": 1, "delete_key": 1, "list_keys": 1, "get": 2, "multi_get": 2}
GOALS = {
    "driver, 1024 ranks train: share of a core": Goal(0.1),
    "lost rank named, 1024 ranks, s": Goal(5.0),
    "agree, 1024 ranks, s": Goal(2.0),
    "driver's share, 4096 / 256 ranks": Goal(16.0),
}
HOST = "127.0.0.1"
SPAWN = get_context("forkserver")


class Counter:
    """Counts the messages that this process sends to the store."""

    def __init__(self) -> None:
        """Counts from now on."""
        self.sent = 0
        for name, messages in MESSAGES.items():
            setattr(SealedStore, name, self._counted(getattr(SealedStore, name), messages))

    def _counted(self, method: Callable[..., Any], messages: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.sent += messages
            return method(*arguments)

        return call


_described: dict[type[BaseException], SparkTorchError] = {}


class Simulated(Client):
    """A rank whose heart can be stopped as if its process had died."""

    dead = False

    def beat(self, store: Any) -> None:
        """Beats, unless it is dead."""
        if not self.dead:
            super().beat(store)

    def describe(self, error: BaseException) -> SparkTorchError:
        """Describes an error once for all ranks of the process: real ones have cores of their own for it."""
        kind = type(error)
        if kind not in _described:
            _described[kind] = super().describe(error)
        form = _described[kind].to_dict()
        where = {**form["where"], "rank": self._world.rank, "host": self._world.host}
        return SparkTorchError.from_dict({**form, "where": where})


class Crowd:
    """Some of the ranks of a job, as threads of this process."""

    def __init__(self, meeting: Rendezvous, ranks: range, size: int) -> None:
        """Starts the threads; each connects."""
        allow_connections(len(ranks))
        self._open_store: Any = partial(connect, meeting.host, meeting.port, token=meeting.prefix)
        self._size, self._ranks, self._clients = size, ranks, dict[int, Simulated]()
        self._steps = {name: threading.Event() for name in ("agree", "pause", "wait", "end")}
        self._times: dict[str, list[float]] = {"began": [], "agreed": [], "paused": [], "stopped": [], "left": []}
        self._threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in ranks]
        for number, thread in enumerate(self._threads):
            while number - len(self._times["began"]) >= AT_ONCE:
                time.sleep(0.01)
            thread.start()

    def go(self, step: str) -> None:
        """Lets the ranks take their next step."""
        self._steps[step].set()

    def times(self, name: str, patience: float = 120.0) -> float:
        """Waits until all ranks have come to a point; returns when the last one did, by `time.monotonic`."""
        deadline = time.monotonic() + patience
        while len(self._times[name]) < len(self._ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._times[name])} of {len(self._ranks)} ranks have {name}")
            time.sleep(0.01)
        return max(self._times[name])

    def die(self, rank: int | None) -> float:
        """Stops the heart of a rank, or those of all; returns when."""
        for number, client in self._clients.items():
            if rank in (None, number):
                client.dead = True
        return time.monotonic()

    def fail(self, rank: int, error: Exception) -> float:
        """Lets a rank report an error, and hear of the driver; returns when it had it."""
        had, client = time.monotonic(), self._clients[rank]
        client.fail(error)
        client.is_heard(error)
        return had

    def _live(self, rank: int) -> None:
        world = World(rank=rank, world_size=self._size, host=f"host-{rank // 8}")
        client = self._clients[rank] = Simulated(self._open_store, world, patience=120.0)
        with suppress(Exception), client.beating():
            client.enter("waiting for the other ranks")
            self._times["began"].append(time.monotonic())
            self._steps["agree"].wait()
            client.agree("shard", facts(rank))
            self._times["agreed"].append(time.monotonic())
            client.enter("training", epoch=1, step=1)
            client.pause.begin(1)
            self._steps["wait"].wait()
            if self._steps["pause"].is_set():
                steps = itertools.count(1)
                while not client.pause.stops_after(next(steps)):
                    time.sleep(STEP_SECONDS)
                self._times["paused"].append(time.monotonic())
            elif not self._steps["end"].is_set():
                self._wait(client, rank)
        self._times["left"].append(time.monotonic())

    def _wait(self, client: Simulated, rank: int) -> None:
        """Waits for all ranks, of which one never comes, until the driver or another rank ends it."""
        try:
            client.agree("never" if rank == self._size - 1 else "next", {})
        except Exception as error:
            self._times["stopped"].append(time.monotonic())
            if client.dead:
                self._steps["end"].wait()  # Without this, it would say that it ends.
                return
            client.fail(error)
            client.is_heard(error)


def facts(rank: int) -> dict[str, Any]:
    """Returns what a rank tells the others of its rows."""
    rows = {"rows": 10_000_000 + rank, "validation": 1_000 + rank, "fingerprint": hash((rank, "rows")) % 2**64}
    location = {"device": f"cuda:{rank % 8}", "host": f"worker-{rank // 8}.example.com", "saved_by_position": None}
    return {**rows, **location, "folds": {}, "groups": None}


def crowd(pipe: Connection) -> None:
    """Simulates ranks as it is told."""
    threading.stack_size(256 << 10)
    sys.setswitchinterval(0.5)  # A thread that waits for the interpreter's lock wakes up this often.
    heartbeat._LEAVING_SECONDS = 60.0  # A rank that does not end in time would end its whole process.
    # Real ranks have cores of their own; here, one of them decodes a message for all.
    for module, name in ((json, "loads"), (zlib, "decompress")):
        setattr(module, name, functools.lru_cache(16)(getattr(module, name)))
    # All ranks share one output, which only one of them could capture.
    LogCapture.overhearing = lambda self: nullcontext()  # type: ignore[method-assign]
    counter, ranks = Counter(), None
    with suppress(EOFError):
        while True:
            name, values = pipe.recv()
            if name == "join":
                ranks, answer = Crowd(*values), None
            elif name == "spent":
                answer = time.process_time(), counter.sent
            else:
                answer = getattr(ranks, name)(*values)
            pipe.send(answer)


def driver(pipe: Connection) -> None:
    """Watches one job after another as `run_ranks` does; it is told their numbers of ranks."""
    counter = Counter()
    with suppress(EOFError):
        while True:
            _watch(pipe, pipe.recv(), counter)


def _watch(pipe: Connection, size: int, counter: Counter) -> None:
    """Watches a job until it is told to end."""
    allow_connections(size)
    with closing(ControlServer(HOST, HOST)) as server:
        watch = Monitor(server, size, Mock(), Timeouts())
        causes, known_since = RootCause(watch), None
        pipe.send(server.rendezvous)
        while True:
            if pipe.poll(POLL_SECONDS):
                name, value = pipe.recv()
                if name == "end":
                    return
                if name == "known":
                    pipe.send(known_since)
                elif name in ("pause", "cancel"):
                    pipe.send(time.monotonic())
                    getattr(server, name)()
                elif name == "spent":
                    pipe.send((time.process_time(), counter.sent))
                elif name == "begun":
                    pipe.send(sum(beat is not None for beat in server.beats(size)))
                elif name == "lost":
                    cause = causes.explain(RuntimeError(value))
                    pipe.send((cause.where.get("rank"), cause.what, time.monotonic()))
            watch.look()
            if known_since is None and server.acknowledge() is not None:
                known_since = time.monotonic()


class Job:
    """A driver and its simulated ranks."""

    def __init__(self, size: int, crowds: list[Connection], pipe: Connection) -> None:
        """Lets the ranks join, and waits until the driver has heard of each."""
        self.size, self._pipe = size, pipe
        meeting = pipe.recv()
        started = time.monotonic()
        edges = [size * number // len(crowds) for number in range(len(crowds) + 1)]
        parts = zip(crowds, itertools.starmap(range, itertools.pairwise(edges)), strict=True)
        self._parts = [(pipe, ranks) for pipe, ranks in parts if ranks]
        for crowd_pipe, ranks in self._parts:
            crowd_pipe.send(("join", (meeting, ranks, size)))
        for crowd_pipe, _ in self._parts:
            crowd_pipe.recv()
        while self.ask("begun") < size:
            time.sleep(0.05)
        self.joined = time.monotonic() - started

    def ask(self, name: str, value: Any = None) -> Any:
        """Asks the driver."""
        self._pipe.send((name, value))
        return self._pipe.recv()

    def tell(self, name: str, *values: Any, rank: int | None = None) -> list[Any]:
        """Tells all crowds, or that of a rank; returns their answers."""
        parts = [pipe for pipe, ranks in self._parts if rank is None or rank in ranks]
        for pipe in parts:
            pipe.send((name, values))
        return [pipe.recv() for pipe in parts]

    def agree(self) -> float:
        """Lets the ranks agree; returns when the last one has."""
        self.tell("go", "agree")
        return float(max(self.tell("times", "agreed")))

    def spent(self, seconds: float) -> dict[str, float]:
        """Returns what the job costs in that time, as shares of a core, and messages to the store a second."""
        before, started = [self.ask("spent"), *self.tell("spent")], time.monotonic()
        time.sleep(seconds)
        after, took = [self.ask("spent"), *self.tell("spent")], time.monotonic() - started
        driver, *ranks = [(now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after, strict=True)]
        return {
            "driver": driver[0] / took,
            "ranks": sum(cpu for cpu, _ in ranks) / took,
            "messages": (driver[1] + sum(sent for _, sent in ranks)) / took,
        }


class Simulation:
    """The processes of driver and ranks."""

    def __init__(self) -> None:
        """Starts them."""
        self._pipes, self._processes = list[Connection](), list[Any]()
        for target in (driver, *[crowd] * CROWDS):
            ours, theirs = SPAWN.Pipe()
            self._processes.append(SPAWN.Process(target=target, args=(theirs,), daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    @contextmanager
    def job(self, size: int, *, waits: bool = False) -> Iterator[Job]:
        """Starts a job whose ranks have all begun, or wait for a message that never comes."""
        of_driver, *crowds = self._pipes
        of_driver.send(size)
        job = Job(size, crowds, of_driver)
        if waits:
            job.agree()
            job.tell("go", "wait")
            time.sleep(1)
        yield job
        job.tell("times", "left")
        of_driver.send(("end", None))

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()
            process.join()


def measure(size: int, ranks: Simulation, seconds: float) -> dict[str, float]:
    """Measures jobs of as many ranks: one is cancelled, one has an error, one is paused, and one loses a rank."""
    figures: dict[str, float] = {}
    window = max(seconds, 5 * size / 1000)
    with ranks.job(size) as calm:

        def spend(what: str) -> None:
            for name, value in calm.spent(window).items():
                figures[f"{what}: {name}"] = value

        figures["all ranks heard of, s"] = calm.joined
        spend("idle")
        begun = time.monotonic()
        figures["agree, s"] = calm.agree() - begun
        spend("train")
        calm.tell("go", "wait")
        spend("wait")
        cancelled = calm.ask("cancel")
        figures["cancelled, s"] = max(calm.tell("times", "stopped")) - cancelled
    with ranks.job(size, waits=True) as failing:
        (had,) = failing.tell("fail", 1, ValueError("planted"), rank=1)
        known_since = failing.ask("known")
        while known_since is None:
            time.sleep(0.01)
            known_since = failing.ask("known")
        figures["error known, s"] = known_since - had
        figures["error: all ranks stopped, s"] = max(failing.tell("times", "stopped")) - had
    with ranks.job(size) as pausing:
        pausing.agree()
        pausing.tell("go", "pause")
        pausing.tell("go", "wait")
        asked = pausing.ask("pause")
        figures["paused, s"] = max(pausing.tell("times", "paused")) - asked
    with ranks.job(size, waits=True) as losing:
        lost, peer = size // 2, (size // 2 + 1) % size
        (died,) = losing.tell("die", lost, rank=lost)
        losing.tell("fail", peer, RuntimeError("Connection reset by peer"), rank=peer)
        losing.tell("die", None)  # Spark ends all tasks once one has ended
        rank, what, named = losing.ask("lost", f"barrier task ResultTask(7, {peer}) finished unsuccessfully")
        assert rank == lost, (rank, lost, what)
        figures["lost rank named, s"] = named - died
        losing.tell("go", "end")
    return figures


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the numbers of ranks, and how long they train."""
    parser.add_argument("--sizes", type=int, nargs="*", help="numbers of ranks")
    parser.add_argument("--seconds", type=float, default=5.0, help="that ranks wait and train, at least")


def main() -> None:
    """Measures, and reports."""
    args = arguments(__doc__ or "", options)
    sizes = args.sizes or (QUICK if args.quick else SIZES)
    samples: dict[str, list[float]] = {}
    with closing(Simulation()) as ranks:
        for size in sizes:
            for _ in range(1 if args.quick or size > MOST_REPEATED else REPEATS):
                for name, value in measure(size, ranks, 2.0 if args.quick else args.seconds).items():
                    print(f"{size} ranks: {name}: {value:.4g}", file=sys.stderr, flush=True)
                    samples.setdefault(f"{size} ranks: {name}", []).append(value)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {}
    for size in sizes:
        ratios[f"driver, {size} ranks train: share of a core"] = medians[f"{size} ranks: train: driver"]
        ratios[f"driver, {size} ranks wait: share of a core"] = medians[f"{size} ranks: wait: driver"]
        for name in ("lost rank named", "agree", "paused"):
            ratios[f"{name}, {size} ranks, s"] = medians[f"{size} ranks: {name}, s"]
    if {256, 4096} <= {*sizes}:
        most, fewer = medians["4096 ranks: train: driver"], medians["256 ranks: train: driver"]
        ratios["driver's share, 4096 / 256 ranks"] = most / fewer
    goals = {name: goal for name, goal in GOALS.items() if name in ratios}
    report("control_plane", samples=samples, ratios=ratios, goals=goals, facts=machine("torch"), path=args.json)


if __name__ == "__main__":
    main()
