"""How rows get to the ranks of a fit: one partition for each, in a job of their own, or held for several fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from sparktorch.distributed.monitor import Observer
from sparktorch.distributed.root_cause import ChainError
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.translate import Request
from sparktorch.spark.frame.partition import keep, moved_as_they_are, split, split_into_folds
from sparktorch.spark.launch.barrier_job import control_server, run_ranks
from sparktorch.spark.launch.gpus import on_cpus
from sparktorch.spark.launch.rank_pool import Results
from sparktorch.spark.launch.rank_task import Body
from sparktorch.spark.launch.spark_job import new_tag
from sparktorch.worker import RankJob

__all__ = ["can_hold", "check_holdable", "one_rank", "partitioned"]

_LOG = logging.getLogger(__name__)

J = TypeVar("J", bound=RankJob)


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


def one_rank(spark: SparkSession, request: Request[Any], observer: Observer, body: Body) -> Results:
    """Runs a body in a barrier job of one rank, which gets no rows."""
    launch = replace(request.launch, world_size=1, tag=new_tag())
    if on_cpus(spark, launch.device, request.launch.world_size):
        launch = replace(launch, device="cpu")  # though one rank alone could have a device
    return run_ranks(spark.range(0, 1, 1, 1), body, launch, observer)


def can_hold(request: Request[Any], spark: SparkSession) -> bool:
    """Whether ranks can hold rows for several fits: they get the later ones from the driver."""
    return _obstacle(request, spark) is None


def check_holdable(request: Request[Any], spark: SparkSession) -> None:
    """Refuses fits whose ranks cannot hold rows: executors do not reach the driver, or every rank gets all rows."""
    found = _obstacle(request, spark)
    if found is not None:
        what, hint, param = found
        raise ConfigError(what, hint=hint, param=param)


def _obstacle(request: Request[Any], spark: SparkSession) -> tuple[str, str, str] | None:
    if request.folds:
        return "strategyParams.folds gives every worker all rows", "fit on the DataFrame", "strategyParams"
    server = control_server(spark, request.launch)
    if server is None:
        return (
            "ranks that hold rows get each fit from the driver, which they do not reach",
            "leave rendezvous at 'auto', and run where executors reach this process; or fit on the DataFrame",
            "rendezvous",
        )
    server.close()
    return None
