"""Runs a function in the tasks of one barrier job: each task is a rank."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark import RDD
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, SparkSession

from sparktorch.base.config import Device
from sparktorch.distributed.monitor import Monitor, Observer, Timeouts
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, allow_connections
from sparktorch.errors import ClusterError, ConfigError, ModuleError, RankLostError
from sparktorch.spark.compat import Collect, on_barrier
from sparktorch.spark.launch.rank_task import RESULT_SCHEMA, Body, RankTask, assemble
from sparktorch.spark.launch.spark_job import Job, new_tag
from sparktorch.spark.session import driver_address, is_connect, session_of
from sparktorch.spark.shipping import ShippingError, send

__all__ = ["Launch", "control_server", "monitor", "plan", "run_ranks", "unshippable", "unstarted"]

_POLL_SECONDS = 0.05
_MEETING_SECONDS = 10.0  # between the starts of the first and the last task


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks are launched.

    Attributes:
        rendezvous: Host of the store: the driver, rank 0, or "auto": the driver if executors can reach it, otherwise
            rank 0.
        profile: Resource profile of the tasks, `None` for the session's default.
        patience: How long the driver and the ranks wait for each other.
        log_level: Lowest level at which the driver shows the ranks' logs and output.
        tag: Spark job tag, a new one in each attempt.
        pauses: Called with the tag, often, while the ranks train; returns whether they are asked to save a checkpoint
            and to end.
    """

    world_size: int
    device: Device = "auto"
    rendezvous: Literal["auto", "driver", "rank0"] = "auto"
    profile: ResourceProfile | None = None
    patience: Timeouts = field(default_factory=Timeouts)
    log_level: int = logging.WARNING
    tag: str = field(default_factory=new_tag)
    pauses: Callable[[str], bool] = field(default=lambda tag: False, compare=False)


def run_ranks(
    data: DataFrame | RDD[Any], body: Body, launch: Launch, observer: Observer
) -> list[tuple[dict[str, Any], bytes]]:
    """Runs `body` once per partition, in barrier tasks, and returns `(meta, payload)` of each rank, in rank order.

    `body` is called in each rank with its record batches or elements, its `World` and its `Client`. If a rank fails,
    the root cause is raised, with rank, host and the rank's traceback. A `KeyboardInterrupt` cancels the job, and is
    raised again.
    """
    spark = session_of(data)
    with ExitStack() as stack:
        server = control_server(spark, launch)
        if server is not None:
            stack.enter_context(closing(server))
        job = Job(spark, plan(data, body, launch, server.rendezvous if server else None), launch.tag)
        watch = monitor(server, job, launch, observer)
        causes = RootCause(watch)
        job.start()
        try:
            while not job.wait(_POLL_SECONDS):
                watch.look()
                watch.look_for_failure()
                if server is not None and watch.trains and launch.pauses(launch.tag):
                    server.pause()
            watch.listen()
        except BaseException:  # an interrupt, stalled ranks, or ranks that do not end after a failure
            if server is not None:
                server.cancel()
            job.cancel()
            raise
        failed = causes.of_ended(job.error or unstarted(job.rows))
        # An executor that is to go ends with its last task, and Spark may hear of that before it has noted the task's end.
        if isinstance(failed, RankLostError) and server is not None and server.has_paused(launch.world_size):
            return [({"paused": True}, b"")] * launch.world_size
        if failed is not None:
            raise failed from (None if server else job.error)
    return assemble(job.rows, launch.world_size)


def control_server(spark: SparkSession, launch: Launch) -> ControlServer | None:
    """Returns the driver's store for a job; `None` if rank 0 hosts it.

    A `ConfigError` says that the driver is to host it, and that executors do not reach this process.
    """
    if launch.rendezvous == "rank0":
        return None
    address = driver_address(spark)
    if address is None:
        if launch.rendezvous == "driver":
            raise ConfigError(
                "rendezvous='driver', but this process is a Connect client on another machine",
                hint="use rendezvous='auto' or 'rank0'",
                param="rendezvous",
            )
        return None
    allow_connections(launch.world_size)
    try:
        return ControlServer(*address)
    except OSError as error:
        if launch.rendezvous == "auto" and is_connect(spark):
            return None  # through a tunnel, the server's address is not one of this machine
        raise ClusterError(
            f"cannot listen on {address[0]!r}: {error}",
            hint="set spark.driver.bindAddress to an address of this machine that executors reach",
            code="ST-DRIVER-REACHABLE",
        ) from error


def monitor(
    server: ControlServer | None, job: Job, launch: Launch, observer: Observer, *, running: bool = False
) -> Monitor:
    """Returns what watches the ranks of a job; see `Monitor`."""
    waits: dict[str, Any] = {"is_starved": job.is_starved, "running": running}
    return Monitor(server, launch.world_size, observer, launch.patience, log_level=launch.log_level, **waits)


def unstarted(rows: Iterable[Row]) -> RuntimeError | None:
    """Returns the Python traceback of a job in which no rank could start."""
    return next((RuntimeError(meta) for rank, meta, _ in rows if rank < 0), None)


def unshippable(error: ShippingError) -> ModuleError:
    """Returns the error of a fit whose module, loss or optimizer cannot be pickled."""
    return ModuleError(
        f"the module, loss or optimizer cannot be shipped to the ranks: {error}",
        hint="it holds, or its code uses as a global, something that stays in this process (a lock, a file, a "
        "session): make that inside the module's __init__",
        code="ST-SHIP",
    )


def plan(data: DataFrame | RDD[Any], body: Body, launch: Launch, rendezvous: Rendezvous | None) -> Collect:
    """Returns a callable that runs `body` in the barrier tasks, and collects their results."""
    try:
        sent = vars(send(session_of(data), body))
    except ShippingError as error:
        raise unshippable(error) from error.__cause__
    streamed = not isinstance(data, RDD)
    console, patience, hosted = launch.log_level, launch.patience.driver, rendezvous is not None
    task = pickle.dumps(RankTask(launch.device, rendezvous, console, patience=patience, streamed=streamed))

    def none_starts() -> bool:
        """Whether no task of the job can start: one that can waits at the store, and never comes here."""
        import threading

        from pyspark import BarrierTaskContext

        met = threading.Event()

        def meet() -> None:
            BarrierTaskContext.get().allGather()
            met.set()

        threading.Thread(target=meet, daemon=True).start()
        return met.wait(_MEETING_SECONDS)

    # Both work without this package, which executors may lack.
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import gc
        import pickle
        import traceback

        # Unpickling imports torch, which creates hundreds of thousands of objects and no garbage. Garbage
        # collection would take a large part of the import time.
        gc.disable()
        try:
            from sparktorch.spark.shipping import Sent

            rank_task: RankTask = pickle.loads(task)
        except Exception as error:
            if not hosted or not none_starts():
                raise
            columns = [
                pa.array([-1], pa.int32()),
                pa.array(["".join(traceback.format_exception(error))]),
                pa.array([b""]),
            ]
            return iter([pa.RecordBatch.from_arrays(columns, ["rank", "meta", "payload"])])
        finally:
            gc.enable()
        return rank_task(batches, Sent(**sent))

    return on_barrier(data, run, RESULT_SCHEMA, launch.profile)
