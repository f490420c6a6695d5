"""Real ranks without Spark: one process each, meeting at a `ControlServer` in this one."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import device_count
from sparktorch.base.state_dict import unpack_state, unpacked_weights
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.monitor import Monitor, Timeouts
from sparktorch.distributed.process_group import process_group
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, connect
from sparktorch.errors import SparkTorchError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import TENSOR, mesh_of_training
from sparktorch.worker import RankJob, RankResult, TrainJob, run_on_partition, train_partition
from tests.support.frames import Table

HOST = "127.0.0.1"
DEVICE = os.environ.get("SPARKTORCH_TEST_DEVICE", "cpu")  # of the ranks of all tests: "cuda" on a machine that has some

_EXIT_SECONDS = 10
_DIVIDING = ("zero2", "zero3", "mesh")  # Gloo takes an accelerator's memory for the host's in what these call

# Children are forked from a server that has imported torch already: a rank starts in milliseconds.
SPAWN = multiprocessing.get_context("forkserver")
_PRELOADED = ["tests.support.warm", "tests.support.ranks", "tests.support.nets", "pytest", "torchmetrics"]
_LAST = "tests.support.frozen"
SPAWN.set_forkserver_preload([*_PRELOADED, _LAST])


def preload(module: str) -> None:
    """Lets the server import a module before the first rank is started; called where test modules are imported."""
    _PRELOADED.append(module)
    SPAWN.set_forkserver_preload([*_PRELOADED, _LAST])


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    result: RankResult | None
    error: str
    exitcode: int | None
    left: int = 0


def of_two_ranks() -> DeviceMesh:
    """The mesh of two ranks that share layers, in an open group."""
    group = dist.group.WORLD
    assert group is not None
    return mesh_of_training([group], "cpu", torch.arange(2), [TENSOR])


def in_group(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120, device: str = "cpu"
) -> list[Any]:
    """Calls `function(world, *arguments)` in the ranks of an open group; returns the results by rank."""
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            world = _world(rank, size, device)
            ours, theirs = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(target=_member, args=(theirs, f"{folder}/store", world, function, arguments))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            messages = _receive([pipe for _, pipe in ranks], seconds)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()
    for _, error, _ in messages:
        assert not error, error
    return [result for result, _, _ in messages]


@contextmanager
def control_server() -> Iterator[ControlServer]:
    """Hosts the store of one attempt on the loopback interface."""
    server = ControlServer(HOST, HOST)
    try:
        yield server
    finally:
        server.close()


class _NoObserver:
    def progress(self, record: dict[str, Any]) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        pass


def watch(server: ControlServer, size: int, patience: Timeouts | None = None) -> Monitor:
    """Returns the driver's eye on `size` ranks; nobody is told how far they are."""
    return Monitor(server, size, _NoObserver(), patience or Timeouts())


def cause_of_death(
    server: ControlServer, size: int, message: str = "Python worker exited unexpectedly (crashed)"
) -> SparkTorchError:
    """Returns what the driver makes of a job of `size` ranks that ended with such a message of Spark's."""
    return RootCause(watch(server, size)).explain(RuntimeError(message))


@dataclass(frozen=True, kw_only=True)
class FunctionJob(RankJob):
    """A job of ranks that run a user's function, which is called with their contexts."""

    function: Callable[..., Any]


def run_ranks(
    server: ControlServer,
    partitions: Sequence[Sequence[pa.RecordBatch]],
    job: RankJob,
    *,
    seconds: float = 120,
    environment: Mapping[str, str] | None = None,
    device: str | Sequence[str] = DEVICE,
) -> list[Ended]:
    """Runs a training, or a function, in one process per partition and returns how each one ended, by rank.

    On an accelerator, `meta["waits"]` lists what each rank waited for, as `simulated.synchronisations` does.
    """
    size = len(partitions)
    if _shared(device, size) and job.config.strategy in _DIVIDING:
        pytest.skip(f"{size} ranks want as many devices: Gloo, which joins those that share one, divides nothing there")
    ranks = []
    for rank, batches in enumerate(partitions):
        world = _world(rank, size, device if isinstance(device, str) else device[rank])
        ours, theirs = SPAWN.Pipe(duplex=False)
        arguments = (theirs, server.rendezvous, world, job, list(batches), seconds, dict(environment or {}))
        process = SPAWN.Process(target=_rank, args=arguments)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        messages = _receive([pipe for _, pipe in ranks], seconds)
    finally:
        for process, pipe in ranks:
            if pipe.closed:
                process.join(_EXIT_SECONDS)
            process.kill()
            process.join()
            pipe.close()
    return [
        Ended(result, error, process.exitcode, left)
        for (result, error, left), (process, _) in zip(messages, ranks, strict=True)
    ]


def train_job(table: Table, recipe: Recipe, config: TrainConfig, **more: Any) -> TrainJob:
    """Returns a training on a table's columns, however unequal the ranks' shares are."""
    return TrainJob(columns=table.columns, recipe=recipe, config=config, max_imbalance=None, **more)


