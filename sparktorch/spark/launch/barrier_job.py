"""Runs a function in the tasks of one barrier job: each task is a rank."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pyarrow as pa
from pyspark import RDD
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.config import Device
from sparktorch.base.no_op import never
from sparktorch.distributed.monitor import Monitor, Observer, Timeouts
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, allow_connections
from sparktorch.errors import ClusterError, ConfigError, ModuleError, RankLostError
from sparktorch.spark.compat import Collect, on_barrier
from sparktorch.spark.launch.rank_task import RESULT_SCHEMA, Body, RankTask, assemble
from sparktorch.spark.launch.spark_job import Job, new_tag
from sparktorch.spark.session import driver_address, is_connect, is_local, session_of
from sparktorch.spark.shipping import ShippingError, send

__all__ = ["BarrierJob", "Launch", "control_server", "listening_on_driver", "run_ranks", "unshippable"]

T = TypeVar("T")
Batches = Iterator[pa.RecordBatch]

_POLL_SECONDS = 0.05
_MEETING_SECONDS = 10.0  # The last task starts within this time after the first one.


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks are launched.

    Attributes:
        world_size: Number of ranks.
        device: Device of the ranks, as users choose it.
        rendezvous: Host of the store: the driver, rank 0, or "auto": the driver if executors can reach it, otherwise
            rank 0.
        profile: Resource profile of the tasks, `None` for the session's default.
        patience: How long the driver and the ranks wait for each other.
        log_level: Lowest level at which the driver shows the ranks' logs and output.
        tag: Spark job tag, a new one in each attempt.
        asks_to_pause: Called with the tag, often, while the ranks train; returns whether they shall save a checkpoint
            and end.
    """

    world_size: int
    device: Device = "auto"
    rendezvous: Literal["auto", "driver", "rank0"] = "auto"
    profile: ResourceProfile | None = None
    patience: Timeouts = field(default_factory=Timeouts)
    log_level: int = logging.WARNING
    tag: str = field(default_factory=new_tag)
    asks_to_pause: Callable[[str], bool] = field(default=never, compare=False)


class BarrierJob:
    """The driver's side of one barrier job: its store, the job, and what watches its ranks.

    `wait` comes first, then `results`, and `end` in any case. `cancel` may take the place of `results`.
    """

    def __init__(self, data: DataFrame | RDD[Any], body: Body, launch: Launch, observer: Observer) -> None:
        """Opens the store; `wait` starts the job, in which `body` runs once per partition."""
        spark = session_of(data)
        self._launch = launch
        self._ended = False
        # Where something here raises, the `ExitStack` closes the store; otherwise the store stays open until `end`.
        with ExitStack() as open_store:
            self._server = server = control_server(spark, launch)
            if server is not None:
                open_store.enter_context(closing(server))
            collect = _collector(data, body, launch, None if server is None else server.rendezvous)
            self._job = Job(spark, collect, launch.tag)
            self._monitor = self._make_monitor(server, observer)
            self._causes = RootCause(self._monitor)
            self._open_store = open_store.pop_all()

    def wait(self, seconds: float, is_met: Callable[[], bool] = never) -> bool:
        """Starts the job, and looks at it every `seconds` until it has ended, or `is_met()`.

        Returns whether the condition was met before the job ended. Whatever is raised meanwhile, such as a
        `KeyboardInterrupt`, cancels the job.
        """
        self._job.start()
        try:
            while not self._job.wait(seconds):
                self._monitor.look()
                self._monitor.give_time_to_end()
                self._pause_if_asked()
                if is_met():
                    return True
            self._monitor.listen()
        except BaseException:  # It is an interrupt, ranks have stalled, or they do not end after a failure.
            self.cancel()
            raise
        return False

    def results(self) -> list[tuple[dict[str, Any], bytes]]:
        """Returns what the ranks of the ended job have returned, in rank order, or raises the root cause."""
        world_size = self._launch.world_size
        # A task that cannot unpickle its `RankTask` returns the traceback under a negative rank: see `_task_function`.
        tracebacks = [meta for rank, meta, _ in self._job.rows if rank < 0]
        unstarted = RuntimeError(tracebacks[0]) if tracebacks else None
        failure = self._causes.explain_ended(self._job.error or unstarted)
        if failure is None:
            return assemble(self._job.rows, world_size)
        # An executor that is to go ends with its last task. If Spark hears of the executor's end before the task's end,
        # it takes the task for lost. The ranks have returned this result all the same, see `sparktorch.worker`.
        if isinstance(failure, RankLostError) and self._server is not None and self._server.has_paused(world_size):
            return [({"paused": True}, b"")] * world_size
        # Where the driver hosts the store, the ranks' reports say all that Spark's long exception does.
        raise failure from (self._job.error if self._server is None else None)

    def cancel(self) -> None:
        """Cancels the job at once."""
        self.interrupt()
        self.end()

    def interrupt(self) -> None:
        """Cancels the job at once, also from another thread than the one that waits, which then raises."""
        if not self._ended and not self._job.wait(0):
            if self._server is not None:
                self._server.cancel()
            self._job.cancel()

    def end(self) -> None:
        """Closes the store; can be called twice."""
        self._ended = True
        self._open_store.close()

    def _pause_if_asked(self) -> None:
        """Asks the ranks to save a checkpoint and to end, once they train and `asks_to_pause` says so."""
        if self._server is None or not self._monitor.is_training:
            return
        if self._launch.asks_to_pause(self._launch.tag):
            self._server.pause()

    def _make_monitor(self, server: ControlServer | None, observer: Observer, *, has_slots: bool = False) -> Monitor:
        return Monitor(
            server,
            self._launch.world_size,
            observer,
            self._launch.patience,
            log_level=self._launch.log_level,
            is_starved=self._job.is_starved,
            has_slots=has_slots,
        )


