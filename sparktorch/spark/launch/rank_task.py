"""The rank's side of a barrier job: a task determines its rank, connects to the store, runs the body and reports."""

from __future__ import annotations

import gc
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import torch.distributed as dist
from pyspark import BarrierTaskContext
from pyspark.sql import Row

from sparktorch.base.config import Device
from sparktorch.base.devices import is_host
from sparktorch.base.world import World
from sparktorch.distributed.addresses import address_towards, host_of
from sparktorch.distributed.client import Client, PeerFailure
from sparktorch.distributed.log_capture import LogCapture
from sparktorch.distributed.process_group import hang_up
from sparktorch.distributed.store import UNREACHED_HINT, Rendezvous, connect, host_store
from sparktorch.errors import JVM_MEMORY_HINT, ClusterError, RankError, RankLostError, SparkTorchError, failure_text
from sparktorch.spark.launch.gpus import choose_device
from sparktorch.spark.shipping import Sent

__all__ = ["RESULT_SCHEMA", "Body", "RankTask", "Result", "StreamBrokenError", "assemble", "unbroken"]

RESULT_SCHEMA = "rank int, meta string, payload binary"

# A row has at most this number of bytes of a result, which suits Arrow and gRPC.
_CHUNK_BYTES = 16 << 20


class Result(Protocol):
    """The result of a rank; see `sparktorch.worker.RankResult`."""

    meta: dict[str, Any]
    payload: bytes


class Body(Protocol):
    """The function that a rank runs; see `sparktorch.worker.train_partition`."""

    def __call__(self, batches: Iterator[pa.RecordBatch], *, world: World, client: Client) -> Result:
        """Computes the rank's result from its record batches."""
        ...


class StreamBrokenError(Exception):
    """Spark has broken off the rows for a task: it ended the task, or could not compute them. Its message says why."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One barrier task: determines its rank, connects to the store, runs the body, and returns or reports a failure.

    Attributes:
        device: Device of the ranks, as users choose it.
        rendezvous: Address and token of the driver's store; `None` if rank 0 hosts the store.
        log_level: Lowest level at which the driver shows what a rank logs.
        patience: Seconds without a heartbeat from the driver after which a rank ends its process.
        local: Whether ranks write where the driver does.
        streamed: Whether rows come from Spark's JVM as an Arrow stream; elements of an RDD come from Python.
    """

    device: Device
    rendezvous: Rendezvous | None
    log_level: int
    patience: float
    local: bool
    streamed: bool

    def __call__(self, batches: Iterator[pa.RecordBatch], sent: Sent) -> Iterator[pa.RecordBatch]:
        """Runs the `Body` in `sent` on the task's record batches, and yields its result as record batches.

        The body is unpickled after the client has connected, so that a failure to unpickle is reported.
        """
        started = time.perf_counter()
        # pyspark collects garbage after every task, and leaves out what is frozen here: all imported objects.
        gc.freeze()
        context = BarrierTaskContext.get()
        assert isinstance(context, BarrierTaskContext)
        world = _world(context)
        rendezvous = self.rendezvous
        hosted_by_rank0 = rendezvous is None
        if rendezvous is None:
            # The store is open as long as rank 0 refers to it.
            rendezvous, _store = _meet_at_rank0(context, world)
        open_store = partial(connect, rendezvous.host, rendezvous.port, token=rendezvous.prefix)
        try:
            world = replace(world, address=address_towards(rendezvous.host))
            client = Client(
                open_store, world, console=LogCapture(self.log_level, shared=self.local), patience=self.patience
            )
        except dist.DistError as error:
            raise _unreached(error.__cause__ or error, rendezvous, world) from None
        connect_seconds = time.perf_counter() - started
        with client.beating():
            device = "cpu"
            try:
                gpus = context.resources().get("gpu")
                addresses = gpus.addresses if gpus else []
                device = choose_device(self.device, addresses, local_rank=world.local_rank, local_size=world.local_size)
                body: Body = sent.load()
                rows = unbroken(batches) if self.streamed else batches
                result = body(rows, world=replace(world, device=device), client=client)
                if hosted_by_rank0:
                    # The store is in the process of rank 0, which waits here until no other rank needs it.
                    client.leave()
            except StreamBrokenError:  # It is a consequence of another failure, and not reported.
                raise
            except Exception as error:
                failure = client.fail(error)
                if hosted_by_rank0 or not _is_reusable(device, error) or not client.is_heard(error):
                    raise _carrying(failure) from None
                # The process lives on for other tasks: open connections would let peers wait for this rank.
                hang_up(error)
                # The task ends without raising, since the driver knows the failure: Spark would log an exception, with
                # Java's stack, for each rank.
                return
        result.meta.setdefault("seconds", {})["connect"] = connect_seconds
        yield from _chunks(world.rank, result)


