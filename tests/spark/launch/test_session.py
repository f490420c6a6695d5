"""What is asked of a session."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.session import other_tasks, setting, switched_on
from tests.support.sessions import settings, slots_held


def test_a_setting_is_what_spark_itself_reads(spark: SparkSession) -> None:
    known = "spark.sql.caseSensitive"
    assert setting(spark, known) == "false"  # nobody has set it
    assert setting(spark, known, "true") == "false"
    with settings(spark, {known: "true", "spark.task.cpus": "1"}):
        assert setting(spark, known) == "true"
        assert setting(spark, "spark.task.cpus", "2") == "1"
    assert setting(spark, "spark.task.cpus", "2") == "2"
    assert setting(spark, "spark.sql.thatNoVersionKnows", "no") == "no"


def test_a_setting_is_on_in_whatever_case_it_is_written(spark: SparkSession) -> None:
    for value, on in (("TRUE", True), ("True", True), ("False", False)):
        with settings(spark, {"spark.sql.caseSensitive": value}):
            frame = spark.range(1).selectExpr("id AS x", "id AS X")
            assert switched_on(spark, "spark.sql.caseSensitive") == on
            assert len(ColumnNames.of(frame).called("x")) == (1 if on else 2)


def test_tasks_of_other_jobs_hold_slots_but_no_gpus(spark: SparkSession, tmp_path: Path) -> None:
    with slots_held(spark, 2, tmp_path / "release"):
        assert other_tasks(spark, "none", (), all_jobs=True) == 2
        assert other_tasks(spark, "none", (), all_jobs=True, gpus=True) == 0
