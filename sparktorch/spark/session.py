"""Queries to a session, classic or Connect; on Connect, without the SparkContext."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import Any, cast

from pyspark.resource import ResourceProfile
from pyspark.sql import SparkSession

from sparktorch.errors import ConfigError

__all__ = [
    "cancel_tasks",
    "check_running",
    "driver_address",
    "executor_ids",
    "is_connect",
    "is_leaving",
    "is_local",
    "java_profile",
    "java_version",
    "other_tasks",
    "running_tasks",
    "session_of",
    "setting",
    "slots",
    "switched_on",
    "tag_tasks",
]

# More tasks than a stage has: Spark lists a stage's tasks up to a number.
_MOST_TASKS = 1 << 20


def session_of(data: Any) -> SparkSession:
    """Returns the session of a DataFrame; for other data, such as an RDD, the active session, or else a new one."""
    if hasattr(data, "sparkSession"):
        return cast(SparkSession, data.sparkSession)
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def check_running(spark: SparkSession) -> None:
    """Raises a `ConfigError` if a session has been stopped: pyspark itself would complain about missing attributes."""
    stopped = bool(cast(Any, spark).is_stopped) if is_connect(spark) else spark.sparkContext._jsc is None
    if stopped:
        hint = "make the DataFrame again in a new session; a fitted model can be used there"
        raise ConfigError("the Spark session of the rows has been stopped", hint=hint, param="dataset")


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: SparkSession) -> bool:
    """Whether the tasks are threads of the driver's JVM."""
    return re.fullmatch(r"local(\[.*\])?", setting(spark, "spark.master")) is not None


def setting(spark: SparkSession, name: str, default: str = "") -> str:
    """Returns a Spark setting as Spark would read it.

    `default` stands for a setting that is hidden, or has no value that a session can see: a session sees the defaults
    of Spark SQL's settings, but not those of Spark core's.
    """
    try:
        # Without the default `None`, a Connect server logs unset names as errors.
        value = spark.conf.get(name, None)
        if value is None and name.startswith("spark.sql."):
            value = spark.conf.get(name)
    except Exception:  # The service hides the setting, or Spark lacks it; 3.5 raises Py4J's exception.
        return default
    return default if value is None else str(value)


def switched_on(spark: SparkSession, name: str) -> bool:
    """Whether a Spark setting is true, in upper or lower case."""
    return setting(spark, name).lower() == "true"


def java_version(spark: SparkSession) -> str | None:
    """Returns the driver's Java version; `None` on Connect, where it would need a query."""
    if is_connect(spark):
        return None
    jvm: Any = spark.sparkContext._jvm
    return str(jvm.java.lang.System.getProperty("java.version"))


def slots(spark: SparkSession, profile: Any = None) -> int | None:
    """Returns how many tasks of a Java resource profile can run at once, counted as in Spark's check of barrier stages.

    It is `None` if the session does not tell (Connect, unless the master is `local[n]`).
    """
    if is_connect(spark):
        local = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", setting(spark, "spark.master"))
        return int(local[1]) // int(setting(spark, "spark.task.cpus", "1")) if local else None
    context: Any = spark.sparkContext._jsc.sc()
    manager = context.resourceProfileManager()
    if profile is None:
        profile = manager.defaultResourceProfile()
    else:
        # Spark counts slots only for profiles that the manager has. Adding a profile twice does no harm.
        manager.addResourceProfile(profile)
    return int(context.maxNumConcurrentTasks(profile))


def java_profile(profile: ResourceProfile | None) -> Any:
    """Returns a resource profile as `slots` takes it."""
    return None if profile is None else profile._java_resource_profile


def tag_tasks(spark: SparkSession, tag: str) -> None:
    """Adds a tag to all jobs that this thread will start, for `cancel_tasks` and `running_tasks`."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def cancel_tasks(spark: SparkSession, tag: str) -> None:
    """Cancels the jobs with a tag, including those that wait for slots, which a session's interrupt may miss."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def running_tasks(spark: SparkSession, tag: str) -> int | None:
    """Returns the number of running tasks of the jobs with a tag; `None` if there is no job yet, or on Connect."""
    if is_connect(spark):
        return None
    stages = _stages(spark, tag)
    return None if stages is None else _active_tasks(spark, stages)


