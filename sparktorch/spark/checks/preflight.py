"""Checks before a barrier job is submitted whether the cluster can run it."""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparktorch.base.config import Device
from sparktorch.distributed.store import allow_connections
from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import Finding, finding_for, ok, refuse
from sparktorch.spark.launch.gpus import AMOUNT, gpu_profile
from sparktorch.spark.session import is_local, java_profile, setting, slots, switched_on

__all__ = ["check_cluster", "check_result_size", "descriptors", "enough_slots", "gpus", "settled_slots", "switches"]

# No more slots are expected after this time without a new slot, if the settings promise too few.
_SETTLE_SECONDS = 2.0
_STARTING_SECONDS = 60.0  # The first executors have this time, if no setting says how many there will be.
_PROMISED_SECONDS = 600.0  # Spark waits as long for the slots of a barrier job.
# The user is told after this time what is waited for.
_WARN_SECONDS = 5.0

_LOG = logging.getLogger(__name__)


class _Switch(NamedTuple):
    """What has to be off for a barrier job."""

    name: str
    setting: str
    reason: str
    # What to set besides.
    more: str = ""


_SWITCHES = (
    _Switch(
        "dynamic allocation",
        "spark.dynamicAllocation.enabled",
        "Spark runs no barrier job under it",
        more=" and a fixed spark.executor.instances",
    ),
    _Switch("speculation", "spark.speculation", "Spark would start second copies of slow ranks"),
)


def check_cluster(
    spark: SparkSession,
    world_size: int,
    profile: ResourceProfile | None = None,
    *,
    most: int | None = None,
    longest: float = _PROMISED_SECONDS,
) -> None:
    """Refuses, by a `ClusterError`, a barrier job that Spark would refuse late, hang, or run incorrectly.

    It waits for a cluster that is still starting, at most `longest` seconds, see `settled_slots`. `most` is the largest
    number of ranks that the user has asked for, and `world_size` the smallest.
    """
    refuse(switches(spark))
    slots_finding, _ = enough_slots(spark, world_size, profile, most=most, longest=longest)
    refuse([slots_finding])


