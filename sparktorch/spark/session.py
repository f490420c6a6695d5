"""What can be asked of a session, classic or Connect, without touching the SparkContext where it is closed."""

from __future__ import annotations

import re
import socket
from typing import Any

from pyspark.sql import SparkSession

__all__ = [
    *("cancel_tasks", "driver_address", "is_connect", "is_local", "java_version"),
    *("running_tasks", "setting", "slots", "switched_on", "tag_tasks"),
]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: SparkSession) -> bool:
    """Whether the tasks are threads of the driver's JVM."""
    return re.fullmatch(r"local(\[.*\])?", setting(spark, "spark.master")) is not None


def setting(spark: SparkSession, name: str, default: str = "") -> str:
    """Returns a Spark setting as Spark would read it.

    Args:
        spark: The session.
        name: The setting's name.
        default: What to return where it is not shown, or not set and Spark registers no default that a session can see:
            it does for the names of Spark SQL, and not for those of the core.
    """
    try:
        value = spark.conf.get(name, None)  # without `None`, a Connect server logs a name that is not set as an error
        if value is None and name.startswith("spark.sql."):
            value = spark.conf.get(name)
    except Exception:  # the service does not show it, or Spark does not know it: 3.5 says so by an exception of Py4J
        return default
    return default if value is None else str(value)


def switched_on(spark: SparkSession, name: str) -> bool:
    """Whether a Spark setting is true, in whatever case it is written."""
    return setting(spark, name).lower() == "true"


def java_version(spark: SparkSession) -> str | None:
    """Returns the driver's version of Java; `None` on Connect, where it cannot be asked without a query."""
    if is_connect(spark):
        return None
    jvm: Any = spark.sparkContext._jvm
    return str(jvm.java.lang.System.getProperty("java.version"))


def slots(spark: SparkSession, profile: Any = None) -> int | None:
    """Returns how many tasks can run at once, as Spark's own barrier check counts them.

    Args:
        spark: The session.
        profile: The resource profile the tasks will have, `None` for the default one.

    Returns:
        The number, or `None` where the session does not let it be known (remote Connect).
    """
    if is_connect(spark):
        local = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", setting(spark, "spark.master"))
        return int(local[1]) // int(setting(spark, "spark.task.cpus", "1")) if local else None
    context: Any = spark.sparkContext._jsc.sc()
    manager = context.resourceProfileManager()
    if profile is None:
        profile = manager.defaultResourceProfile()
    else:
        manager.addResourceProfile(profile)  # Spark counts for profiles it knows; knowing one twice is fine
    return int(context.maxNumConcurrentTasks(profile))


def tag_tasks(spark: SparkSession, tag: str) -> None:
    """Gives the jobs that this thread is to start a tag, by which `cancel_tasks` and `running_tasks` know them."""
    if is_connect(spark):
        spark.addTag(tag)
    else:
        spark.sparkContext.addJobTag(tag)


def cancel_tasks(spark: SparkSession, tag: str) -> None:
    """Cancels the jobs with a tag, those that wait for slots among them, which a session's own interrupt may miss."""
    if is_connect(spark):
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def running_tasks(spark: SparkSession, tag: str) -> int | None:
    """Returns how many tasks are running of the jobs with a tag; `None` where there is no job yet, or on Connect.

    Args:
        spark: The session.
        tag: As given to `tag_tasks` where the jobs were started.
    """
    if is_connect(spark):
        return None
    tracker: Any = spark.sparkContext._jsc.sc().statusTracker()
    known = spark.sparkContext.statusTracker()
    jobs = [known.getJobInfo(job) for job in tracker.getJobIdsForTag(tag)]
    stages = [known.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numActiveTasks for stage in stages if stage is not None) if jobs else None


def driver_address(spark: SparkSession) -> tuple[str, str] | None:
    """Returns the address to bind on this process's machine and the name executors reach it by.

    Returns:
        `(bind, advertise)`, or `None` where this process is a Connect client on another machine
        than the driver, which executors may not be able to reach.
    """
    if is_connect(spark) and not _is_loopback(str(spark.client.host)):
        return None
    advertise = setting(spark, "spark.driver.host", "127.0.0.1")
    bind = setting(spark, "spark.driver.bindAddress") or advertise
    return bind, advertise


def _is_loopback(host: str) -> bool:
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False