def train_on(
    partitions: Sequence[Sequence[pa.RecordBatch]], job: TrainJob, **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Trains on one rank per partition, as `run_ranks`; returns the weights and every rank's meta."""
    with control_server() as server:
        ended = run_ranks(server, partitions, job, **options)
        failure, _ = server.first_failure()
    if failure is not None:
        raise failure
    results = [rank.result for rank in ended if rank.result is not None]
    assert len(results) == len(partitions), ended
    return load_state(results[0]), [result.meta for result in results]


def run_on(partitions: Sequence[Sequence[pa.RecordBatch]], job: FunctionJob, **options: Any) -> list[Any]:
    """Runs a function on one rank per partition, as `run_ranks`; returns what it returned, by rank."""
    with control_server() as server:
        ended = run_ranks(server, partitions, job, **options)
        failure, _ = server.first_failure()
    if failure is not None:
        raise failure
    assert all(rank.result is not None for rank in ended), ended
    return [pickle.loads(rank.result.payload) for rank in ended if rank.result is not None]


def load_state(result: RankResult) -> dict[str, torch.Tensor]:
    """Returns the state that rank 0 handed back."""
    weights = unpacked_weights(result.payload)
    return unpack_state(weights) if isinstance(weights, bytes) else dict(weights)


def _world(rank: int, size: int, device: str) -> World:
    """Returns a rank's place; of a type of accelerator it has the device of its own number, or shares one."""
    index = rank % max(1, device_count(device)) if _shared(device, size) else rank
    own = device if device == "cpu" or ":" in device else f"{device}:{index}"
    return World(rank=rank, world_size=size, local_rank=rank, host=f"host-{rank}", address=HOST, device=own)


def _shared(device: str | Sequence[str], size: int) -> bool:
    """Whether ranks outnumber the accelerators of a type that this machine has."""
    return isinstance(device, str) and device not in ("cpu", "sim") and size > device_count(device)


def _share(world: World) -> None:
    """Lets Gloo join ranks that share a device: NCCL wants one for each."""
    kind = world.device.partition(":")[0]
    if _shared(kind, world.world_size):
        dist.Backend.default_device_backend_map[kind] = "gloo"


def _receive(pipes: list[Connection], seconds: float) -> list[tuple[Any, str, int]]:
    """Returns one message per pipe and closes each one as it ends; a rank that died sends none."""
    deadline = time.monotonic() + seconds
    messages: dict[Connection, tuple[Any, str, int]] = {}
    while open_pipes := [pipe for pipe in pipes if not pipe.closed]:
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank, pipe in enumerate(pipes) if not pipe.closed]
            raise TimeoutError(f"ranks {late} were still running after {seconds} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                messages[pipe] = pipe.recv()
            except EOFError:
                messages.setdefault(pipe, (None, "", 0))
                pipe.close()
    return [messages[pipe] for pipe in pipes]


def _member(pipe: Connection, path: str, world: World, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    _simulate(world.device)
    _share(world)
    store = dist.FileStore(path, world.world_size)
    try:
        with process_group(world, store, timeout=timedelta(seconds=60)):
            pipe.send((function(world, *arguments), "", 0))
    except Exception:
        pipe.send((None, traceback.format_exc(), 0))


def _rank(
    pipe: Connection,
    rendezvous: Rendezvous,
    world: World,
    job: RankJob,
    batches: list[pa.RecordBatch],
    seconds: float,
    environment: dict[str, str],
) -> None:
    """The body of a rank's process: what a barrier task does, without the barrier."""
    os.environ.update(environment)
    _share(world)
    faulthandler.dump_traceback_later(0.9 * seconds)  # a rank that hangs says where
    client = Client(partial(connect, rendezvous.host, rendezvous.port, token=rendezvous.prefix), world)
    with client.beating(), _synchronisations(world.device) as waits:
        try:
            of_function = isinstance(job, FunctionJob)
            body: Any = partial(run_on_partition, function=job.function) if of_function else train_partition
            result = body(iter(batches), world=world, job=job, client=client)
        except Exception as error:
            client.fail(error)
            ended: tuple[RankResult | None, str] = None, type(error).__name__
        else:
            ended = result, ""
    if ended[0] is not None:
        ended[0].meta["waits"] = list(waits)
    module = None if world.device == "cpu" else torch.get_device_module(world.device)
    pipe.send((*ended, 0 if module is None else module.memory_allocated(torch.device(world.device))))


def _simulate(device: str) -> Any:
    """Makes torch know the simulated accelerator, in this process, where a device is one."""
    if not device.startswith("sim"):
        return None
    from tests.support import simulated

    return simulated


@contextmanager
def _synchronisations(device: str) -> Iterator[list[str]]:
    """Lists the host's waits for a device, with their lines; CUDA warns of its own."""
    simulated = _simulate(device)
    if simulated is not None:
        with simulated.synchronisations() as waits:
            yield waits
    elif device.startswith("cuda"):
        with _cuda_synchronisations() as waits:
            yield waits
    else:
        yield []


@contextmanager
def _cuda_synchronisations() -> Iterator[list[str]]:
    """Lists what CUDA's own watch warns of, and what waits for a stream, which it does not look at."""
    found: list[str] = []

    def note(what: str) -> None:
        frames = [frame for frame in traceback.extract_stack()[:-2] if not frame.filename.endswith("/warnings.py")]
        frames = [frame for frame in frames if "/torch/" not in frame.filename]
        callers = " < ".join(frame.name for frame in reversed(frames))
        found.append(f"{what}: {Path(frames[-1].filename).name}: {frames[-1].line} < {callers}")

    def warned(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            note("synchronising")

    def synchronize(stream: Any, wait: Any = torch.cuda.Stream.synchronize) -> None:
        note("synchronize")
        torch.cuda.set_sync_debug_mode("default")  # newer versions of torch warn of it, too
        wait(stream)
        torch.cuda.set_sync_debug_mode("warn")

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(warnings, "showwarning", warned),
            mock.patch.object(torch.cuda.Stream, "synchronize", synchronize),
        ):
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