def switches(spark: SparkSession) -> list[Finding]:
    """Checks that dynamic allocation, which the first finding is about, and speculation are off."""
    findings = []
    for switch in _SWITCHES:
        check = switch.name.replace(" ", "-")
        if not switched_on(spark, switch.setting):
            findings.append(ok(check, f"{switch.name} is off"))
        elif is_local(spark):
            findings.append(ok(check, f"{switch.name} is on, and Spark has none in local mode"))
        else:
            text = f"{switch.name} is on: {switch.reason}"
            words = {"name": switch.setting, "more": switch.more}
            findings.append(finding_for(check, "failure", text, {}, "switch", **words))
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
    gpus_an_executor = float(setting(spark, AMOUNT, "0"))
    if device == "cpu":
        text = "not asked for"
    elif is_local(spark):
        text = "local mode: ranks take those of this machine, if there are enough"
    elif gpus_an_executor >= 1:
        text = f"{gpus_an_executor:g} an executor, one a rank"
    else:
        text = "the executors were given none"
    return profile, ok("gpus", text)


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

    With `all_of_them`, it waits until no more slots appear, even if there are enough.
    """
    count = settled_slots(spark, world_size, profile, longest=longest)
    if all_of_them and count is not None and count >= world_size:
        count = settled_slots(spark, sys.maxsize, profile, settle=_SETTLE_SECONDS)
    if count is None:
        text = "behind this server they cannot be counted; Spark itself refuses too many ranks, after ten minutes"
        return ok("slots", text), None
    if count >= world_size:
        return ok("slots", f"{count}, of which {world_size} are needed"), count
    where = {"param": "numWorkers"}
    is_range = most not in (None, world_size)
    asked_for = f"({world_size}, {most})" if is_range else str(world_size)
    if not count and not is_local(spark):
        text = f"numWorkers={asked_for}, but no executor has come to this session"
        return finding_for("slots", "failure", text, where, "no executor", hint=_why_no_executor(spark)), count
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    if is_local(spark):
        name = "spark.master"
        value = f"local[{world_size * cpus}]"
        more = f"master {value!r}"
    else:
        slots_an_executor = max(1, int(setting(spark, "spark.executor.cores", "1")) // cpus)
        name = "spark.executor.instances"
        value = str(math.ceil(world_size / slots_an_executor))
        more = "spark.executor.instances x spark.executor.cores / spark.task.cpus"
    words = {
        "fits": f"({count or 1}, {most})" if is_range else f"{count or 1} or less",
        "more": more,
        "gpus": "" if profile is None else f" (and {AMOUNT}: one GPU a worker)",
        "master": setting(spark, "spark.master", "unknown"),
    }
    text = f"numWorkers={asked_for}, but the cluster has {count} slots"
    return finding_for("slots", "failure", text, where, "slots", name=name, value=value, **words), count


def _why_no_executor(spark: SparkSession) -> str:
    """Returns what may keep executors away, as a question to the user."""
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
    """Refuses a model of more bytes than the driver accepts as the result of a job."""
    size = re.fullmatch(r"(\d+)([kmgtp]?)b?", setting(spark, "spark.driver.maxResultSize", "1g").strip().lower())
    limit = 0
    if size:
        # Each letter stands for 1024 times what the letter before stands for.
        limit = int(size[1]) * 1024 ** " kmgtp".index(size[2] or " ")
    if limit and model_bytes > limit:
        raise ClusterError(
            f"the model takes {model_bytes / 2**30:.1f} GiB, and the driver accepts {limit / 2**30:.1f} GiB as the "
            "result of a job",
            hint="start the session with a larger spark.driver.maxResultSize (0 for any size), and with a "
            "spark.driver.memory of about three times the model; or let workers write it: modelDir",
            code="ST-DRIVER-MEMORY",
        )


def _none() -> int:
    """Returns 0, the number of slots that do not count, where all slots count."""
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

    By default, more slots are expected

    - for ten minutes after the last new slot, if the session's settings promise enough,
    - for two seconds after the last new slot, if the settings promise too few,
    - until the session is a minute old, if the settings say nothing. The first slot gets at least a minute.

    `settle` is another number of seconds after the last new slot, `longest` the most to wait.

    `taken` returns how many slots do not count, such as those of tasks of jobs that have ended: if a host is cut off or
    a process is stopped, such tasks hold their slots until Spark gives up the executor. In local mode, where no
    executors come, only these tasks are waited for.
    """
    local = is_local(spark)

    def count_free() -> int | None:
        slot_count = slots(spark, java_profile(profile))
        return None if slot_count is None else max(0, slot_count - taken())

    def seconds_for_more(count: int) -> float:
        if settle is not None and (count > 0 or local):
            return settle
        return max(settle or 0.0, _seconds_for_more(spark, count, needed, promised))

    count = count_free()
    if count is None or (local and not taken()):
        return count_free()  # Tasks that have just ended count as free now.
    promised = _promised_slots(spark, needed, has_profile=profile is not None)
    begun = time.monotonic()
    until = begun + seconds_for_more(count)
    warn_at = begun + _WARN_SECONDS
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
        new_count = count_free() or 0
        if new_count != count:
            until = time.monotonic() + seconds_for_more(new_count)
        count = new_count
    return count


def _seconds_for_more(spark: SparkSession, count: int, needed: int, promised: int | None) -> float:
    """Returns for how many seconds after the last new slot more are expected."""
    if promised is not None and promised >= needed:
        return _PROMISED_SECONDS
    if promised is not None and count > 0:
        return _SETTLE_SECONDS
    age = 0 if count <= 0 else time.time() - spark.sparkContext.startTime / 1000
    return max(_SETTLE_SECONDS, _STARTING_SECONDS - age)


def _promised_slots(spark: SparkSession, needed: int, *, has_profile: bool) -> int | None:
    """Returns how many slots the session's settings ask for; `None` if they do not say.

    `has_profile` says that the tasks have the resource profile of one GPU each.
    """
    master = setting(spark, "spark.master")
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    if master.startswith("spark:"):  # Standalone gives all free cores, up to spark.cores.max.
        most = setting(spark, "spark.cores.max")
        return int(most) // cpus if most and int(most) // cpus < needed else None
    local_cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if local_cluster:
        executors, cores = local_cluster.groups()
    else:
        executors = setting(spark, "spark.executor.instances")
        cores = setting(spark, "spark.executor.cores", "1")
    if not executors:
        return None
    slots_an_executor = int(cores) // cpus
    gpus_a_task = 1.0 if has_profile else float(setting(spark, "spark.task.resource.gpu.amount", "0"))
    if gpus_a_task:
        slots_an_executor = min(slots_an_executor, int(float(setting(spark, AMOUNT, "0")) / gpus_a_task))
    return int(executors) * slots_an_executor
