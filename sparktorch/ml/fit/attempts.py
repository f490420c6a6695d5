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
from sparktorch.spark.session import executor_ids, is_leaving, is_local, java_profile, other_tasks, slots, switched_on
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.strategies.registry import workers_for
from sparktorch.worker import RankJob, RankResult, TrainJob

__all__ = ["one_rank", "partitioned", "run_on_rows", "train_with_restarts", "with_restarts", "with_slots"]

J = TypeVar("J", bound=RankJob)

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # The pause before a restart grows up to so many seconds.
_COMEBACK_SECONDS = 10.0  # An attempt waits so long for lost executors, which Spark may start again.
_SETTLE_SECONDS = 2.0  # It waits shorter where it can take them later.
_LOOK_SECONDS = 1.0  # The driver looks at the cluster once in this time.
_STAY_SECONDS = 2.0  # New slots count once they have been free for so long.
_CHANGE_SECONDS = 3.0  # Spark says within this time after a change whether an executor is to go.
_ASK_SECONDS = 10.0  # Without a change, Spark is asked again after this time: its word of tasks may be late.


def partitioned(data: DataFrame, request: Request[J], start: Callable[[DataFrame, J], Results]) -> Results:
    """Starts a job on the rows, one partition per rank. If equal rows make the ranks too uneven, splits by position.

    A training that goes on is split as it was when it began: the ranks read that from its checkpoint.
    """
    job, ranks = request.job, request.launch.world_size
    in_order = job.storage.kind != "memory"  # Sorted rows on disk can be read sequentially in training order.
    if request.folds:
        job = replace(job, columns=replace(job.columns, validation="fold"), max_imbalance=None)
        parts = split_into_folds(data, ranks, in_order=in_order)
    elif request.split == "keep":
        job = replace(job, order_by_key=False, max_imbalance=None)
        parts = keep(data, ranks)
        with suppress(ChainError):
            return start(parts, job)
        _LOG.info("split='keep' behind coalesce() or union(): the rows go through a shuffle, each to its own partition")
        parts = moved_as_they_are(parts, ranks)
    else:
        if job.columns.groups is not None:  # A split by position would divide groups.
            job = replace(job, max_imbalance=None)
        parts = split(data, ranks, in_order=in_order)
    results = start(parts, job)
    if results[0][0].get("imbalanced"):
        parts = split(data, ranks, by_position=True, in_order=in_order)
        results = start(parts, replace(job, by_position=True, max_imbalance=None))
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
        launch = replace(launch, device="cpu")  # The fit trains on CPUs, though one rank alone could have a device.
    return run_ranks(spark.range(0, 1, 1, 1), body, launch, observer)


def train_with_restarts(
    spark: SparkSession, request: Request[TrainJob], run: Callable[[Request[TrainJob]], Results], log: AttemptLog
) -> Results:
    """Trains by `run`, and restarts as `with_restarts` does; after unused parameters, attempts search for them."""
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
    checkpoint, current = request.job.checkpoint, request
    earlier_tags: list[str] = []
    restarts = fruitless = 0  # `fruitless` counts the last restarts in a row that have trained nothing.
    workers_before_growth = 0  # It is 0 unless this attempt has more workers than the one before.
    try:
        while True:
            if checkpoint is not None:
                current = current.with_job(checkpoint=replace(checkpoint, restart=len(earlier_tags)))
            outlook = _Outlook(spark, current, earlier_tags)
            workers, paused = current.launch.world_size, False
            log.begin(workers)
            try:
                results = run(current if checkpoint is None else current.with_launch(asks_to_pause=outlook))
            except RankLostError as error:
                log.end(error.what)
                if restarts == request.max_restarts:
                    raise
                restarts += 1
                fruitless = 0 if log.has_trained else fruitless + 1
                pause = min(_LONGEST_PAUSE, 2.0 ** (fruitless - 1)) if fruitless else 0.0
                message = "%s; restart %d of %d in %.0f s, from %s"
                _LOG.warning(message, error, restarts, request.max_restarts, pause, current.origin)
                time.sleep(pause)
            except SparkTorchError as error:
                # Ranks that fail before they train, right after the fit has grown, may have failed by growing.
                if not workers_before_growth or outlook.ranks_train:
                    raise
                log.end(error.what)
                request = replace(request, workers=(request.workers[0], workers_before_growth))
                message = "%s; the fit goes on with at most %d workers, as before it grew"
                _LOG.warning(message, error, workers_before_growth)
            else:
                paused = results[0][0].get("paused", False)
                log.end(outlook.reason if paused else "")
                if not paused:
                    return results
            earlier_tags.append(current.launch.tag)
            current = with_slots(spark, request, earlier_tags, paused=paused)
            workers_before_growth = workers if paused and current.launch.world_size > workers else 0
    finally:
        if checkpoint is not None:
            with suppress(Exception):  # Where only ranks reach the directory, the lease expires by itself.
                CheckpointStore(checkpoint.directory).release(checkpoint.owner)


