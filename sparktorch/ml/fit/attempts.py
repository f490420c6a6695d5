"""The attempts of a fit: rows to ranks in a job, and again after a loss, or where the number of slots has changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from sparktorch.distributed.monitor import Observer
from sparktorch.distributed.root_cause import ChainError
from sparktorch.errors import RankLostError, SparkTorchError, UnusedParameterError
from sparktorch.ml.fit.listeners import AttemptLog
from sparktorch.ml.fit.translate import Request
from sparktorch.spark.checks.preflight import check_cluster, settled_slots
from sparktorch.spark.frame.partition import keep, moved_as_they_are, split, split_into_folds
from sparktorch.spark.launch.barrier_job import run_ranks
from sparktorch.spark.launch.gpus import on_cpus
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.rank_task import Body
from sparktorch.spark.launch.spark_job import new_tag, others_wait
from sparktorch.spark.session import (
    executor_ids,
    is_leaving,
    is_local,
    java_profile,
    other_tasks,
    slots,
    switched_on,
)
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.strategies.registry import workers_for
from sparktorch.worker import RankJob, RankResult, TrainJob

__all__ = ["one_rank", "partitioned", "run_on_rows", "train_with_restarts", "with_restarts", "with_slots"]

J = TypeVar("J", bound=RankJob)

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # before a restart, in seconds
_COMEBACK_SECONDS = 10.0  # for executors that Spark starts again
_SETTLE_SECONDS = 2.0  # for them, where a fit may go on without, and take them later
_LOOK_SECONDS = 1.0  # between two looks at the cluster
_STAY_SECONDS = 2.0  # that new slots have been there
_CHANGE_SECONDS = 3.0  # after a change of the cluster, in which Spark says whether an executor is to go
_ASK_SECONDS = 10.0  # between two such questions without a change: Spark's word of tasks may be late


def partitioned(data: DataFrame, request: Request[J], start: Callable[[DataFrame, J], Results]) -> Results:
    """Starts a job on the rows, one partition per rank. If equal rows make the ranks too uneven, splits by position.

    A training that goes on is split as it was when it began: the ranks read that from its checkpoint.
    """
    job, ranks = request.job, request.launch.world_size
    in_order = job.storage.kind != "memory"  # sorted rows on disk can be read sequentially in training order
    if request.folds:
        job = replace(job, columns=replace(job.columns, validation="fold"), max_imbalance=None)
        parts = split_into_folds(data, ranks, in_order=in_order)
    elif request.split == "keep":
        job = replace(job, by_key=False, max_imbalance=None)
        parts = keep(data, ranks)
        with suppress(ChainError):
            return start(parts, job)
        _LOG.info("split='keep' behind coalesce() or union(): the rows go through a shuffle, each to its own partition")
        parts = moved_as_they_are(parts, ranks)
    else:
        if job.columns.groups is not None:  # a split by position would divide groups
            job = replace(job, max_imbalance=None)
        parts = split(data, ranks, in_order=in_order)
    results = start(parts, job)
    if results[0][0].get("imbalanced"):
        parts = split(data, ranks, by_place=True, in_order=in_order)
        results = start(parts, replace(job, by_place=True, max_imbalance=None))
    return results


def run_on_rows(data: DataFrame, request: Request[J], observer: Observer, body: Callable[..., RankResult]) -> Results:
    """Runs a body, which gets its `job`, on the rows in a barrier job of their own; see `partitioned`."""

    def start(parts: DataFrame, job: J) -> Results:
        return run_ranks(parts, partial(body, job=job), request.launch, observer)

    return partitioned(data, request, start)


def one_rank(spark: SparkSession, request: Request[Any], observer: Observer, body: Body) -> Results:
    """Runs a body in a barrier job of one rank, which gets no rows."""
    launch = replace(request.launch, world_size=1, tag=new_tag())
    if on_cpus(spark, launch.device, request.launch.world_size):
        launch = replace(launch, device="cpu")  # though one rank alone could have a device
    return run_ranks(spark.range(0, 1, 1, 1), body, launch, observer)


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
    former = 0  # workers before the fit has grown to those of this attempt
    try:
        while True:
            if checkpoint is not None:
                now = now.with_job(checkpoint=replace(checkpoint, restart=len(tags)))
            outlook, paused, size = _Outlook(spark, now, tags), False, now.launch.world_size
            log.begin(size)
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
            except SparkTorchError as error:
                if not former or outlook.asked:
                    raise
                log.end(error.what)
                request = replace(request, workers=(request.workers[0], former))
                _LOG.warning("%s; the fit goes on with at most %d workers, as before it grew", error, former)
            else:
                paused = results[0][0].get("paused", False)
                log.end(outlook.reason if paused else "")
                if not paused:
                    return results
            tags.append(now.launch.tag)
            now = with_slots(spark, request, tags, paused=paused)
            former = size if paused and now.launch.world_size > size else 0
    finally:
        if checkpoint is not None:
            with suppress(Exception):  # if only ranks reach the directory, the lease expires by itself
                CheckpointStore(checkpoint.directory).release(checkpoint.owner)


def with_slots(
    spark: SparkSession, request: Request[J], before: Sequence[str] = (), *, paused: bool = False
) -> Request[J]:
    """Returns the request for as many ranks as there are slots, after a while in which lost executors may come back.

    `before` has the tags of the attempts before; if the last one has `paused`, the fewest slots are waited for as long
    as `startTimeout` says. A `ClusterError` says that there are too few slots.
    """
    (least, most), profile, start = request.workers, request.launch.profile, request.launch.patience.start
    request = request.with_launch(tag=new_tag(), world_size=most)
    settle = _SETTLE_SECONDS if _grows(request) or not before else _COMEBACK_SECONDS
    if not before and not _grows(request):  # it keeps what it begins with, and so waits for what the settings promise
        settled_slots(spark, most, profile, longest=start)
    # A fixed number of workers waits for the slots that other jobs hold.
    all_jobs, gpus = least < most, profile is not None
    taken = partial(other_tasks, spark, request.launch.tag, before, all_jobs=all_jobs, gpus=gpus)
    found = settled_slots(spark, most, profile, settle=settle, taken=taken)
    if paused and found is not None and found < least:  # it has ended ranks that could run
        _LOG.warning("free slots: %d; the fit waits for %d, at most %.0f s", found, least, start)
        found = settled_slots(spark, least, profile, settle=start, longest=start, taken=taken)
    if found is None or found >= most:
        return request
    check_cluster(spark, least, profile, most=most, longest=start)
    config = request.job.config
    fewer = workers_for(config, found, least)
    if fewer is None:
        _LOG.warning("free slots: %d; the fit waits for those that others hold", found)
        fewer = next(number for number in range(least, most + 1) if workers_for(config, number, number))
    else:
        _LOG.warning("free slots: %d; the fit has %d of %d workers", found, fewer, most)
    return request.with_launch(world_size=fewer)


def _grows(request: Request[Any]) -> bool:
    """Whether a fit that has begun takes more workers."""
    return request.job.checkpoint is not None and request.workers[0] < request.workers[1]


class _Outlook:
    """Looks, once a second, whether an attempt had better end now: more slots are free, or an executor is to go.

    Attributes:
        reason: Why; empty before.
        asked: Whether its ranks have trained: before, nobody asks.
    """

    def __init__(self, spark: SparkSession, request: Request[Any], before: Sequence[str]) -> None:
        """Takes the request as the attempt runs it, and the tags of the attempts before."""
        self.reason, self.asked, self._failed = "", False, False
        self._spark, self._request, self._before = spark, request, tuple(before)
        local = is_local(spark)
        self._may_leave = not local and switched_on(spark, "spark.decommission.enabled")
        self._may_grow = not local and _grows(request) and request.launch.world_size < request.workers[1]
        self._next = self._grows_at = self._changes_until = self._asks_at = 0.0
        self._seen: tuple[int, frozenset[str]] | None = None  # slots and executors
        self._more_since: float | None = None

    def __call__(self, tag: str) -> bool:
        """Returns whether the ranks of the job with a tag, which train, are to save a checkpoint and end."""
        now = time.monotonic()
        if not self.asked:
            self.asked, self._grows_at = True, now + self._request.grow_after
        if self.reason or now < self._next or not (self._may_leave or self._may_grow):
            return bool(self.reason)
        self._next = now + _LOOK_SECONDS
        try:
            self._look(tag, now)
        except Exception as error:  # such as of a session that is being stopped, as the job will tell
            level, name = logging.DEBUG if self._failed else logging.WARNING, type(error).__name__
            _LOG.log(level, "the cluster does not say what has changed (%s)", name, exc_info=self._failed)
            self._failed = True
        if self.reason:
            _LOG.warning("%s: all ranks save a checkpoint and end, and the fit goes on from there", self.reason)
        return bool(self.reason)

    def _look(self, tag: str, now: float) -> None:
        launch = self._request.launch
        total = slots(self._spark, java_profile(launch.profile)) or 0
        if self._may_leave:
            seen = (total, executor_ids(self._spark))  # those of an executor that is to go are no slots any more
            if seen != self._seen:
                self._seen, self._changes_until = seen, now + _CHANGE_SECONDS
            if now < self._changes_until or now >= self._asks_at:
                self._asks_at = now + _ASK_SECONDS
                self.reason = "an executor is being decommissioned" if is_leaving(self._spark, tag) else ""
        if not self._may_grow or now < self._grows_at or self.reason:
            return
        most = self._most(tag, total)
        if most <= launch.world_size or others_wait(tag):
            self._more_since = None
        elif self._more_since is None:
            self._more_since = now
        elif now - self._more_since >= _STAY_SECONDS:
            self.reason = f"there are slots for {most} workers instead of {launch.world_size}"

    def _most(self, tag: str, total: int) -> int:
        """Returns how many ranks could run on the slots that no other job holds, of so many in total."""
        (least, most), gpus = self._request.workers, self._request.launch.profile is not None
        free = total - other_tasks(self._spark, tag, self._before, all_jobs=True, gpus=gpus)
        return workers_for(self._request.job.config, min(free, most), least) or 0
