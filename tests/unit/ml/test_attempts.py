"""How many workers an attempt of a fit gets, and when it makes way for another one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparktorch import TorchRegressor
from sparktorch.errors import ClusterError, RankError, RankLostError
from sparktorch.ml.fit import attempts
from sparktorch.ml.fit.listeners import AttemptLog
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.spark.checks import preflight
from sparktorch.spark.launch import spark_job
from sparktorch.worker import TrainJob


class Cluster:
    """Slots that come and go as time passes, which it does by sleeping alone."""

    def __init__(self, **settings: str) -> None:
        self.now, self.slots, self.later = 1e6, 0, dict[float, int]()
        self.executors, self.leaves = frozenset({"0"}), False
        self.spark: Any = SimpleNamespace(
            conf={"spark.master": "spark://host:7077", "spark.decommission.enabled": "true", **settings},
            sparkContext=SimpleNamespace(startTime=0),
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.later if at <= self.now - 1e6]:
            self.slots = self.later.pop(at)

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """An old session on a Standalone cluster, whose settings promise nothing."""
    made = Cluster()
    for module in (attempts, preflight):
        monkeypatch.setattr(module, "time", made)
        monkeypatch.setattr(module, "slots", lambda *_: made.slots)
    monkeypatch.setattr(attempts, "other_tasks", lambda *_, **__: 0)
    monkeypatch.setattr(attempts, "executor_ids", lambda *_: made.executors)
    monkeypatch.setattr(attempts, "is_leaving", lambda *_: made.leaves)
    return made


def request(**params: Any) -> Request[TrainJob]:
    values = {"module": "torch.nn:Linear", "checkpointDir": "/tmp/checkpoints", **params}
    return translate(TorchRegressor(**values), "regression")


def outlook(cluster: Cluster, asked: Request[TrainJob]) -> Callable[[], list[bool]]:
    """Returns what tells whether a second of looks at the cluster ends an attempt."""
    pauses = attempts._Outlook(cluster.spark, asked, ())

    def looks() -> list[bool]:
        cluster.sleep(1.0)
        return [pauses("tag"), pauses("tag")]

    return looks


def ended(*, paused: bool) -> Any:
    return [({"paused": paused}, b"")]


def test_a_fit_that_begins_with_few_workers_gets_the_most_in_the_end(cluster: Cluster) -> None:
    cluster.slots, sizes = 2, list[int]()

    def run(now: Request[TrainJob]) -> Any:
        sizes.append(now.launch.world_size)
        cluster.slots = 4
        return ended(paused=len(sizes) == 1)

    begun = attempts.with_slots(cluster.spark, request(numWorkers=(2, 4)))
    attempts.with_restarts(cluster.spark, begun, run, AttemptLog())
    assert sizes == [2, 4]


@pytest.mark.parametrize("has_trained", [False, True])
def test_workers_that_cannot_begin_are_let_go_and_the_fit_goes_on_without_them(
    has_trained: bool, cluster: Cluster
) -> None:
    cluster.slots, sizes, log = 2, list[int](), AttemptLog()

    def run(now: Request[TrainJob]) -> Any:
        sizes.append(now.launch.world_size)
        cluster.slots = 4
        if len(sizes) != 2:
            return ended(paused=len(sizes) == 1)
        if has_trained:
            now.launch.asks_to_pause("tag")
        raise ClusterError("no package there", hint="install it")

    begun = attempts.with_slots(cluster.spark, request(numWorkers=(2, 4)))
    if has_trained:
        with pytest.raises(ClusterError, match="no package there"):
            attempts.with_restarts(cluster.spark, begun, run, log)
    else:
        attempts.with_restarts(cluster.spark, begun, run, log)
        assert [each["why"] for each in log.records(0)] == ["", "no package there", ""]
    assert sizes == ([2, 4] if has_trained else [2, 4, 2])


@pytest.mark.parametrize(
    ("error", "times"), [(RankLostError("rank 0 died"), 3), (RankError("ValueError: on purpose"), 1)]
)
def test_lost_ranks_are_tried_again_so_often_and_exceptions_of_the_users_never(
    cluster: Cluster, error: RankError, times: int
) -> None:
    cluster.slots, tries = 2, list[Any]()

    def run(now: Request[TrainJob]) -> Any:
        tries.append(now.job.checkpoint)
        raise error

    begun = attempts.with_slots(cluster.spark, request(numWorkers=2, maxRestarts=2))
    with pytest.raises(RankError) as raised:
        attempts.with_restarts(cluster.spark, begun, run, AttemptLog())
    assert raised.value is error
    assert [each.restart for each in tries] == list(range(times))


def test_a_fit_that_was_paused_waits_for_the_slots_that_it_needs(cluster: Cluster) -> None:
    cluster.slots, cluster.later = 1, {1000.0: 2}
    begun = request(numWorkers=2)
    assert attempts.with_slots(cluster.spark, begun, ["before"], paused=True).launch.world_size == 2
    cluster.slots, cluster.later, until = 0, {}, cluster.now + 3600
    with pytest.raises(ClusterError):
        attempts.with_slots(cluster.spark, begun, ["before"], paused=True)
    assert until < cluster.now < until + 3700


@pytest.mark.parametrize(("folder", "workers"), [(None, 8), ("/tmp/checkpoints", 2)])
def test_a_fit_that_cannot_grow_begins_with_the_slots_that_the_settings_promise(
    folder: str | None, workers: int, cluster: Cluster
) -> None:
    cluster.spark.conf |= {"spark.master": "yarn", "spark.executor.instances": "8"}
    cluster.slots, cluster.later = 2, {30.0: 8}
    begun = attempts.with_slots(cluster.spark, request(numWorkers=8, minWorkers=2, checkpointDir=folder))
    assert begun.launch.world_size == workers


def test_a_fit_grows_once_it_has_trained_for_a_while_and_whoever_asks_again_hears_the_same(cluster: Cluster) -> None:
    cluster.slots = 4
    asked = request(numWorkers=(2, 4), growAfter=60.0).with_launch(world_size=2)
    looks = outlook(cluster, asked)
    cluster.sleep(1000.0)  # in which ranks read
    found = [looks() for _ in range(70)]
    assert found[:60] == [[False, False]] * 60
    assert found[-1] == [True, True]


def test_a_fit_does_not_grow_while_another_one_waits_for_slots(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.slots = 4
    waiting = SimpleNamespace(tag="other", running_tasks=lambda: 0)
    monkeypatch.setattr(spark_job, "_jobs", [waiting, SimpleNamespace(tag="tag", running_tasks=lambda: 0)])
    looks = outlook(cluster, request(numWorkers=(2, 4), growAfter=1.0).with_launch(world_size=2))
    assert not any(looks()[0] for _ in range(10))
    waiting.running_tasks = lambda: 4
    assert any(looks()[0] for _ in range(10))


def test_an_executor_that_is_to_go_is_seen_though_another_one_takes_its_place_at_once(cluster: Cluster) -> None:
    cluster.slots = 2
    looks = outlook(cluster, request(numWorkers=2))
    assert not any(looks()[0] for _ in range(10))
    cluster.leaves, cluster.executors = True, frozenset({"0", "1"})
    assert looks() == [True, True]


def test_an_executor_that_is_to_go_is_seen_though_spark_tells_of_its_tasks_long_after_the_change(
    cluster: Cluster,
) -> None:
    cluster.slots = 2
    looks = outlook(cluster, request(numWorkers=2))
    cluster.executors = frozenset({"0", "1"})
    assert not any(looks()[0] for _ in range(14))
    cluster.leaves = True
    assert any(looks()[0] for _ in range(10))


def test_an_executor_that_is_to_go_before_the_ranks_train_is_seen(cluster: Cluster) -> None:
    cluster.slots, cluster.leaves = 2, True
    assert outlook(cluster, request(numWorkers=2))() == [True, True]


def test_a_cluster_that_does_not_answer_is_told_of_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempts, "is_leaving", lambda *_: 1 / 0)
    looks = outlook(cluster, request(numWorkers=2))
    with caplog.at_level(logging.WARNING):
        assert [looks() for _ in range(3)] == [[False, False]] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_fit_begins_before_what_it_learns_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Learns(TorchRegressor):
        def _learn_from(self, dataset: Any) -> Any:
            learned.append(time.perf_counter())
            return self, dataset

        def _fit_on(self, source: Any, judge: Any = None) -> Any:
            return source

    learned: list[float] = []
    monkeypatch.setattr("sparktorch.ml.estimator._checked", lambda dataset: dataset)
    rows: Any = object()
    assert Learns()._fit(rows).began < learned[0]  # type: ignore[attr-defined]
