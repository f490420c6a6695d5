"""The time zone of timestamps that pandas has in a UDF of Spark, without their zone."""

from __future__ import annotations

import sys
from datetime import tzinfo

from pyspark import TaskContext

from sparktorch.data.convert.values import zone_named
from sparktorch.errors import ColumnError

__all__ = ["zone_in_udf"]


def zone_in_udf(default: str) -> tzinfo:
    """Returns the time zone of the session whose UDF runs this, and that of the name `default` where none runs.

    A `ColumnError` says that the task's Python worker was sent no time zone, as for the functions of an RDD.
    """
    task = TaskContext.get()
    if task is None:
        return zone_named(default)
    name = _sent_to_worker() or task.getLocalProperty("spark.sql.session.timeZone")
    if name is None:
        raise ColumnError(
            "timestamps have no time zone, and this task of Spark does not know that of its session",
            hint="set spark.sql.session.timeZone, score a DataFrame instead of an RDD, or load a model of MLflow with "
            "model_config={'time_zone': 'UTC'}, or another zone",
        )
    return zone_named(name)


def _sent_to_worker() -> str | None:
    """Returns the zone by which pyspark's worker converts timestamps for pandas, which it was sent with the UDF.

    Only the frames of the worker's functions have it: as a setting in new versions, in a serializer in older ones. The
    task's properties lack a zone that the session has by default, and one under `DataFrame.rdd`.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_filename.endswith("worker.py"):
            holders = (frame.f_locals.get("runner_conf"), "timezone"), (frame.f_locals.get("deserializer"), "_timezone")
            zone = next(filter(None, (getattr(holder, name, None) for holder, name in holders)), None)
            if zone is not None:
                return str(zone)
        frame = frame.f_back
    return None
