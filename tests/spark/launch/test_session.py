"""What is asked of a session, what executors get besides rows, and when it is let go of."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch.spark import shipping as files
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.session import other_tasks, setting, switched_on
from sparktorch.spark.shipping import Sent, add_code, send
from tests.support.sessions import settings, slots_held
from tests.support.waiting import until


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


class Value:
    """One that is pickled into as many bytes as it is asked for."""

    def __init__(self, size: int) -> None:
        self.content = b"x" * size


def sizes(spark: SparkSession, sent: Sent) -> DataFrame:
    size = F.udf(lambda _: len(sent.load().content), "bigint")
    return spark.range(2).select(size("id").alias("size"))


def test_large_values_travel_beside_the_tasks_in_pieces_and_small_ones_with_them(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 1 << 20)
    for size, pieces in ((100, 0), (3 << 20, 4)):
        value = Value(size)
        sent = send(spark, value)
        assert (sent.inline is None) == (pieces > 0)
        assert len(sent.pieces) == pieces
        assert [row["size"] for row in sizes(spark, sent).collect()] == [size, size]


def test_a_value_lives_as_long_as_the_frames_that_load_it_and_no_longer(spark: SparkSession) -> None:
    jvm: Any = spark.sparkContext._jvm

    def gone() -> bool:
        gc.collect()
        jvm.System.gc()
        send(spark, Value(2 << 20))
        return not file.exists()

    value = Value(2 << 20)
    sent = send(spark, value)
    file = Path(sent.pieces[0]._path)
    frame = sizes(spark, sent)
    del value, sent
    assert not gone()
    assert [row["size"] for row in frame.collect()] == [2 << 20] * 2
    del frame
    until(gone, seconds=60, what="the file to go")


def test_code_that_was_there_before_the_session_is_sent_to_it(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a_module_of_this_test.py").write_text("class Net:\n    content = b'12345'\n")
    add_code(tmp_path)
    send(spark, object())

    def length() -> int:
        from a_module_of_this_test import Net  # type: ignore[import-not-found]

        return len(Net.content)

    assert spark.range(1).select(F.udf(lambda _: length(), "int")("id")).collect()[0][0] == 5
    files._code.remove(tmp_path)


def test_two_models_may_come_with_the_same_code(spark: SparkSession, tmp_path: Path) -> None:
    folders = [tmp_path / "of_one", tmp_path / "of_another"]
    try:
        for number, folder in enumerate(folders):
            folder.mkdir()
            file = folder / "a_module_of_two_models.py"
            file.write_text("content = b'123'\n")
            os.utime(file, (1_000_000_000 + number * 86_400,) * 2)  # as a download leaves it
            add_code(folder)
            send(spark, object())
    finally:
        for folder in folders:
            files._code.remove(folder)
