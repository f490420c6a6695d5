"""Checks before a barrier job is submitted whether the cluster can run it."""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparktorch.base.config import Device
from sparktorch.errors import ClusterError
from sparktorch.spark.checks.check_result import Finding, refuse
from sparktorch.spark.launch.gpus import AMOUNT, gpu_profile
from sparktorch.spark.session import is_local, running_tasks, setting, slots, switched_on

__all__ = [
    *("check_cluster", "check_result_size", "descriptors", "dynamic_allocation", "enough_slots"),
    *("gpus", "settled_slots", "speculation"),
]

_SETTLE_SECONDS = 2.0
_STARTING_SECONDS = 60.0  # wait for the first executors, if no setting says how many there will be
_PROMISED_SECONDS = 600.0  # as long as Spark waits for the slots of a barrier job
_WARN_SECONDS = 5.0

_LOG = logging.getLogger(__name__)


def check_cluster(
    spark: SparkSession, world_size: int, profile: ResourceProfile | None = None, *, longest: float = _PROMISED_SECONDS
) -> None:
    """Checks for conditions under which Spark would refuse the job late, hang, or run it incorrectly.

    It waits for a cluster that is still starting, see `settled_slots`.

    Args:
        spark: The session.
        world_size: Number of barrier tasks.
        profile: Resource profile of the tasks.
        longest: Most seconds to wait for slots.

    Raises:
        ClusterError: A check failed; with the setting to change.
    """
    refuse([dynamic_allocation(spark), speculation(spark)])
    refuse([enough_slots(spark, world_size, profile, longest=longest)[0]])


def dynamic_allocation(spark: SparkSession) -> Finding:
    """Checks that dynamic allocation is off."""
    return _must_be_off(
        spark,
        "spark.dynamicAllocation.enabled",
        "dynamic allocation",
        "Spark runs no barrier job under it",
        "spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances",
    )


def speculation(spark: SparkSession) -> Finding:
    """Checks that speculation is off."""
    return _must_be_off(
        spark,
        "spark.speculation",
        "speculation",
        "Spark would start second copies of slow ranks",
        "spark.speculation=false",
    )


def _must_be_off(spark: SparkSession, name: str, what: str, why: str, instead: str) -> Finding:
    check = what.replace(" ", "-")
    if not switched_on(spark, name):
        return Finding(check=check, status="ok", found=f"{what} is off")
    if is_local(spark):
        return Finding(check=check, status="ok", found=f"{what} is on, and Spark has none in local mode")
    return Finding(
        check=check,
        status="failure",
        found=f"{what} is on: {why}",
        setting=name,
        value="false",
        hint=f"start the session with {instead}",
    )


def descriptors(world_size: int) -> Finding:
    """Checks that the driver may open the connections of its store to all ranks, two for each."""
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd")) + 2 * world_size
    if most in (resource.RLIM_INFINITY, -1) or needed <= most:
        return Finding(check="descriptors", status="ok", found="the driver may open a connection for every rank")
    return Finding(
        check="descriptors",
        status="failure",
        found=f"numWorkers={world_size} takes {needed:,} open files of the driver, and its limit is {most:,}",
        where={"param": "numWorkers"},
        hint=f"raise the limit before the driver starts: ulimit -n {2 * needed}",
    )


def gpus(spark: SparkSession, device: Device, world_size: int) -> tuple[ResourceProfile | None, Finding]:
    """Checks that executors have the requested GPUs; returns the tasks' resource profile and the finding."""
    try:
        profile = gpu_profile(spark, device, world_size)
    except ClusterError as error:
        name = "device" if is_local(spark) else AMOUNT
        value = "cpu" if is_local(spark) else "1"
        return None, Finding(
            check="gpus", status="failure", found=error.what, setting=name, value=value, hint=error.hint
        )
    given = float(setting(spark, AMOUNT, "0"))
    if device == "cpu":
        found = "not asked for"
    elif is_local(spark):
        found = "local mode: ranks take those of this machine, if there are enough"
    else:
        found = f"{given:g} an executor, one a rank" if given >= 1 else "the executors were given none"
    return profile, Finding(check="gpus", status="ok", found=found)


