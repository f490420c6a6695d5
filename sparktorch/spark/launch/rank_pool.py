"""Ranks that hold their rows in one barrier job, and run one task after another on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from pyspark.sql import DataFrame

from sparktorch.distributed.heartbeat import paced
from sparktorch.distributed.monitor import Observer
from sparktorch.distributed.root_cause import RootCause
from sparktorch.distributed.server import ControlServer
from sparktorch.spark.launch.barrier_job import BarrierJob, Launch, unshippable
from sparktorch.spark.launch.rank_task import Body
from sparktorch.spark.shipping import ShippingError, pickled

__all__ = ["Judge", "RankPool", "Results"]

_LOG = logging.getLogger(__name__)
# The pool asks after pauses of this length whether a task has ended, and after longer ones how the ranks are.
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0

# In rank order, each rank's metadata, and its weights or nothing.
Results = list[tuple[dict[str, Any], bytes]]

# Gets the record of an epoch; returns whether the training ends after it.
Judge = Callable[[dict[str, Any]], bool]


class _NoObserver:
    """An observer that ignores the ranks' progress."""

    def progress(self, record: dict[str, Any]) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        pass


class _JudgingObserver:
    """An observer that passes on the ranks' progress, and tells them the judge's verdict on each epoch."""

    def __init__(self, observer: Observer, judge: Judge, server: ControlServer) -> None:
        self._observer, self._judge, self._server = observer, judge, server
        self.progress = observer.progress

    def epoch(self, record: dict[str, Any]) -> None:
        self._observer.epoch(record)
        self._server.judge(record["epoch"], stop=self._judge(record))


class RankPool(BarrierJob):
    """The driver's side of a pool; the ranks run `sparktorch.worker.serve`.

    `start` comes first, then `run` any number of times, one after another, then `close`. Each task has a store of its
    own, for progress, errors and results: what a rank reports late disturbs no later task. A rank that raises ends its
    task. A rank that dies or stalls ends the pool.

    Attributes:
        facts: What each rank tells about its rows, in rank order; empty before `start` has returned.
    """

    def __init__(self, data: DataFrame, body: Body, launch: Launch) -> None:
        """Opens the store; `start` starts the job, in which `body` reads a rank's rows and carries out tasks."""
        super().__init__(data, body, launch, _NoObserver())
        # Where the driver hosts no store, nobody makes a pool: `obstacle` says so before (`ml/fit/prepared_data`).
        assert self._server is not None
        self._pool_server = self._server
        # One question to the store is for all ranks, so the pool may ask more often than a rank.
        self._poll_seconds = paced(_POLL_SECONDS, launch.world_size // 10)
        self.facts: list[dict[str, Any]] = []

    @property
    def tag(self) -> str:
        """The tag of the Spark job."""
        return self._launch.tag

    @property
    def is_open(self) -> bool:
        """Whether the ranks hold their rows."""
        return bool(self.facts) and not self._ended and not self._job.wait(0)

    def start(self) -> Results | None:
        """Starts the job, and waits until all ranks hold their rows; returns `None`.

        If the ranks have too different numbers of rows, they end the job instead, and this returns their results.
        """
        if self.wait(self._poll_seconds, self._is_ready):
            self._job.idle = True
            return None
        try:
            return self.results()
        finally:
            self.end()

    def _is_ready(self) -> bool:
        self.facts = self._pool_server.row_facts(self._launch.world_size) or []
        return bool(self.facts)

    def run(self, task: Callable[..., Any], observer: Observer | None = None, judge: Judge | None = None) -> Results:
        """Runs a task in all ranks; returns their results, in rank order.

        `task` is called in each rank with its rows and its client; see `sparktorch.worker.Task`. `judge` gets the
        record of each epoch, and returns whether the training ends there; the ranks wait for its verdict if their task
        asks for verdicts.

        After an error other than `RankLostError` and `RankStalledError`, the pool can run other tasks. A
        `KeyboardInterrupt` cancels the pool, and is raised again.
        """
        size = self._launch.world_size
        if observer is None:
            observer = _NoObserver()
        try:
            content = pickled(task)
        except ShippingError as error:
            raise unshippable(error) from error.__cause__
        with closing(self._pool_server.server_for_next_task()) as server:
            if judge is not None:
                observer = _JudgingObserver(observer, judge, server)
            monitor = self._make_monitor(server, observer, has_slots=True)
            causes = RootCause(monitor)
            self._job.idle = False
            try:
                self._pool_server.send(content)
                looked_at = 0.0
                while not server.is_over(size) and not self._job.wait(self._poll_seconds):
                    # The ranks wait for a judge's verdict, so the driver looks as often as it can.
                    if judge is not None or time.monotonic() - looked_at > _LOOK_SECONDS:
                        monitor.look()
                        looked_at = time.monotonic()
                monitor.listen()
            except BaseException:  # It is an interrupt, or a rank has stalled.
                server.cancel()
                self.cancel()
                raise
            finally:
                self._job.idle = True
            if not server.is_over(size):
                job_error = self._job.error or RuntimeError("the barrier job of the pool has ended")
                # A rank that died before it took the task has no heartbeat in the task's store.
                died_before = None in server.beats(size)
                lost = (self._causes if died_before else causes).explain(job_error)
                self.end()
                raise lost
            if not server.have_ended(range(size)):
                raise causes.explain(RuntimeError("a task of the pool failed"))
            return server.results(size)

    def close(self) -> None:
        """Ends the job after the current task; frees the rows and the slots; can be called twice."""
        if self.is_open:
            self._pool_server.end_orders()
            if not self._job.wait(_END_SECONDS):
                _LOG.warning("the ranks did not end in %.0f s; their job is cancelled", _END_SECONDS)
                self._job.cancel()
        self.end()
