"""In which time zone pandas has the timestamps of a UDF, as the task knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone

import pytest
from pyspark import TaskContext

from sparktorch.errors import ColumnError
from sparktorch.spark.zone import zone_in_udf

UTC = timezone.utc


@pytest.fixture
def task() -> Iterator[Callable[[dict[str, str]], None]]:
    def begins(properties: dict[str, str]) -> None:
        TaskContext._getOrCreate()._localProperties = properties

    yield begins
    TaskContext._setTaskContext(None)


def test_outside_of_a_task_the_zone_is_the_callers() -> None:
    assert zone_in_udf("UTC") is UTC


def test_in_a_udf_the_zone_is_the_sessions(task: Callable[[dict[str, str]], None]) -> None:
    summer = datetime(2024, 7, 1)
    for name, hours in {"America/New_York": -4, "+05:30": 5.5, "Z": 0, "GMT-3": -3, "Asia/Kolkata": 5.5}.items():
        task({"spark.sql.execution.id": "1", "spark.sql.session.timeZone": name})
        zone = zone_in_udf("UTC")
        assert zone.utcoffset(summer) == timedelta(hours=hours)
    task({"spark.sql.session.timeZone": "PST", "spark.sql.execution.id": "1"})
    with pytest.raises(ValueError, match="'PST' is no time zone that Python has"):
        zone_in_udf("UTC")


def test_a_task_that_was_sent_no_zone_does_not_guess_its_sessions(task: Callable[[dict[str, str]], None]) -> None:
    for properties in ({}, {"spark.sql.execution.id": "1"}):
        task(properties)
        with pytest.raises(ColumnError, match="does not know that of its session") as refused:
            zone_in_udf("UTC")
        assert "model_config={'time_zone': 'UTC'}" in refused.value.hint