def _is_reusable(device: str, error: Exception) -> bool:
    """Returns whether Spark may reuse the process of a rank that has failed: an accelerator may not answer any more."""
    return is_host(device) or isinstance(error, SparkTorchError | PeerFailure)


def unbroken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream from Spark; raises `StreamBrokenError` if the stream breaks off."""
    try:
        yield from batches
    except (pa.ArrowInvalid, OSError, EOFError) as error:  # A `MemoryError` is a failure of this rank itself.
        raise StreamBrokenError(str(error) or type(error).__name__) from error


def _world(context: BarrierTaskContext) -> World:
    """Returns the rank's world on the CPU: a partition's number is the rank, and ranks on one host are neighbours."""
    hosts = [host_of(info.address) for info in context.getTaskInfos()]
    rank = context.partitionId()
    return World(
        rank=rank,
        world_size=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_size=hosts.count(hosts[rank]),
        host=hosts[rank],
        threads=max(1, context.cpus()),
    )


def _meet_at_rank0(context: BarrierTaskContext, world: World) -> tuple[Rendezvous, Any]:
    """Hosts the store on rank 0, and shares its address by `allGather`, which takes about a second.

    Returns the address, and the store in rank 0, `None` in the others.
    """
    store = None
    offer = ""
    if world.is_main:
        host = host_of(context.getTaskInfos()[0].address)
        store, port = host_store(host)
        offer = json.dumps([host, port, secrets.token_hex(16)])
    # All ranks call `allGather`, and only rank 0 offers an address.
    host, port, prefix = json.loads(context.allGather(offer)[0])
    return Rendezvous(host, port, prefix), store


def _unreached(error: BaseException, rendezvous: Rendezvous, world: World) -> RankError:
    """Returns the error for a rank that does not reach the store."""
    # After other errors a restart may help: they may be temporary.
    misconfigured = isinstance(error, socket.gaierror | ConnectionRefusedError)
    what = f"a rank does not reach the store at which the ranks meet, {rendezvous.host}:{rendezvous.port}: {error}"
    error_class = ClusterError if misconfigured else RankLostError
    return _carrying(error_class(what, hint=UNREACHED_HINT, rank=world.rank, host=world.host))


def _carrying(failure: SparkTorchError) -> RankError:
    """Returns an exception that carries the failure in its message, from which `failure_in` reads it on the driver."""
    return RankError(failure.what, **failure.where, code=failure.code, trace=failure_text(failure))


def _chunks(rank: int, result: Result) -> Iterator[pa.RecordBatch]:
    """Yields the result as record batches of `RESULT_SCHEMA`, of one row each; the first row alone has the metadata."""
    payload = memoryview(result.payload)
    meta = json.dumps({"meta": result.meta, "bytes": len(payload)})
    for start in range(0, max(1, len(payload)), _CHUNK_BYTES):
        yield pa.RecordBatch.from_pydict(
            {
                "rank": pa.array([rank], pa.int32()),
                "meta": pa.array([meta if start == 0 else None], pa.string()),
                "payload": pa.array([payload[start : start + _CHUNK_BYTES]], pa.binary()),
            }
        )


def assemble(rows: Iterable[Row], world_size: int) -> list[tuple[dict[str, Any], bytes]]:
    """Joins the chunks of all ranks; returns `(meta, payload)` of each rank, in the order of ranks.

    A `ClusterError` says that chunks are missing: Spark ends the rows without an error where its JVM has no memory for
    the rows.
    """
    heads: dict[int, dict[str, Any]] = {}
    parts: dict[int, list[bytearray]] = {rank: [] for rank in range(world_size)}
    for rank, meta, payload in rows:
        if meta is not None:
            heads[rank] = json.loads(meta)
        parts[rank].append(payload)
    results = [(heads.get(rank, {}), b"".join(parts[rank])) for rank in range(world_size)]
    for rank, (head, payload) in enumerate(results):
        if head.get("bytes") != len(payload):
            raise ClusterError(
                f"only {len(payload):,} of {head.get('bytes', 'an unknown number of')} bytes that the rank returned "
                "have come to the driver",
                hint=JVM_MEMORY_HINT,
                rank=rank,
                code="ST-DRIVER-MEMORY",
            )
    return [(head["meta"], payload) for head, payload in results]