def run_ranks(
    data: DataFrame | RDD[Any], body: Body, launch: Launch, observer: Observer
) -> list[tuple[dict[str, Any], bytes]]:
    """Runs `body` once per partition, in barrier tasks, and returns `(meta, payload)` of each rank, in rank order.

    `body` is called in each rank with its record batches or elements, its `World` and its `Client`. If a rank fails,
    the root cause is raised, with rank, host and the rank's traceback. A `KeyboardInterrupt` cancels the job, and is
    raised again.
    """
    job = BarrierJob(data, body, launch, observer)
    try:
        job.wait(_POLL_SECONDS)
        return job.results()
    finally:
        job.end()


def listening_on_driver(spark: SparkSession, launch: Launch, listen: Callable[[str, str], T]) -> T | None:
    """Returns what `listen` opens on the driver; `None` if rank 0 is to host the store.

    `listen` gets the address to bind, and the address at which executors reach it.
    """
    address = None if launch.rendezvous == "rank0" else driver_address(spark)
    if address is None:
        return None
    bind, advertise = address
    try:
        return listen(bind, advertise)
    except OSError:
        if launch.rendezvous == "auto" and is_connect(spark):
            return None  # Through a tunnel, the server's address is not one of this machine.
        raise


def control_server(spark: SparkSession, launch: Launch) -> ControlServer | None:
    """Returns the driver's store for a job; `None` if rank 0 hosts the store.

    A `ClusterError` says that the driver cannot listen on its address. A `ConfigError` says that the driver is to host
    the store, but executors do not reach this process.
    """

    def listen(bind: str, advertise: str) -> ControlServer:
        allow_connections(launch.world_size)
        return ControlServer(bind, advertise)

    try:
        server = listening_on_driver(spark, launch, listen)
    except OSError as error:
        address = driver_address(spark)
        assert address is not None  # Something has tried to listen there.
        raise ClusterError(
            f"cannot listen on {address[0]!r}: {error}",
            hint="set spark.driver.bindAddress to an address of this machine that executors reach",
            code="ST-DRIVER-REACHABLE",
        ) from error
    if server is None and launch.rendezvous == "driver":
        raise ConfigError(
            "rendezvous='driver', but this process is a Connect client on another machine",
            hint="use rendezvous='auto' or 'rank0'",
            param="rendezvous",
        )
    return server


def unshippable(error: ShippingError) -> ModuleError:
    """Returns the error for what ranks are to run, if it cannot be pickled.

    In fits, that is the module, loss or optimizer. Functions of users are checked before (`ml/fit/run`).
    """
    return ModuleError(
        f"the module, loss or optimizer cannot be shipped to the ranks: {error}",
        hint="it holds, or its code uses as a global, something that stays in this process (a lock, a file, a "
        "session): make that inside the module's __init__",
        code="ST-SHIP",
    )


def _collector(data: DataFrame | RDD[Any], body: Body, launch: Launch, rendezvous: Rendezvous | None) -> Collect:
    """Returns a callable that runs `body` in the barrier tasks, and collects their results."""
    spark = session_of(data)
    try:
        sent = send(spark, body)
    except ShippingError as error:
        raise unshippable(error) from error.__cause__
    task = RankTask(
        device=launch.device,
        rendezvous=rendezvous,
        log_level=launch.log_level,
        patience=launch.patience.driver,
        local=is_local(spark),
        streamed=not isinstance(data, RDD),
    )
    run = _task_function(pickle.dumps(task), vars(sent), driver_hosts=rendezvous is not None)
    return on_barrier(data, run, RESULT_SCHEMA, launch.profile)


def _task_function(task: bytes, sent_fields: dict[str, Any], *, driver_hosts: bool) -> Callable[[Batches], Batches]:
    """Returns the function that Spark calls in each task; it runs a pickled `RankTask`.

    Spark pickles nested functions by value. So those below also run on executors that lack this package, and can say
    so; they import what they need. `sent_fields` are the fields of the `Sent` with the ranks' body.
    """

    def all_tasks_fail() -> bool:
        """Waits for the other tasks; returns whether all have come here because they cannot unpickle.

        A task that can unpickle waits at the driver's store instead.
        """
        import threading

        from pyspark import BarrierTaskContext

        all_here = threading.Event()

        def wait_for_all() -> None:
            BarrierTaskContext.get().allGather()
            all_here.set()

        threading.Thread(target=wait_for_all, daemon=True).start()
        return all_here.wait(_MEETING_SECONDS)

    def run(batches: Batches) -> Batches:
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
            # If rank 0 is to host the store, tasks that can unpickle call `allGather` themselves.
            if not driver_hosts or not all_tasks_fail():
                raise
            # Spark would log an exception, with Java's stack, for each task: the driver gets the traceback as a row.
            columns = [
                pa.array([-1], pa.int32()),
                pa.array(["".join(traceback.format_exception(error))]),
                pa.array([b""]),
            ]
            return iter([pa.RecordBatch.from_arrays(columns, ["rank", "meta", "payload"])])
        finally:
            gc.enable()
        return rank_task(batches, Sent(**sent_fields))

    return run