def with_slots(
    spark: SparkSession, request: Request[J], earlier_tags: Sequence[str] = (), *, paused: bool = False
) -> Request[J]:
    """Returns the request for as many ranks as there are slots, after a while in which lost executors may come back.

    The tags are those of the attempts before, whose last tasks may still hold slots. If the last attempt has `paused`,
    the fewest slots are waited for as long as `startTimeout` says. A `ClusterError` says that there are too few slots.
    """
    (least, most), profile, start = request.workers, request.launch.profile, request.launch.patience.start
    request = request.with_launch(tag=new_tag(), world_size=most)
    settle = _SETTLE_SECONDS if _grows(request) or not earlier_tags else _COMEBACK_SECONDS
    # A fit that keeps the number of workers that it begins with waits for the slots that the settings promise.
    if not earlier_tags and not _grows(request):
        settled_slots(spark, most, profile, longest=start)
    # A fixed number of workers waits for the slots that other jobs hold.
    all_jobs, gpus = least < most, profile is not None
    taken = partial(other_tasks, spark, request.launch.tag, earlier_tags, all_jobs=all_jobs, gpus=gpus)
    free = settled_slots(spark, most, profile, settle=settle, taken=taken)
    if paused and free is not None and free < least:  # The pause has ended ranks that could run.
        _LOG.warning("free slots: %d; the fit waits for %d, at most %.0f s", free, least, start)
        free = settled_slots(spark, least, profile, settle=start, longest=start, taken=taken)
    if free is None or free >= most:
        return request
    check_cluster(spark, least, profile, most=most, longest=start)
    config = request.job.config
    fewer = workers_for(config, free, least)
    if fewer is None:
        _LOG.warning("free slots: %d; the fit waits for those that others hold", free)
        fewer = next(number for number in range(least, most + 1) if workers_for(config, number, number))
    else:
        _LOG.warning("free slots: %d; the fit has %d of %d workers", free, fewer, most)
    return request.with_launch(world_size=fewer)


def _grows(request: Request[Any]) -> bool:
    """Whether a fit that has begun takes more workers."""
    return request.job.checkpoint is not None and request.workers[0] < request.workers[1]


class _Outlook:
    """Looks, once a second, whether an attempt had better end now: more slots are free, or an executor is to go.

    Attributes:
        reason: Why it had better end; empty as long as it had not.
        ranks_train: Whether its ranks have begun to train: nobody asks before that.
    """

    def __init__(self, spark: SparkSession, request: Request[Any], earlier_tags: Sequence[str]) -> None:
        """Takes the request as the attempt runs it, and the tags of the attempts before."""
        self.reason, self.ranks_train, self._failed = "", False, False
        self._spark, self._request, self._earlier_tags = spark, request, tuple(earlier_tags)
        local = is_local(spark)
        self._may_leave = not local and switched_on(spark, "spark.decommission.enabled")
        self._may_grow = not local and _grows(request) and request.launch.world_size < request.workers[1]
        self._looks_at = self._grows_at = self._changes_until = self._asks_at = 0.0
        self._slots_and_executors: tuple[int, frozenset[str]] | None = None
        self._more_since: float | None = None

    def __call__(self, tag: str) -> bool:
        """Returns whether the ranks of the job with a tag, which train, are to save a checkpoint and end."""
        now = time.monotonic()
        if not self.ranks_train:
            self.ranks_train, self._grows_at = True, now + self._request.grow_after
        if self.reason or now < self._looks_at or not (self._may_leave or self._may_grow):
            return bool(self.reason)
        self._looks_at = now + _LOOK_SECONDS
        try:
            self._look(tag, now)
        except Exception as error:  # A session that is being stopped raises here, too; the job will say so.
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
            # An executor that is to go loses its slots at once, so that the total tells of it, too.
            slots_and_executors = (total, executor_ids(self._spark))
            if slots_and_executors != self._slots_and_executors:
                self._slots_and_executors, self._changes_until = slots_and_executors, now + _CHANGE_SECONDS
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
        free = total - other_tasks(self._spark, tag, self._earlier_tags, all_jobs=True, gpus=gpus)
        return workers_for(self._request.job.config, min(free, most), least) or 0
