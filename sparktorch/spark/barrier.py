"""Runs a function as the tasks of one barrier job: the tasks are the ranks."""

from __future__ import annotations

import logging
import pickle
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pyarrow as pa
from pyspark import cloudpickle, inheritable_thread_target
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, Row, SparkSession

from sparktorch.config import Device
from sparktorch.errors import ClusterError, ConfigError, ModuleError, RankError, SparkTorchError
from sparktorch.spark.control import ControlServer, Rendezvous
from sparktorch.spark.rank import RESULT_SCHEMA, Body, RankTask, assemble, failure_in
from sparktorch.spark.session import driver_address, is_connect
from sparktorch.train.recipe import SHIPPING_HINT

__all__ = ["Launch", "Observer", "run_ranks"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_LATE_SECONDS = 30.0
_DEATH = r"exited unexpectedly|ExecutorLostFailure|Executor heartbeat timed out|exit code|worker crashed"


class Observer(Protocol):
    """Who is told, on the driver, how far the ranks are."""

    def progress(self, record: dict[str, Any]) -> None:
        """Receives rank 0's position: epoch, epochs, step, steps, loss."""
        ...

    def epoch(self, record: dict[str, Any]) -> None:
        """Receives the metrics of a finished epoch, each exactly once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the ranks are launched.

    Attributes:
        world_size: Number of ranks.
        device: What the ranks are to train on.
        rendezvous: Who hosts the store: the driver, rank 0, or the driver wherever executors can
            reach it.
        profile: The resource profile of the tasks, `None` for the session's own.
    """

    world_size: int
    device: Device = "auto"
    rendezvous: Literal["auto", "driver", "rank0"] = "auto"
    profile: ResourceProfile | None = None


def run_ranks(data: DataFrame, body: Body, launch: Launch, observer: Observer) -> list[tuple[dict[str, Any], bytes]]:
    """Runs `body` once per partition, all at the same time, and returns what the ranks hand back.

    Args:
        data: As many partitions as there are ranks.
        body: Called in each rank with its record batches, its `World` and its `Link`.
        launch: How the ranks are launched.
        observer: Told about progress while the job runs.

    Returns:
        `(meta, payload)` of every rank, by rank.

    Raises:
        SparkTorchError: A rank failed; the first cause, with rank, host and the rank's traceback.
        KeyboardInterrupt: Passed on after the job has been cancelled.
    """
    spark = data.sparkSession
    with ExitStack() as stack:
        server = _control_server(spark, launch)
        if server is not None:
            stack.enter_context(closing(server))
        job = _Job(spark, _plan(data, body, launch, server.rendezvous if server else None))
        watch = _Watch(server, launch.world_size, observer)
        job.start()
        try:
            while not job.wait(_POLL_SECONDS):
                watch.look()
            watch.look()
        except BaseException:  # an interrupt above all
            if server is not None:
                server.cancel()
            job.cancel()
            raise
        if job.error is not None:
            raise _cause(job.error, watch) from (None if server else job.error)
    return assemble(job.rows, launch.world_size)


def _control_server(spark: SparkSession, launch: Launch) -> ControlServer | None:
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
    try:
        return ControlServer(*address)
    except OSError as error:
        if launch.rendezvous == "auto" and is_connect(spark):
            return None  # the server's address, seen through a tunnel, is none of this machine's
        raise ClusterError(
            f"cannot listen on {address[0]!r}: {error}",
            hint="set spark.driver.bindAddress to an address of this machine that executors reach",
        ) from error


def _plan(data: DataFrame, body: Body, launch: Launch, rendezvous: Rendezvous | None) -> DataFrame:
    try:
        packed: bytes = cloudpickle.dumps(body)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModuleError(
            f"the module, loss or optimizer cannot be shipped to the ranks: {error}", hint=SHIPPING_HINT
        ) from error
    task = pickle.dumps(RankTask(packed, launch.world_size, launch.device, rendezvous))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import gc
        import pickle

        # The first thing a rank does is to import torch: objects by the hundred thousand, none of
        # them garbage. To look for some meanwhile takes a good part of the time.
        gc.disable()
        try:
            rank_task: RankTask = pickle.loads(task)
        finally:
            gc.enable()
        return rank_task(batches)

    return data.mapInArrow(run, RESULT_SCHEMA, barrier=True, profile=launch.profile)


class _Job:
    """The Spark job, run in a thread of its own so that the caller can watch it and interrupt it."""

    def __init__(self, spark: SparkSession, plan: DataFrame) -> None:
        self.rows: list[Row] = []
        self.error: Exception | None = None
        self._spark = spark
        self._tag = f"sparktorch-{secrets.token_hex(8)}"
        self._done = threading.Event()

        def collect() -> None:
            try:
                spark.addTag(self._tag)
                self.rows = plan.collect()  # toArrow() would make one vector of all, which ends at 2 GiB
            except Exception as error:  # handed to the thread that waits
                self.error = error
            finally:
                self._done.set()

        # The caller's job group, pool and tags hold for this job too.
        target = inheritable_thread_target(spark)(collect)
        self._thread = threading.Thread(target=target, name="sparktorch-job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def cancel(self) -> None:
        if self._done.is_set():
            return
        with suppress(Exception):  # the session itself may be gone
            self._spark.interruptTag(self._tag)
        self._done.wait(10)


class _Watch:
    """Passes on what the ranks say, and says which ranks are late."""

    def __init__(self, server: ControlServer | None, world_size: int, observer: Observer) -> None:
        self.server = server
        self.world_size = world_size
        self._observer = observer
        self._next_warning = time.monotonic() + _LATE_SECONDS
        self._complete = False

    def look(self) -> None:
        if self.server is None:
            return
        for record in self.server.new_epochs():
            self._observer.epoch(record)
        for warning in self.server.new_warnings():
            _LOG.warning("rank %d on %s: %s", warning["rank"], warning["host"], warning["text"])
        progress = self.server.progress()
        if progress is not None:
            self._observer.progress(progress)
            self._complete = True
        elif not self._complete and time.monotonic() > self._next_warning:
            self._warn()

    def _warn(self) -> None:
        assert self.server is not None
        self._next_warning = time.monotonic() + _LATE_SECONDS
        beats = self.server.beats(self.world_size)
        missing = [rank for rank, beat in enumerate(beats) if beat is None]
        self._complete = not missing
        if missing:
            _LOG.warning(
                "ranks %s of %d have not started yet: are the slots of the cluster taken by other jobs?",
                missing,
                self.world_size,
            )


def _cause(error: Exception, watch: _Watch) -> SparkTorchError:
    """Returns why the job failed: what a rank reported, or who died without a word."""
    failure, primary = watch.server.first_failure() if watch.server else (None, False)
    if failure is not None and primary:
        return failure
    if failure is None:
        told = failure_in(str(error))
        if told is not None:
            return told
    if "spark.driver.maxResultSize" in str(error):
        return ClusterError(
            "the trained model is larger than the driver accepts as the result of a job",
            hint="start the session with a larger spark.driver.maxResultSize",
        )
    # A rank that died is known by what it left: peers that lost it, or a worker process that was gone.
    if watch.server is not None and (failure is not None or re.search(_DEATH, str(error))):
        dead = watch.server.silent(watch.world_size)
        if dead is not None:
            return dead
    if failure is not None:
        return failure
    return _from_message(str(error))


def _from_message(message: str) -> SparkTorchError:
    """Returns the error of a job whose ranks could not report: the Python part of Spark's message."""
    raised = re.search(r"Traceback \(most recent call last\):\n(?:.*\n)*?(\w[\w.]*: .*)\n", message)
    if raised is None:
        return ClusterError("the barrier job failed", trace=message)
    if "DistNetworkError" in raised[1]:
        return ClusterError(
            f"a rank did not reach the store at which the ranks meet: {raised[1].partition(': ')[2]}",
            hint="open the ephemeral ports of its host to the executors, set spark.driver.host to an address they "
            "reach, or let a rank host it with rendezvous='rank0'",
        )
    missing = re.match(r"(?:ModuleNotFoundError|ImportError): (.*)", raised[1])
    if missing is None:
        return RankError(f"a rank could not start: {raised[1]}", trace=raised[0])
    return ClusterError(
        f"the Python of the executors cannot start a rank: {missing[1]}",
        hint="they need torch, numpy and pyarrow installed (PYSPARK_PYTHON names their Python), and your own "
        "modules and sparktorch shipped with --py-files or spark.addArtifacts",
    )
