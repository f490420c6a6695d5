"""For how long a session's slots are waited for."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from sparktorch.distributed.store import allow_connections
from sparktorch.errors import ClusterError
from sparktorch.spark.checks import preflight


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 1e9

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.mark.parametrize(
    ("settings", "age", "seconds"),
    [
        ({"spark.master": "yarn"}, 5, 55),
        ({"spark.master": "yarn"}, 3600, 2),
        ({"spark.master": "yarn", "spark.executor.instances": "3"}, 3600, 600),
        ({"spark.master": "yarn", "spark.executor.instances": "2"}, 5, 2),
        ({"spark.master": "spark://host:7077"}, 5, 55),
        ({"spark.master": "spark://host:7077"}, 3600, 2),
        ({"spark.master": "spark://host:7077", "spark.cores.max": "3"}, 5, 55),
        ({"spark.master": "spark://host:7077", "spark.cores.max": "2"}, 5, 2),
    ],
)
def test_slots_are_waited_for_as_long_as_the_settings_and_the_age_of_the_session_promise_more(
    settings: dict[str, str], age: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(preflight, "time", clock)
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    context = SimpleNamespace(startTime=(clock.now - age) * 1000)
    spark: Any = SimpleNamespace(conf=settings, sparkContext=context)
    begun = clock.now
    assert preflight.settled_slots(spark, 3, None) == 2
    assert clock.now - begun == pytest.approx(seconds, abs=0.2)


@pytest.mark.parametrize(("ends_after", "found", "seconds"), [(0.5, 2, 0.5), (60, 1, 3), (0, 2, 0)])
def test_in_local_mode_tasks_of_an_attempt_that_has_ended_are_waited_for(
    ends_after: float, found: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(preflight, "time", clock)
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    spark: Any = SimpleNamespace(conf={"spark.master": "local[2]"}, sparkContext=SimpleNamespace(startTime=0))
    begun = clock.now

    def taken() -> int:
        return int(clock.now - begun < ends_after)

    assert preflight.settled_slots(spark, 2, None, settle=3.0, taken=taken) == found
    assert clock.now - begun == pytest.approx(seconds, abs=0.2)


@pytest.mark.parametrize(("most", "named"), [(None, "3"), (3, "3"), (8, r"\(3, 8\)")])
def test_too_few_slots_are_told_with_the_number_of_workers_as_it_was_given(
    most: int | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "slots", lambda *_: 2)
    spark: Any = SimpleNamespace(conf={"spark.master": "local[2]"})
    with pytest.raises(ClusterError, match=f"numWorkers={named}, but the cluster has 2 slots"):
        preflight.check_cluster(spark, 3, most=most)


def test_the_doctor_refuses_the_number_of_ranks_whose_connections_a_fit_refuses() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        assert preflight.descriptors(400).status == "ok"
        found = preflight.descriptors(10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(ClusterError, match="1,000,000,000 ranks need 4,000,000,512 open files") as refused:
        allow_connections(10**9)
    assert (found.status, found.found, found.hint) == ("failure", refused.value.what, refused.value.hint)


def test_a_model_that_the_driver_would_not_take_is_refused() -> None:
    spark: Any = SimpleNamespace(conf={})
    preflight.check_result_size(spark, 2**30)
    with pytest.raises(ClusterError, match=r"the model takes 1.5 GiB, and the driver accepts 1.0 GiB") as caught:
        preflight.check_result_size(spark, 3 * 2**29)
    assert "spark.driver.maxResultSize" in caught.value.hint
