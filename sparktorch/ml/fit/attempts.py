"""The training of a fit: the partitioning of its rows, and its restarts after lost ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from sparktorch.distributed.root_cause import ChainError
from sparktorch.errors import RankLostError, UnusedParameterError
from sparktorch.ml.fit.listeners import FitReport
from sparktorch.ml.fit.translate import JobRequest, Request
from sparktorch.spark.checks.preflight import check_cluster, settled_slots
from sparktorch.spark.frame.partition import keep, moved_as_they_are, split, split_into_folds
from sparktorch.spark.frame.prepare import Frame
from sparktorch.spark.launch.barrier_job import run_ranks
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.recipe.dry_run import DryRunResult
from sparktorch.train.strategies.registry import strategy_for, workers_for
from sparktorch.worker import GroupJob, TrainJob, train_partition

__all__ = ["Attempt", "of_request", "one_job", "partitioned", "train_with_restarts", "with_restarts"]

J = TypeVar("J", bound=GroupJob)
R = TypeVar("R", bound=JobRequest)

Attempt = Callable[[Frame, TrainJob, Request, FitReport], Results]

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # before a restart, in seconds
_COMEBACK_SECONDS = 10.0  # for executors that Spark starts again
_COLLECTIVE_SECONDS = 1800.0


def train_with_restarts(
    frame: Frame, trial: DryRunResult, request: Request, report: FitReport, run: Attempt
) -> Results:
    """Runs the training by `run` (`one_job`, or in a pool of ranks); after a lost rank, again from its checkpoint."""
    job = TrainJob(
        columns=replace(frame.columns, classes=trial.classes, ignored=trial.ignored),
        recipe=replace(request.recipe, metrics=trial.metrics),
        config=request.config,
        placeholder=frame.sample,
        **of_request(request),
    )
    spark = frame.data.sparkSession
    searches = trial.unused_parameters

    def attempt(job: TrainJob, request: Request) -> Results:
        nonlocal searches
        try:
            return run(frame, replace(job, config=replace(job.config, unused_parameters=searches)), request, report)
        except UnusedParameterError as error:
            if "find_unused_parameters" in request.config.strategy_params:
                raise
            searches = True
            origin = "its last checkpoint" if request.checkpoint else "the beginning"
            _LOG.warning("%s; going on from %s, with a search for such parameters in every step", error, origin)
            return attempt(job, replace(request, launch=replace(request.launch, tag=new_tag())))

    return with_restarts(spark, job, request, attempt)


def of_request(request: JobRequest) -> dict[str, Any]:
    """Returns the fields of a `GroupJob` that a request has."""
    return {
        "checkpoint": request.checkpoint,
        "storage": request.storage,
        # The monitor must name a stalled rank before the collectives of its peers time out.
        "collective_seconds": max(_COLLECTIVE_SECONDS, 2 * request.launch.patience.stall),
    }


def with_restarts(spark: SparkSession, job: J, request: R, run: Callable[[J, R], Results]) -> Results:
    """Runs a job by `run`. If a rank is lost, runs it again, from its last checkpoint if it has one."""
    try:
        now, lost = request, []
        for restart in range(request.max_restarts):
            results = _unless_lost(partial(run, _restarted(job, restart), now), restart + 1, now)
            if results is not None:
                return results
            lost.append(now.launch.tag)
            now = _with_slots_left(spark, request, lost)
        return run(_restarted(job, request.max_restarts), now)
    finally:
        if request.checkpoint is not None:
            with suppress(Exception):  # if only ranks reach the directory, the lease expires by itself
                CheckpointStore(request.checkpoint.directory).release(request.checkpoint.owner)


def _restarted(job: J, times: int) -> J:
    return job if job.checkpoint is None else replace(job, checkpoint=replace(job.checkpoint, restart=times))


def _unless_lost(run: Callable[[], Results], number: int, request: JobRequest) -> Results | None:
    """Returns the results of the ranks. If a rank was lost, pauses and returns `None`."""
    try:
        return run()
    except RankLostError as error:
        pause = min(_LONGEST_PAUSE, 2.0 ** (number - 1))
        origin = "its last checkpoint" if request.checkpoint else "the beginning"
        _LOG.warning("%s; restart %d of %d in %.0f s, from %s", error, number, request.max_restarts, pause, origin)
        time.sleep(pause)
    return None


def _with_slots_left(spark: SparkSession, request: R, lost: list[str]) -> R:
    """Waits for lost executors to come back; returns the request for as many ranks as there are slots.

    `lost` has the tags of the failed attempts. A `ClusterError` says that there are fewer slots than `min_workers`.
    """
    launch, least = replace(request.launch, tag=new_tag()), request.min_workers
    found = settled_slots(spark, launch.world_size, launch.profile, settle=_COMEBACK_SECONDS, lost=lost)
    if found is None or found >= launch.world_size:
        return replace(request, launch=launch)
    fewest = launch.world_size if least is None else least
    check_cluster(spark, fewest, launch.profile, longest=launch.patience.start)
    fewer = workers_for(request.config, found, fewest)
    if fewer is None:
        _LOG.warning("the cluster has %d slots free: the restart waits for those of lost workers", found)
        return replace(request, launch=launch)
    message = "the cluster has %d slots left: going on with %d workers instead of %d"
    _LOG.warning(message, found, fewer, launch.world_size)
    return replace(request, launch=replace(launch, world_size=fewer))


def one_job(frame: Frame, job: TrainJob, request: Request, report: FitReport) -> Results:
    """Trains in a barrier job of its own."""

    def start(data: DataFrame, job: TrainJob) -> Results:
        return run_ranks(data, partial(train_partition, job=job), request.launch, report)

    return partitioned(frame, job, request, start)


def partitioned(frame: Frame, job: J, request: JobRequest, start: Callable[[DataFrame, J], Results]) -> Results:
    """Starts a job on the rows, one partition per rank. If equal rows make the ranks too uneven, splits by position.

    A training that goes on is split as it was when it began: the ranks read that from its checkpoint.
    """
    ranks = request.launch.world_size
    in_order = job.storage.kind != "memory"  # sorted rows on disk can be read sequentially in training order
    config = request.config
    strategy, options = strategy_for(config.strategy, config.strategy_params)
    if strategy.makes_validation(options):
        columns = replace(job.columns, validation="fold")
        job = replace(job, columns=columns, max_imbalance=None)
        data = split_into_folds(frame.data, ranks, in_order=in_order)
    elif request.split == "keep":
        job = replace(job, by_key=False, max_imbalance=None)
        data = keep(frame.data, ranks)
        with suppress(ChainError):
            return start(data, job)
        _LOG.info("split='keep' behind coalesce() or union(): the rows go through a shuffle, each to its own partition")
        data = moved_as_they_are(data, ranks)
    else:
        data = split(frame.data, ranks, in_order=in_order)
    results = start(data, job)
    if results[0][0].get("imbalanced"):
        data = split(frame.data, ranks, by_place=True, in_order=in_order)
        job = replace(job, by_place=True, max_imbalance=None)
        results = start(data, job)
    return results
