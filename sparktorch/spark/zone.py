"""The time zone of timestamps that pandas has in a UDF of Spark, without their zone."""

from __future__ import annotations

from datetime import tzinfo

from pyspark import TaskContext

from sparktorch.data.convert.values import zone_named
from sparktorch.errors import ColumnError

__all__ = ["zone_in_udf"]


def zone_in_udf(outside: tzinfo) -> tzinfo | None:
    """Returns the time zone of the session whose UDF runs this, and `outside` where none runs.

    `None` is the zone of this process, as that of a session that has set none. A `ColumnError` says that the task is of
    an RDD, which does not know its session's zone.
    """
    task = TaskContext.get()
    if task is None:
        return outside
    name = task.getLocalProperty("spark.sql.session.timeZone")
    if name is None and task.getLocalProperty("spark.sql.execution.id") is None:
        raise ColumnError(
            "timestamps have no time zone, and a task of an RDD does not know that of its session",
            hint="score a DataFrame, or load the model with model_config={'time_zone': 'UTC'}, or another zone",
        )
    return None if name is None else zone_named(name)
