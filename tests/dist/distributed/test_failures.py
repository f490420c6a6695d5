"""What goes wrong in one rank is told once, with its place, and nobody hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, VALIDATION, WEIGHT
from sparktorch.distributed.root_cause import RootCause
from sparktorch.errors import ColumnError, RankError, RankLostError
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import DiesAt, FailsAt, Mlp
from tests.support.ranks import cause_of_death, control_server, run_ranks, watch

ROWS = 400


def job_for(table: Table, **recipe: Any) -> TrainJob:
    values: dict[str, Any] = {"module": Mlp, "loss": "CrossEntropyLoss", **recipe}
    return TrainJob(
        columns=table.columns,
        recipe=Recipe(**values),
        config=TrainConfig(task="classification", batch_size=40, epochs=2),
    )


def test_a_bad_row_is_an_error_with_rank_and_column_before_training_begins() -> None:
    parts = Table.random(ROWS, classes=3, weighted=True).parts(3)
    parts[1] = parts[1].with_values(WEIGHT, [-1.0], at=5)
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in parts], job_for(parts[0]))
        failure, primary = server.first_failure()
        assert server.progress() is None
    assert [rank.error for rank in ended] == ["PeerFailure", "ColumnError", "PeerFailure"]
    assert type(failure) is ColumnError
    assert primary
    assert failure.where == {"rank": 1, "host": "host-1", "column": "importance"}
    assert "1 weight in column 'importance' is negative" in failure.what


def test_an_exception_in_forward_is_told_with_rank_epoch_step_and_traceback() -> None:
    parts = Table.random(ROWS, classes=3).parts(3)  # 10 steps an epoch
    job = job_for(parts[0], module=FailsAt, module_params={"rank": 2, "step": 13})
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in parts], job)
        failure, primary = server.first_failure()
    assert type(failure) is RankError
    assert primary
    assert failure.what == "ArithmeticError while training: planted in forward"
    assert "nets.py" in failure.trace
    assert "in fail" in failure.trace
    assert failure.where == {"rank": 2, "host": "host-2", "epoch": 2, "step": 3}
    assert ended[2].error == "ArithmeticError"
    assert all(other.error for other in ended), "the other ranks have left too"


def test_a_rank_that_is_killed_is_named_by_where_its_heart_stopped() -> None:
    parts = Table.random(ROWS, classes=3).parts(2)
    job = job_for(parts[0], module=DiesAt, module_params={"rank": 1, "step": 13})
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in parts], job)
        _, primary = server.first_failure()
        dead = cause_of_death(server, 2)
    assert [rank.exitcode for rank in ended] == [0, -9]
    assert not primary, "what the surviving rank reports is no cause"
    assert type(dead) is RankLostError
    assert (dead.where["rank"], dead.where["host"]) == (1, "host-1")
    assert "died while" in dead.what


def test_no_rows_to_train_on_is_an_error_and_no_division_by_zero() -> None:
    table = Table.random(30, classes=3, validated=True)
    all_held_out = table.with_values(VALIDATION, [True] * 30)
    with control_server() as server:
        ended = run_ranks(server, [part.batches() for part in all_held_out.parts(2)], job_for(table))
        failure, _ = server.first_failure()
    assert {rank.error for rank in ended} <= {"ColumnError", "PeerFailure"}  # who is late hears it from the other
    assert failure is not None
    assert failure.what == "there are no rows to train on"


def test_crowded_ranks_are_told_apart_from_chance() -> None:
    table = Table.random(ROWS, classes=3)
    same = table.with_values(KEY, [5] * 350)  # 350 equal rows hash to one rank
    even, crowded = ([part.batches() for part in t.parts(2)] for t in (table, same))
    for partitions, expected in ((even, False), (crowded, True)):
        with control_server() as server:
            ended = run_ranks(server, partitions, job_for(table))
        results = [rank.result for rank in ended]
        assert [r is not None and r.meta.get("imbalanced", False) for r in results] == [expected, expected]
    with control_server() as server:
        ended = run_ranks(server, crowded, replace(job_for(table), max_imbalance=None))
    assert all(rank.result and "imbalanced" not in rank.result.meta for rank in ended)


def test_a_session_that_was_stopped_is_told_where_pyspark_fails_once_more() -> None:
    again = AttributeError("'NoneType' object has no attribute 'setCallSite'")
    again.__context__ = RuntimeError("Job 3 cancelled because SparkContext was shut down")
    with control_server() as server:
        assert "the Spark session was stopped during the fit" in str(RootCause(watch(server, 2)).explain(again))


_BROKEN = "Traceback (most recent call last):\n  File\nsparktorch.spark.launch.rank_task.StreamBrokenError: no schema\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (_BROKEN, "the rows that Spark sends to a rank broke off: no schema"),
        ("Job 4 cancelled part of cancelled job group mine SQLSTATE: XX", "job was cancelled: part of cancelled job"),
        ("[Errno 111] Connection refused", "the driver's JVM has ended during the job"),
        ("java.lang.OutOfMemoryError: Java heap space", "Spark's JVM has no memory left"),
        ("TaskResultLost (result lost from block manager)", "Spark has lost what a rank returned"),
    ],
)
def test_what_ended_the_job_is_found_in_what_spark_says(message: str, said: str) -> None:
    with control_server() as server:
        found = str(RootCause(watch(server, 2)).explain(RuntimeError(message)))
    assert said in found
