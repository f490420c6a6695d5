"""Whether the cluster can run a barrier job of this size, before one is submitted."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparktorch.errors import ClusterError
from sparktorch.spark.session import running_tasks, setting, slots

__all__ = ["check_cluster", "check_result_size", "settled_slots"]

_SETTLE_SECONDS = 2.0
_EMPTY_SECONDS = 60.0


def check_cluster(
    spark: SparkSession, world_size: int, profile: ResourceProfile | None = None, *, settle: float = _SETTLE_SECONDS
) -> None:
    """Refuses what Spark would refuse late, hang on, or run wrongly.

    A cluster that is still starting gets a moment: as long as slots keep appearing, and a minute
    for the first one.

    Args:
        spark: The session.
        world_size: Number of barrier tasks.
        profile: The resource profile the tasks will have.
        settle: Seconds in which no slot has appeared, after which there are too few.

    Raises:
        ClusterError: With the setting to change.
    """
    if setting(spark, "spark.dynamicAllocation.enabled") == "true":
        raise ClusterError(
            "dynamic allocation is on, and Spark runs no barrier job under it",
            hint="start the session with spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances",
        )
    if setting(spark, "spark.speculation") == "true":
        raise ClusterError(
            "speculation is on: Spark would start second copies of slow ranks",
            hint="start the session with spark.speculation=false",
        )
    found = settled_slots(spark, world_size, profile, settle=settle)
    if found is not None and found < world_size:
        raise ClusterError(
            f"numWorkers={world_size}, but the cluster has {found} slots",
            hint=f"set numWorkers={found or 1} or less, or start the session with more: "
            "spark.executor.instances x spark.executor.cores / spark.task.cpus"
            f"{' (and spark.executor.resource.gpu.amount: one GPU a worker)' if profile is not None else ''} "
            f"(master {setting(spark, 'spark.master', 'unknown')!r})",
            param="numWorkers",
        )


def check_result_size(spark: SparkSession, model_bytes: int) -> None:
    """Refuses a model that the driver would not take as the result of a job.

    Args:
        spark: The session.
        model_bytes: Size of the model's parameters and buffers.

    Raises:
        ClusterError: With the setting to change.
    """
    given = re.fullmatch(r"(\d+)([kmgtp]?)b?", setting(spark, "spark.driver.maxResultSize", "1g").strip().lower())
    limit = int(given[1]) << 10 * " kmgtp".index(given[2] or " ") if given else 0
    if limit and model_bytes > limit:
        raise ClusterError(
            f"the model takes {model_bytes / 2**30:.1f} GiB, and the driver accepts {limit / 2**30:.1f} GiB as the "
            "result of a job",
            hint="start the session with a larger spark.driver.maxResultSize (0 for any size), and with a "
            "spark.driver.memory of about three times the model",
        )


def settled_slots(
    spark: SparkSession,
    wanted: int,
    profile: ResourceProfile | None,
    *,
    settle: float = _SETTLE_SECONDS,
    lost: Sequence[str] = (),
) -> int | None:
    """Returns the number of slots once it is enough or has stopped growing; `None` if unknown.

    Args:
        spark: The session.
        wanted: How many are enough.
        profile: The resource profile the tasks will have.
        settle: Seconds in which no slot has appeared, after which it has stopped growing.
        lost: Tags of jobs that are over. A task of theirs that does not end, because its host is cut off or its
            process stopped, holds its slot until Spark gives its executor up.
    """
    java_profile = None
    if profile is not None and profile._java_resource_profile is not None:
        java_profile = profile._java_resource_profile

    def free() -> int | None:
        count = slots(spark, java_profile)
        return None if count is None else count - sum(running_tasks(spark, tag) or 0 for tag in lost)

    found = free()
    if found is None or setting(spark, "spark.master").startswith("local["):
        return found
    deadline = time.monotonic() + (settle if found > 0 else _EMPTY_SECONDS)
    while found < wanted and time.monotonic() < deadline:
        time.sleep(0.1)
        now = free() or 0
        if now > found:
            deadline = time.monotonic() + settle
        found = now
    return found
