"""Checks before a barrier job is submitted whether the cluster can run it."""

from __future__ import annotations

import logging
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparktorch.base.config import Device
from sparktorch.distributed.store import allow_connections
from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import Finding, finding_for, ok, refuse
from sparktorch.spark.launch.gpus import AMOUNT, gpu_profile
from sparktorch.spark.session import is_local, java_profile, setting, slots, switched_on

__all__ = ["check_cluster", "check_result_size", "descriptors", "enough_slots", "gpus", "settled_slots", "switches"]

_SETTLE_SECONDS = 2.0
_STARTING_SECONDS = 60.0  # The first executors have this time, if no setting says how many there will be.
_PROMISED_SECONDS = 600.0  # Spark waits as long for the slots of a barrier job.
_WARN_SECONDS = 5.0

_LOG = logging.getLogger(__name__)

# These have to be off. A name is followed by its setting, the reason, and what else to set.
_OFF = {
    "dynamic allocation": (
        "spark.dynamicAllocation.enabled",
        "Spark runs no barrier job under it",
        " and a fixed spark.executor.instances",
    ),
    "speculation": ("spark.speculation", "Spark would start second copies of slow ranks", ""),
}


def check_cluster(
    spark: SparkSession,
    world_size: int,
    profile: ResourceProfile | None = None,
    *,
    most: int | None = None,
    longest: float = _PROMISED_SECONDS,
) -> None:
    """Refuses a barrier job that Spark would refuse late, hang, or run incorrectly, by a `ClusterError`.

    It waits for a cluster that is still starting, at most `longest` seconds, see `settled_slots`. `most` is the number
    of ranks that were asked for, of which `world_size` are the fewest.
    """
    refuse(switches(spark))
    refuse([enough_slots(spark, world_size, profile, most=most, longest=longest)[0]])


def switches(spark: SparkSession) -> list[Finding]:
    """Checks that dynamic allocation, the first, and speculation are off."""
    findings = []
    for what, (name, why, more) in _OFF.items():
        check = what.replace(" ", "-")
        if not switched_on(spark, name):
            findings.append(ok(check, f"{what} is off"))
        elif is_local(spark):
            findings.append(ok(check, f"{what} is on, and Spark has none in local mode"))
        else:
            findings.append(finding_for(check, "failure", f"{what} is on: {why}", {}, "switch", name=name, more=more))
    return findings


def descriptors(world_size: int) -> Finding:
    """Checks that the driver may open the connections of its store to all ranks, as a fit does."""
    try:
        allow_connections(world_size)
    except ClusterError as error:
        return finding_for(
            "descriptors", "failure", error.what, {"param": "numWorkers"}, "descriptors", hint=error.hint
        )
    return ok("descriptors", "the driver may open the connections of every rank")


def gpus(spark: SparkSession, device: Device, world_size: int) -> tuple[ResourceProfile | None, Finding]:
    """Checks that executors have the requested GPUs; returns the tasks' resource profile and the finding."""
    try:
        profile = gpu_profile(spark, device, world_size)
    except ClusterError as error:
        name, value = ("device", "cpu") if is_local(spark) else (AMOUNT, "1")
        return None, finding_for("gpus", "failure", error.what, {}, "gpus", name=name, value=value, hint=error.hint)
    gpus_of_executor = float(setting(spark, AMOUNT, "0"))
    text = f"{gpus_of_executor:g} an executor, one a rank" if gpus_of_executor >= 1 else "the executors were given none"
    if is_local(spark):
        text = "local mode: ranks take those of this machine, if there are enough"
    return profile, ok("gpus", "not asked for" if device == "cpu" else text)


