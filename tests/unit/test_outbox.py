"""What a fit logs is delivered in order and once, whatever MLflow does meanwhile; a fit never waits for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from sparktorch.tracking.outbox import Outbox, Sample
from sparktorch.tracking.runs import Target
from tests.support.mlflow import QUIET

pytestmark = QUIET


class Client:
    """Remembers what reached it."""

    tracking_uri = "memory"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        self.heard.append([metric.step for metric in metrics])

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.heard.append(name)


def outbox(client: Any, run_id: str | None = "run") -> Outbox:
    return Outbox(lambda: cast(Any, client), lambda _: run_id)


def samples(count: int) -> list[Sample]:
    return [Sample("loss", 0.5, 0, step) for step in range(count)]


def test_what_has_come_together_goes_in_order_and_in_batches() -> None:
    client, ready = Client(), threading.Event()
    box = Outbox(lambda: cast(Any, client), lambda _: ready.wait() and "run")
    box.metrics(samples(1500))
    box.send(lambda found, run: found.set_tag(run, "between", ""))
    box.metrics(samples(2))
    box.metrics(samples(1))
    assert not client.heard
    ready.set()
    assert box.close()
    assert client.heard == [list(range(1000)), list(range(1000, 1500)), "between", [0, 1, 0]]
    assert box.run_id == "run"


def test_what_mlflow_refuses_is_warned_about_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def refused(client: Any, run_id: str) -> None:
        raise MlflowException("Param 'epochs' has another value", error_code=INVALID_PARAMETER_VALUE)

    client = Client()
    with caplog.at_level(logging.WARNING):
        box = outbox(client)
        box.send(refused)
        box.metrics(samples(1))
        assert box.close()
    assert client.heard == [[0]]
    assert "MLflow at memory refused a part of what this fit logs" in caplog.text
    assert "Param 'epochs'" in caplog.text


def test_what_fails_in_passing_is_tried_again_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    client, failures = Client(), iter([ConnectionError("reset"), MlflowException("busy")])

    def flaky(found: Any, run_id: str) -> None:
        for failure in failures:
            raise failure
        found.set_tag(run_id, "arrived", "")

    with caplog.at_level(logging.WARNING):
        box = outbox(client)
        box.send(flaky)
        while not box.close():
            pass
    assert client.heard == ["arrived"]
    assert [record.getMessage() for record in caplog.records] == [
        "MLflow at memory cannot be reached (ConnectionError: reset): the fit goes on, its log follows later"
    ]


def test_without_a_run_everything_is_dropped() -> None:
    client = Client()
    box = outbox(client, run_id=None)
    box.metrics(samples(3))
    assert box.close()
    assert client.heard == []


def test_a_run_that_cannot_be_made_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    def forbidden(client: Any) -> str:
        raise PermissionError("no")

    with caplog.at_level(logging.WARNING):
        assert Outbox(lambda: cast(Any, Client()), forbidden).close()
    assert "this fit is not logged to MLflow at memory (PermissionError: no)" in caplog.text


class Store:
    """Runs and experiments in memory; the answer to the first request to make either gets lost."""

    def __init__(self) -> None:
        self.runs: list[dict[str, str]] = []
        self.experiments: dict[str, str] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = "7"
        raise MlflowException("made by another fit meanwhile")

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
        return [run for run in map(_run, range(len(self.runs))) if self.runs[0]["sparktorch.fit"] in query]

    def create_run(self, experiment: str, *, start_time: int, run_name: str, tags: dict[str, str]) -> Any:
        self.runs.append(tags)
        raise ConnectionError("lost")


def _run(number: int) -> Any:
    return SimpleNamespace(info=SimpleNamespace(run_id=f"run {number}"))


def test_a_run_whose_making_was_not_confirmed_is_not_made_again() -> None:
    store, target = cast(Any, Store()), Target(name="fit", experiment="new")
    with pytest.raises(ConnectionError):
        target.open(store)
    assert target.open(store) == "run 0"
    assert len(store.runs) == 1


def test_outside_of_mlflow_it_is_not_even_imported() -> None:
    code = (
        "import sys; from sparktorch import TorchClassifier; from sparktorch.ml.events import Fit\n"
        "from sparktorch.tracking.listener import listener_for\n"
        "copy = TorchClassifier().copy()\n"
        "assert listener_for(Fit(estimator=copy, columns=None, spark=None)) is None\n"
        "print({'mlflow', 'matplotlib', 'sklearn', 'requests'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr
