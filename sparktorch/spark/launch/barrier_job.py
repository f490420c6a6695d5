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

__all__ = ["BarrierJob", "Launch", "at_driver", "control_server", "run_ranks", "unshippable"]

T = TypeVar("T")

_POLL_SECONDS = 0.05
_MEETING_SECONDS = 10.0  # The last task starts within this time after the first one.


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
    pauses: Callable[[str], bool] = field(default=never, compare=False)


class BarrierJob:
    """The driver's side of one barrier job: its store, the job, and what watches its ranks."""

    def __init__(self, data: DataFrame | RDD[Any], body: Body, launch: Launch, observer: Observer) -> None:
        """Opens the store; `wait` starts the job, in which `body` runs once per partition."""
        spark, self._launch, self._ended = session_of(data), launch, False
        # Where something here raises, the stack closes the store; otherwise it stays open until `end`.
        with ExitStack() as stack:
            self._server = server = control_server(spark, launch)
            if server is not None:
                stack.enter_context(closing(server))
            self._job = Job(spark, _plan(data, body, launch, server.rendezvous if server else None), launch.tag)
            self._monitor = self._watch(server, observer)
            self._causes = RootCause(self._monitor)
            self._stack = stack.pop_all()

    def wait(self, seconds: float, is_met: Callable[[], bool] = never) -> bool:
        """Starts the job, and looks at it every so many seconds until it has ended, or `is_met`; returns whether so.

        Whatever is raised meanwhile, such as a `KeyboardInterrupt`, cancels the job.
        """
        self._job.start()
        try:
            while not self._job.wait(seconds):
                self._monitor.look()
                self._monitor.look_for_failure()
                if self._server is not None and self._monitor.trains and self._launch.pauses(self._launch.tag):
                    self._server.pause()
                if is_met():
                    return True
            self._monitor.listen()
        except BaseException:  # It is an interrupt, ranks have stalled, or they do not end after a failure.
            self.cancel()
            raise
        return False

    def results(self) -> list[tuple[dict[str, Any], bytes]]:
        """Returns what the ranks of the ended job have returned, in rank order, or raises the root cause."""
        server, size = self._server, self._launch.world_size
        unstarted = next((RuntimeError(meta) for rank, meta, _ in self._job.rows if rank < 0), None)
        failed = self._causes.explain_ended(self._job.error or unstarted)
        # An executor that is to go ends with its last task, and Spark may hear of that before it notes the task's end.
        if isinstance(failed, RankLostError) and server is not None and server.has_paused(size):
            return [({"paused": True}, b"")] * size
        if failed is not None:
            raise failed from (None if server else self._job.error)
        return assemble(self._job.rows, size)

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
        self._stack.close()

    def _watch(self, server: ControlServer | None, observer: Observer, *, running: bool = False) -> Monitor:
        launch, starved = self._launch, self._job.is_starved
        more: dict[str, Any] = {"log_level": launch.log_level, "is_starved": starved, "running": running}
        return Monitor(server, launch.world_size, observer, launch.patience, **more)


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


def at_driver(spark: SparkSession, launch: Launch, listen: Callable[[str, str], T]) -> T | None:
    """Returns what listens on the driver's address, of which executors know another one; `None` if rank 0 does."""
    address = None if launch.rendezvous == "rank0" else driver_address(spark)
    try:
        return None if address is None else listen(*address)
    except OSError:
        if launch.rendezvous == "auto" and is_connect(spark):
            return None  # Through a tunnel, the server's address is not one of this machine.
        raise


def control_server(spark: SparkSession, launch: Launch) -> ControlServer | None:
    """Returns the driver's store for a job; `None` if rank 0 hosts it.

    A `ConfigError` says that the driver is to host it, and that executors do not reach this process.
    """

    def listen(bind: str, advertise: str) -> ControlServer:
        allow_connections(launch.world_size)
        return ControlServer(bind, advertise)

    try:
        server = at_driver(spark, launch, listen)
    except OSError as error:
        bind, _ = driver_address(spark) or ("", "")
        raise ClusterError(
            f"cannot listen on {bind!r}: {error}",
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
    """Returns the error of a fit whose module, loss or optimizer cannot be pickled."""
    return ModuleError(
        f"the module, loss or optimizer cannot be shipped to the ranks: {error}",
        hint="it holds, or its code uses as a global, something that stays in this process (a lock, a file, a "
        "session): make that inside the module's __init__",
        code="ST-SHIP",
    )


def _plan(data: DataFrame | RDD[Any], body: Body, launch: Launch, rendezvous: Rendezvous | None) -> Collect:
    """Returns a callable that runs `body` in the barrier tasks, and collects their results."""
    spark = session_of(data)
    try:
        sent = vars(send(spark, body))
    except ShippingError as error:
        raise unshippable(error) from error.__cause__
    task_fields: dict[str, Any] = {"log_level": launch.log_level, "patience": launch.patience.driver}
    task_fields["local"] = is_local(spark)
    streamed, hosted = not isinstance(data, RDD), rendezvous is not None
    task = pickle.dumps(RankTask(device=launch.device, rendezvous=rendezvous, streamed=streamed, **task_fields))

    def none_starts() -> bool:
        """Whether no task of the job can start: one that can waits at the store, and never comes here."""
        import threading

        from pyspark import BarrierTaskContext

        all_here = threading.Event()

        def wait_for_all() -> None:
            BarrierTaskContext.get().allGather()
            all_here.set()

        threading.Thread(target=wait_for_all, daemon=True).start()
        return all_here.wait(_MEETING_SECONDS)

    # This function and the one above work without this package, which executors may lack.
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