def enough_slots(
    spark: SparkSession,
    world_size: int,
    profile: ResourceProfile | None = None,
    *,
    all_of_them: bool = False,
    most: int | None = None,
    longest: float = _PROMISED_SECONDS,
) -> tuple[Finding, int | None]:
    """Checks that all ranks can run at once; returns the finding, and the number of slots, `None` if unknown.

    With `all_of_them` it waits until no more slots appear, even if there are enough.
    """
    count = settled_slots(spark, world_size, profile, longest=longest)
    if all_of_them and count is not None and count >= world_size:
        count = settled_slots(spark, sys.maxsize, profile, settle=_SETTLE_SECONDS)
    if count is None:
        text = "behind this server they cannot be counted; Spark itself refuses too many ranks, after ten minutes"
        return ok("slots", text), None
    if count >= world_size:
        return ok("slots", f"{count}, of which {world_size} are needed"), count
    where, asked_for = {"param": "numWorkers"}, world_size if most in (None, world_size) else f"({world_size}, {most})"
    if not count and not is_local(spark):
        text = f"numWorkers={asked_for}, but no executor has come to this session"
        return finding_for("slots", "failure", text, where, "no executor", hint=_why_no_executor(spark)), count
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    name, value = "spark.master", f"local[{world_size * cpus}]"
    more = f"master {value!r}"
    if not is_local(spark):
        slots_of_executor = max(1, int(setting(spark, "spark.executor.cores", "1")) // cpus)
        name, value = "spark.executor.instances", str(-(-world_size // slots_of_executor))
        more = "spark.executor.instances x spark.executor.cores / spark.task.cpus"
    words = {
        "fits": f"{count or 1} or less" if most in (None, world_size) else f"({count or 1}, {most})",
        "more": more,
        "gpus": "" if profile is None else f" (and {AMOUNT}: one GPU a worker)",
        "master": setting(spark, "spark.master", "unknown"),
    }
    text = f"numWorkers={asked_for}, but the cluster has {count} slots"
    return finding_for("slots", "failure", text, where, "slots", name=name, value=value, **words), count


def _why_no_executor(spark: SparkSession) -> str:
    host = setting(spark, "spark.driver.host", "unknown")
    bind = setting(spark, "spark.driver.bindAddress") or host
    with suppress(OSError):
        bind = f"{bind} ({socket.gethostbyname(bind)} on this machine)"
    return (
        f"do other applications hold what {setting(spark, 'spark.master', 'the cluster')} has, or do executors not "
        f"reach the driver at spark.driver.host={host}, where it listens on {bind} (spark.driver.bindAddress)? Their "
        "logs tell"
    )


def check_result_size(spark: SparkSession, model_bytes: int) -> None:
    """Refuses a model that is larger, in bytes, than what the driver accepts as the result of a job."""
    size = re.fullmatch(r"(\d+)([kmgtp]?)b?", setting(spark, "spark.driver.maxResultSize", "1g").strip().lower())
    # Each of the letters stands for 1024 of the one before.
    limit = int(size[1]) << 10 * " kmgtp".index(size[2] or " ") if size else 0
    if limit and model_bytes > limit:
        raise ClusterError(
            f"the model takes {model_bytes / 2**30:.1f} GiB, and the driver accepts {limit / 2**30:.1f} GiB as the "
            "result of a job",
            hint="start the session with a larger spark.driver.maxResultSize (0 for any size), and with a "
            "spark.driver.memory of about three times the model; or let workers write it: modelDir",
            code="ST-DRIVER-MEMORY",
        )


def _none() -> int:
    """Returns the number of slots that do not count, where all of them count."""
    return 0


def settled_slots(
    spark: SparkSession,
    needed: int,
    profile: ResourceProfile | None,
    *,
    settle: float | None = None,
    longest: float = _PROMISED_SECONDS,
    taken: Callable[[], int] = _none,
) -> int | None:
    """Returns the number of slots once there are enough or no more are expected; `None` if unknown.

    By default, more are expected for ten minutes after the last new slot if the session's settings promise enough, for
    two seconds if they promise too few, and if they say nothing until the session is a minute old. The first slot gets
    at least a minute. `settle` is another number of seconds after the last new slot, `longest` the most to wait.

    `taken` returns how many slots do not count, such as those of tasks of jobs that have ended: if a host is cut off or
    a process is stopped, they hold them until Spark gives up the executor. In local mode only these are waited for.
    """
    local = is_local(spark)

    def free() -> int | None:
        slot_count = slots(spark, java_profile(profile))
        return None if slot_count is None else max(0, slot_count - taken())

    def patience(count: int) -> float:
        if settle is not None and (count > 0 or local):
            return settle
        return max(settle or 0.0, _patience(spark, count, needed, promised))

    count = free()
    if count is None or (local and not taken()):
        return free()
    promised = _promised_slots(spark, needed, gpu_each=profile is not None)
    begun = time.monotonic()
    until, warn_at = begun + patience(count), begun + _WARN_SECONDS
    while count < needed:
        now = time.monotonic()
        if now >= min(until, begun + longest):
            break
        if now > warn_at:
            warn_at = now + _PROMISED_SECONDS
            if count > 0:
                _LOG.warning("the cluster has %d of %d slots: waiting for more executors", count, needed)
            else:
                _LOG.warning("no executor has come yet: %s", _why_no_executor(spark))
        time.sleep(0.1)
        before, count = count, free() or 0
        if count != before:
            until = time.monotonic() + patience(count)
    return count


def _patience(spark: SparkSession, count: int, needed: int, promised: int | None) -> float:
    """Returns for how many seconds after the last new slot more are expected."""
    if promised is not None and promised >= needed:
        return _PROMISED_SECONDS
    if promised is not None and count > 0:
        return _SETTLE_SECONDS
    age = 0 if count <= 0 else time.time() - spark.sparkContext.startTime / 1000
    return max(_SETTLE_SECONDS, _STARTING_SECONDS - age)


def _promised_slots(spark: SparkSession, needed: int, *, gpu_each: bool) -> int | None:
    """Returns how many slots the session's settings ask for; `None` if they do not say."""
    master, cpus = setting(spark, "spark.master"), int(setting(spark, "spark.task.cpus", "1"))
    local = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if master.startswith("spark:"):  # Standalone gives all free cores, up to spark.cores.max.
        most = setting(spark, "spark.cores.max")
        return int(most) // cpus if most and int(most) // cpus < needed else None
    executors = local[1] if local else setting(spark, "spark.executor.instances")
    if not executors:
        return None
    slots_of_executor = int(local[2] if local else setting(spark, "spark.executor.cores", "1")) // cpus
    gpus_a_task = 1.0 if gpu_each else float(setting(spark, "spark.task.resource.gpu.amount", "0"))
    if gpus_a_task:
        slots_of_executor = min(slots_of_executor, int(float(setting(spark, AMOUNT, "0")) / gpus_a_task))
    return int(executors) * slots_of_executor
