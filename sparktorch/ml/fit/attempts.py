"""The restarts of a fit after lost ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from pyspark.sql import SparkSession

from sparktorch.errors import RankLostError, UnusedParameterError
from sparktorch.ml.fit.translate import Request
from sparktorch.spark.checks.preflight import check_cluster, settled_slots
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.train.checkpoint.store import CheckpointStore
from sparktorch.train.strategies.registry import workers_for
from sparktorch.worker import RankJob, TrainJob

__all__ = ["train_with_restarts", "with_restarts"]

J = TypeVar("J", bound=RankJob)

_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE = 30.0  # before a restart, in seconds
_COMEBACK_SECONDS = 10.0  # for executors that Spark starts again


def train_with_restarts(
    spark: SparkSession, request: Request[TrainJob], run: Callable[[Request[TrainJob]], Results]
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

    return with_restarts(spark, request, attempt)


def with_restarts(spark: SparkSession, request: Request[J], run: Callable[[Request[J]], Results]) -> Results:
    """Runs a job by `run`. If a rank is lost, runs it again, from its last checkpoint if it has one."""
    checkpoint, now = request.job.checkpoint, request
    lost: list[str] = []
    try:
        while True:
            if checkpoint is not None:
                now = now.with_job(checkpoint=replace(checkpoint, restart=len(lost)))
            try:
                return run(now)
            except RankLostError as error:
                if len(lost) == request.max_restarts:
                    raise
                pause = min(_LONGEST_PAUSE, 2.0 ** len(lost))
                lost.append(now.launch.tag)
                message = "%s; restart %d of %d in %.0f s, from %s"
                _LOG.warning(message, error, len(lost), request.max_restarts, pause, now.origin)
                time.sleep(pause)
            now = _with_slots_left(spark, request, lost)
    finally:
        if checkpoint is not None:
            with suppress(Exception):  # if only ranks reach the directory, the lease expires by itself
                CheckpointStore(checkpoint.directory).release(checkpoint.owner)


def _with_slots_left(spark: SparkSession, request: Request[J], lost: list[str]) -> Request[J]:
    """Waits for lost executors to come back; returns the request for as many ranks as there are slots.

    `lost` has the tags of the failed attempts. A `ClusterError` says that there are fewer slots than `min_workers`.
    """
    request = request.with_launch(tag=new_tag())
    launch, least = request.launch, request.min_workers
    found = settled_slots(spark, launch.world_size, launch.profile, settle=_COMEBACK_SECONDS, lost=lost)
    if found is None or found >= launch.world_size:
        return request
    fewest = launch.world_size if least is None else least
    check_cluster(spark, fewest, launch.profile, longest=launch.patience.start)
    fewer = workers_for(request.job.config, found, fewest)
    if fewer is None:
        _LOG.warning("the cluster has %d slots free: the restart waits for those of lost workers", found)
        return request
    message = "the cluster has %d slots left: going on with %d workers instead of %d"
    _LOG.warning(message, found, fewer, launch.world_size)
    return request.with_launch(world_size=fewer)