def enough_slots(
    spark: SparkSession,
    world_size: int,
    profile: ResourceProfile | None = None,
    *,
    all_of_them: bool = False,
    longest: float = _PROMISED_SECONDS,
) -> tuple[Finding, int | None]:
    """Checks that all ranks can run at once.

    Args:
        spark: The session.
        world_size: Number of ranks.
        profile: Resource profile of the tasks.
        all_of_them: Whether to wait until no more slots appear, even if there are enough.
        longest: Most seconds to wait for enough slots.

    Returns:
        The finding, and the number of slots, `None` if unknown.
    """
    found = settled_slots(spark, world_size, profile, longest=longest)
    if all_of_them and found is not None and found >= world_size:
        found = settled_slots(spark, sys.maxsize, profile, settle=_SETTLE_SECONDS)
    if found is None:
        text = "behind this server they cannot be counted; Spark itself refuses too many ranks, after ten minutes"
        return Finding(check="slots", status="ok", found=text), None
    if found >= world_size:
        return Finding(check="slots", status="ok", found=f"{found}, of which {world_size} are needed"), found
    if not found and not is_local(spark):
        return _no_executor(spark, world_size), found
    name, value = _more_slots(spark, world_size)
    finding = Finding(
        check="slots",
        status="failure",
        found=f"numWorkers={world_size}, but the cluster has {found} slots",
        where={"param": "numWorkers"},
        setting=name,
        value=value,
        hint=f"set numWorkers={found or 1} or less, or start the session with more: "
        "spark.executor.instances x spark.executor.cores / spark.task.cpus"
        f"{' (and spark.executor.resource.gpu.amount: one GPU a worker)' if profile is not None else ''} "
        f"(master {setting(spark, 'spark.master', 'unknown')!r})",
    )
    return finding, found


def _no_executor(spark: SparkSession, world_size: int) -> Finding:
    return Finding(
        check="slots",
        status="failure",
        found=f"numWorkers={world_size}, but no executor has come to this session",
        where={"param": "numWorkers"},
        setting="spark.driver.host",
        value="an address that executors reach",
        hint=_why_no_executor(spark),
    )


def _why_no_executor(spark: SparkSession) -> str:
    host = setting(spark, "spark.driver.host", "unknown")
    bind = setting(spark, "spark.driver.bindAddress") or host
    with suppress(OSError):
        bind = f"{bind} ({socket.gethostbyname(bind)} on this machine)"
    return (
        f"do other applications hold what {setting(spark, 'spark.master', 'the cluster')} has, or do executors not "
        f"reach the driver at spark.driver.host={host}, where it listens on {bind}? Their logs tell. The address is "
        "set with spark.driver.host, and where it listens with spark.driver.bindAddress"
    )