def other_tasks(spark: SparkSession, tag: str, ended: Iterable[str], *, all_jobs: bool, gpus: bool = False) -> int:
    """Returns how many tasks run for jobs other than the one with `tag`.

    With `all_jobs`, the tasks of all other jobs count, and otherwise those of the jobs with tags in `ended`. With
    `gpus`, only tasks with a resource profile of their own count: others hold no GPU. On Connect, where slots cannot be
    counted either, the number is 0.
    """
    if is_connect(spark):
        return 0
    stages: set[int] = set()
    if all_jobs:
        stages.update(spark.sparkContext.statusTracker().getActiveStageIds())
    # Stages that have failed are not active, but may still have running tasks.
    for ended_tag in ended:
        stages.update(_stages(spark, ended_tag) or ())
    stages.difference_update(_stages(spark, tag) or ())
    if gpus:
        store: Any = spark.sparkContext._jsc.sc().statusStore()
        stages = {stage for stage in stages if store.lastStageAttempt(stage).resourceProfileId()}
    return _active_tasks(spark, stages)


def executor_ids(spark: SparkSession) -> frozenset[str]:
    """Returns the ids of a cluster's executors, including executors that are to go; none on Connect."""
    if is_connect(spark):
        return frozenset()
    context: Any = spark.sparkContext._jsc.sc()
    return frozenset(str(context.getExecutorIds().mkString(",")).split(","))


def is_leaving(spark: SparkSession, tag: str) -> bool:
    """Whether an executor that runs tasks of the jobs with a tag is being decommissioned.

    Spark tells neither tasks nor listeners, so its scheduler is asked (`TaskScheduler.getExecutorDecommissionState`, in
    core/src/main/scala/org/apache/spark/scheduler).
    """
    if is_connect(spark) or is_local(spark):
        return False
    context: Any = spark.sparkContext._jsc.sc()
    scheduler = context.taskScheduler()
    store = context.statusStore()
    tracker = spark.sparkContext.statusTracker()
    executors = set()
    for stage in _stages(spark, tag) or ():
        info = tracker.getStageInfo(stage)
        if info is None or not info.numActiveTasks:
            continue
        tasks = store.taskList(info.stageId, info.currentAttemptId, _MOST_TASKS)
        for index in range(tasks.size()):
            task = tasks.apply(index)
            if task.status() == "RUNNING":
                executors.add(task.executorId())
    return any(scheduler.getExecutorDecommissionState(executor).isDefined() for executor in executors)


def _stages(spark: SparkSession, tag: str) -> set[int] | None:
    """Returns the stages of the jobs with a tag; `None` if there is no job yet."""
    tracker: Any = spark.sparkContext.statusTracker()
    java_tracker: Any = spark.sparkContext._jsc.sc().statusTracker()
    jobs = [tracker.getJobInfo(job) for job in java_tracker.getJobIdsForTag(tag)]
    if not jobs:
        return None
    return {stage for job in jobs if job is not None for stage in job.stageIds}


def _active_tasks(spark: SparkSession, stages: Iterable[int]) -> int:
    """Returns the number of running tasks in the stages."""
    tracker = spark.sparkContext.statusTracker()
    stage_infos = [tracker.getStageInfo(stage) for stage in stages]
    return sum(stage.numActiveTasks for stage in stage_infos if stage is not None)


def driver_address(spark: SparkSession) -> tuple[str, str] | None:
    """Returns the address to bind on this machine, and the name or address at which executors reach it.

    It is `None` if this process is a Connect client on another machine than the driver, which executors may not reach.
    """
    if is_connect(spark) and not _is_loopback(str(spark.client.host)):
        return None
    advertise = setting(spark, "spark.driver.host", "127.0.0.1")
    bind = setting(spark, "spark.driver.bindAddress") or advertise
    return bind, advertise


def _is_loopback(host: str) -> bool:
    """Whether a name or address is one of this machine for itself."""
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False
