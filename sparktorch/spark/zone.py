"""Finds the time zone of timestamps that a UDF gets in pandas, where they have no zone."""

from __future__ import annotations

import sys
from datetime import tzinfo

from pyspark import TaskContext

from sparktorch.data.convert.values import zone_named
from sparktorch.errors import ColumnError

__all__ = ["zone_in_udf"]


def zone_in_udf(default: str) -> tzinfo:
    """Returns the time zone of the session whose UDF runs this; outside of tasks, the zone with the name `default`.

    A `ColumnError` says that Spark has sent the task no time zone, as to the functions of an RDD.
    """
    task = TaskContext.get()
    if task is None:
        return zone_named(default)
    name = _zone_of_worker() or task.getLocalProperty("spark.sql.session.timeZone")
    if name is None:
        raise ColumnError(
            "timestamps have no time zone, and this task of Spark does not know that of its session",
            hint="set spark.sql.session.timeZone, score a DataFrame instead of an RDD, or load a model of MLflow with "
            "model_config={'time_zone': 'UTC'}, or another zone",
        )
    return zone_named(name)


def _zone_of_worker() -> str | None:
    """Returns the zone in which pyspark's worker converts timestamps for pandas; Spark sends it with the UDF.

    Only local variables of the worker's functions have the zone: a setting in newer versions of pyspark, a serializer
    in older ones. The task's properties lack a zone that the session has by default, and any zone under
    `DataFrame.rdd`.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_filename.endswith("worker.py"):
            in_setting = getattr(frame.f_locals.get("runner_conf"), "timezone", None)
            in_serializer = getattr(frame.f_locals.get("deserializer"), "_timezone", None)
            zone = in_setting or in_serializer
            if zone:
                return str(zone)
        frame = frame.f_back
    return None