def _more_slots(spark: SparkSession, wanted: int) -> tuple[str, str]:
    """Returns the setting that provides enough slots, and its value."""
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    if is_local(spark):
        return "spark.master", f"local[{wanted * cpus}]"
    per_executor = int(setting(spark, "spark.executor.cores", "1")) // cpus
    return "spark.executor.instances", str(-(-wanted // max(1, per_executor)))


def check_result_size(spark: SparkSession, model_bytes: int) -> None:
    """Checks that the driver accepts a model of this size as the result of a job.

    Args:
        spark: The session.
        model_bytes: Size of the model's parameters and buffers in bytes.

    Raises:
        ClusterError: The model is larger than `spark.driver.maxResultSize`.
    """
    given = re.fullmatch(r"(\d+)([kmgtp]?)b?", setting(spark, "spark.driver.maxResultSize", "1g").strip().lower())
    limit = int(given[1]) << 10 * " kmgtp".index(given[2] or " ") if given else 0
    if limit and model_bytes > limit:
        raise ClusterError(
            f"the model takes {model_bytes / 2**30:.1f} GiB, and the driver accepts {limit / 2**30:.1f} GiB as the "
            "result of a job",
            hint="start the session with a larger spark.driver.maxResultSize (0 for any size), and with a "
            "spark.driver.memory of about three times the model; or let workers write it: modelDir",
        )


def settled_slots(
    spark: SparkSession,
    wanted: int,
    profile: ResourceProfile | None,
    *,
    settle: float | None = None,
    longest: float = _PROMISED_SECONDS,
    lost: Sequence[str] = (),
) -> int | None:
    """Returns the number of slots once there are enough or no more are expected; `None` if unknown.

    Args:
        spark: The session.
        wanted: Number of slots that is enough.
        profile: Resource profile of the tasks.
        settle: Seconds without a new slot after which no more are expected. Default: ten minutes if the session's
            settings promise enough slots, two seconds if they promise too few. If they say nothing, two seconds once
            the session is a minute old. The first slot gets at least a minute.
        longest: Most seconds to wait.
        lost: Tags of jobs that have ended. Their tasks may still hold slots, if a host is cut off or a process is
            stopped, until Spark gives up the executor; such slots do not count.
    """
    java_profile = None
    if profile is not None and profile._java_resource_profile is not None:
        java_profile = profile._java_resource_profile

    def free() -> int | None:
        count = slots(spark, java_profile)
        return None if count is None else count - sum(running_tasks(spark, tag) or 0 for tag in lost)

    found = free()
    if found is None or is_local(spark):
        return found
    begun = grown = time.monotonic()
    warn_at = begun + _WARN_SECONDS
    promised = _promised_slots(spark, wanted, gpu_each=profile is not None)
    while found < wanted:
        now = time.monotonic()
        waited = now - grown
        patience = settle if settle is not None and found > 0 else _patience(spark, wanted, found, promised, waited)
        if waited >= patience or now >= begun + longest:
            break
        if now > warn_at:
            warn_at = now + _PROMISED_SECONDS
            _warn_of_waiting(spark, found, wanted)
        time.sleep(0.1)
        before, found = found, free() or 0
        if found > before:
            grown = time.monotonic()
    return found


def _patience(spark: SparkSession, wanted: int, found: int, promised: int | None, waited: float) -> float:
    """Returns for how many seconds after the last new slot, which came `waited` seconds ago, more are expected."""
    if promised is not None and promised >= wanted:
        return _PROMISED_SECONDS
    if found <= 0:
        return _STARTING_SECONDS
    if promised is not None:
        return _SETTLE_SECONDS
    age = time.time() - waited - spark.sparkContext.startTime / 1000
    return max(_SETTLE_SECONDS, _STARTING_SECONDS - age)


def _promised_slots(spark: SparkSession, wanted: int, *, gpu_each: bool) -> int | None:
    """Returns the number of slots that the session's settings request; `None` if they do not say.

    Args:
        spark: The session.
        wanted: Number of slots that is enough.
        gpu_each: Whether each task gets a GPU of its own.
    """
    master, cpus = setting(spark, "spark.master"), int(setting(spark, "spark.task.cpus", "1"))
    local = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if master.startswith("spark:"):  # Standalone: all free cores, up to spark.cores.max
        most = setting(spark, "spark.cores.max")
        return int(most) // cpus if most and int(most) // cpus < wanted else None
    executors = local[1] if local else setting(spark, "spark.executor.instances")
    if not executors:
        return None
    each = int(local[2] if local else setting(spark, "spark.executor.cores", "1")) // cpus
    gpus_a_task = 1.0 if gpu_each else float(setting(spark, "spark.task.resource.gpu.amount", "0"))
    if gpus_a_task:
        each = min(each, int(float(setting(spark, AMOUNT, "0")) / gpus_a_task))
    return int(executors) * each


def _warn_of_waiting(spark: SparkSession, found: int, wanted: int) -> None:
    if found > 0:
        _LOG.warning("the cluster has %d of %d slots: waiting for more executors", found, wanted)
    else:
        _LOG.warning("no executor has come yet: %s", _why_no_executor(spark))
