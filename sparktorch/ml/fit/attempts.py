"""The attempts of a fit: again after lost ranks, and with another number of workers where the cluster has changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from sparktorch.errors import RankLostError, UnusedParameterError
from sparktorch.ml.fit.listeners import AttemptLog
from sparktorch.ml.fit.translate import Request
from sparktorch.spark.checks.preflight import check_cluster, settled_slots
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.spark.session import is_leaving, is_local, java_profile, other_tasks, slots, switched_on
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.strategies.registry import workers_for
from sparktorch.worker import RankJob, TrainJob

__all__ = ["train_with_restarts", "with_restarts", "with_slots"]

J = TypeVar("J", bound=RankJob)

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # before a restart, in seconds
_COMEBACK_SECONDS = 10.0  # for executors that Spark starts again
_SETTLE_SECONDS = 2.0  # for them, where a fit may go on without, and take them later
_LOOK_SECONDS = 1.0  # between two looks at the cluster
_STAY_SECONDS = 2.0  # that new slots have been there
_DROP_SECONDS = 3.0  # in which Spark says why there are fewer


def train_with_restarts(
    spark: SparkSession, request: Request[TrainJob], run: Callable[[Request[TrainJob]], Results], log: AttemptLog
) -> Results:
    """Trains by `run`; after a lost rank, again from its checkpoint, and with a search for parameters that need one."""
    searches = request.job.config.unused_parameters

    def attempt(request: Request[TrainJob]) -> Results:
        nonlocal searches
        config = request.job.config
        try:
            return run(request.with_job(config=replace(config, unused_parameters=searches)))
        except UnusedParameterError as error:
            if "find_unused_parameters" in config.strategy_params:
                raise
            searches = True
            message = "%s; going on from %s, with a search for such parameters in every step"
            _LOG.warning(message, error, request.origin)
            return attempt(request.with_launch(tag=new_tag()))

    return with_restarts(spark, request, attempt, log)


def with_restarts(
    spark: SparkSession, request: Request[J], run: Callable[[Request[J]], Results], log: AttemptLog
) -> Results:
    """Runs a job by `run`, and again, from its last checkpoint if it has one, after a lost rank or a pause."""
    checkpoint, now = request.job.checkpoint, request
    tags: list[str] = []  # of the attempts before
    lost = vain = 0  # attempts that lost a rank, and the last of them that have trained nothing
    try:
        while True:
            if checkpoint is not None:
                now = now.with_job(checkpoint=replace(checkpoint, restart=len(tags)))
            outlook = _Outlook(spark, now, tags)
            log.begin(now.launch.world_size)
            try:
                results = run(now if checkpoint is None else now.with_launch(pauses=outlook))
            except RankLostError as error:
                log.end(error.what)
                if lost == request.max_restarts:
                    raise
                lost += 1
                vain = 0 if log.has_trained else vain + 1
                pause = min(_LONGEST_PAUSE, 2.0 ** (vain - 1)) if vain else 0.0
                message = "%s; restart %d of %d in %.0f s, from %s"
                _LOG.warning(message, error, lost, request.max_restarts, pause, now.origin)
                time.sleep(pause)
            else:
                paused = results[0][0].get("paused", False)
                log.end(outlook.reason if paused else "")
                if not paused:
                    return results
            tags.append(now.launch.tag)
            now = with_slots(spark, request, tags)
    finally:
        if checkpoint is not None:
            with suppress(Exception):  # if only ranks reach the directory, the lease expires by itself
                CheckpointStore(checkpoint.directory).release(checkpoint.owner)


def with_slots(spark: SparkSession, request: Request[J], before: Sequence[str] = ()) -> Request[J]:
    """Returns the request for as many ranks as there are slots, after a while in which lost executors may come back.

    `before` has the tags of the attempts before. A `ClusterError` says that there are too few slots.
    """
    request = request.with_launch(tag=new_tag())
    (least, most), profile = request.workers, request.launch.profile
    settle = _SETTLE_SECONDS if _grows(request) or not before else _COMEBACK_SECONDS
    # A fixed number of workers waits for the slots that other jobs hold.
    taken = partial(other_tasks, spark, request.launch.tag, before, all_jobs=least < most)
    found = settled_slots(spark, most, profile, settle=settle, taken=taken)
    if found is None or found >= most:
        return request
    check_cluster(spark, least, profile, longest=request.launch.patience.start)
    config = request.job.config
    fewer = workers_for(config, found, least)
    if fewer is None:
        _LOG.warning("the cluster has %d slots free: the fit waits for those that others hold", found)
        fewer = next(number for number in range(least, most + 1) if workers_for(config, number, number))
    else:
        _LOG.warning("the cluster has %d slots free: the fit has %d workers of %d", found, fewer, most)
    return request.with_launch(world_size=fewer)


def _grows(request: Request[Any]) -> bool:
    """Whether a fit that has begun takes more workers."""
    return request.job.checkpoint is not None and request.workers[0] < request.workers[1]


class _Outlook:
    """Looks, once a second, whether an attempt had better end now: more slots are free, or an executor is to go.

    Attributes:
        reason: Why; empty before.
    """

    def __init__(self, spark: SparkSession, request: Request[Any], before: Sequence[str]) -> None:
        """Takes the request as the attempt runs it, and the tags of the attempts before."""
        self.reason = ""
        self._spark, self._request, self._before = spark, request, tuple(before)
        now = time.monotonic()
        self._next, self._grows_at = now + _LOOK_SECONDS, now + request.grow_after
        self._may_leave = switched_on(spark, "spark.decommission.enabled")
        self._may_grow = _grows(request) and request.launch.world_size < request.workers[1] and not is_local(spark)
        self._slots, self._drop_until = 0, now
        self._more_since: float | None = None

    def __call__(self, tag: str) -> bool:
        """Returns, once, whether the ranks of the job with a tag are to save a checkpoint and end."""
        now = time.monotonic()
        if self.reason or now < self._next or not (self._may_leave or self._may_grow):
            return False
        self._next = now + _LOOK_SECONDS
        try:
            self._look(tag, now)
        except Exception:  # of a session that is being stopped, as the job will tell
            _LOG.debug("the cluster did not say what has changed", exc_info=True)
        if self.reason:
            _LOG.warning("%s: all ranks save a checkpoint and end, and the fit goes on from there", self.reason)
        return bool(self.reason)

    def _look(self, tag: str, now: float) -> None:
        launch = self._request.launch
        before, self._slots = self._slots, slots(self._spark, java_profile(launch.profile)) or 0
        if self._slots < before:  # Spark does not count those of an executor that is to go
            self._drop_until = now + _DROP_SECONDS
        if now < self._drop_until and is_leaving(self._spark, tag):
            self.reason = "an executor is being decommissioned"
        if not self._may_grow or now < self._grows_at or self.reason:
            return
        most = self._most(tag)
        if most <= launch.world_size:
            self._more_since = None
        elif self._more_since is None:
            self._more_since = now
        elif now - self._more_since >= _STAY_SECONDS:
            self.reason = f"there are slots for {most} workers instead of {launch.world_size}"

    def _most(self, tag: str) -> int:
        """Returns how many ranks could run, those that do included."""
        least, most = self._request.workers
        free = self._slots - other_tasks(self._spark, tag, self._before, all_jobs=True)
        return workers_for(self._request.job.config, min(free, most), least) or 0
