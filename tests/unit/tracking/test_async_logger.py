"""What a fit logs is delivered in order and once, whatever MLflow does meanwhile; a fit never waits for it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.utils.request_utils import augmented_raise_for_status
from mlflow.utils.rest_utils import verify_rest_response
from mlflow.utils.validation import _validate_metric

from sparktorch.data.columns import Columns, DType, TensorSpec
from sparktorch.ml.scoring.figures import loss_curve
from sparktorch.tracking import async_logger
from sparktorch.tracking.async_logger import Outbox, Sample
from sparktorch.tracking.listener import MLflowListener, data_set
from sparktorch.tracking.runs import Target
from tests.support.mlflow import QUIET
from tests.support.waiting import until

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
    def refused(what: str, client: Any, run_id: str) -> None:
        raise MlflowException(f"{what} has another value", error_code=INVALID_PARAMETER_VALUE)

    client = Client()
    with caplog.at_level(logging.WARNING):
        box = outbox(client)
        for what in ("Param 'epochs'", "Param 'seed'", "Param 'seed'"):
            box.send(partial(refused, what))
        box.metrics(samples(1))
        assert box.close()
    assert client.heard == [[0]]
    warnings = [record.getMessage() for record in caplog.records]
    assert all(text.startswith("MLflow at memory refused a part of what this fit logs") for text in warnings)
    assert ["epochs" in text for text in warnings] == [True, False]  # each refusal, and the same one once


def test_a_metric_that_mlflow_refuses_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    class Strict(Client):
        def log_batch(self, run_id: str, metrics: list[Any]) -> None:
            for metric in metrics:
                _validate_metric(metric.key, metric.value, metric.timestamp, metric.step)
            heard.extend(metric.key for metric in metrics)

    with caplog.at_level(logging.WARNING):
        box = outbox(Strict())
        for step in range(3):
            box.metrics(Sample(name, 0.5, 0, step) for name in ("loss", "top@5", "val_loss"))
        until(lambda: len(heard) == 6, seconds=5, what="the others are logged")
        box.metrics([Sample("top@5", 0.5, 0, 3)])
        assert box.close()
    assert sorted(set(heard)) == ["loss", "val_loss"]
    assert ["top@5" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("status", "attempts"), [(403, 1), (429, 3), (503, 3)])
def test_an_answer_that_would_repeat_is_not_asked_for_again(
    status: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_logger, "_MOST_REFUSALS", 3)
    answer = requests.Response()
    answer.status_code, answer._content, tried = status, b"<html>", list[str]()

    def of_artifacts(client: Any, run_id: str) -> None:
        tried.append("artifacts")
        augmented_raise_for_status(answer)

    def of_tracking(client: Any, run_id: str) -> None:
        tried.append("tracking")
        verify_rest_response(answer, "/api/2.0/mlflow/runs/log-batch")

    client = Client()
    box = outbox(client)
    box._urged.wait = lambda seconds: None  # type: ignore[method-assign, assignment]
    for request in (of_artifacts, of_tracking):
        box.send(request)
    box.send(lambda found, run: found.set_tag(run, "ended", ""))
    while not box.close():
        pass
    assert tried == ["artifacts"] * attempts + ["tracking"] * attempts
    assert client.heard == ["ended"]


def test_a_fit_waits_for_a_slow_mlflow_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    client, probed = Client(), list[str]()
    box = outbox(client)

    def slow(found: Any, run_id: str) -> None:
        time.sleep(0.15)
        found.set_tag(run_id, "sent", "")

    for _ in range(4):
        box.send(slow)
    assert box.close(seconds=0.05)
    assert client.heard == ["sent"] * 4
    until(lambda: box not in async_logger._open, seconds=5, what="the thread has ended")
    hung, probe = threading.Event(), async_logger._probe
    box = outbox(client)
    box.send(lambda found, run: hung.wait())
    until(lambda: len(box) == 1 and not box._queue, seconds=5, what="the request is on its way")

    def gone(uri: str) -> None:
        probed.append(uri)
        raise ConnectionError

    monkeypatch.setattr(async_logger, "_probe", gone)
    assert not box.close(seconds=0.05)
    assert probed == ["memory"]
    monkeypatch.setattr(async_logger, "_probe", probe)
    hung.set()
    assert box.close()


def test_the_queue_of_an_outage_keeps_what_is_no_metric_and_the_latest_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_logger, "_MOST_WAITING", 10)
    client, back = Client(), threading.Event()
    box = Outbox(lambda: cast(Any, client), lambda _: back.wait() and "run")
    box.send(lambda found, run: found.set_tag(run, "Params", ""))
    for value in samples(25):
        box.metrics([value])
    box.send(lambda found, run: found.set_tag(run, "ended", ""))
    assert len(box) == 12
    back.set()
    assert box.close()
    assert client.heard == ["Params", list(range(15, 25)), "ended"]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "only the latest 10 are kept" in warning


def test_the_data_set_knows_columns_of_every_type() -> None:
    dtypes = get_args(DType)
    tensors = [TensorSpec(name=f"x{i}", column=f"c{i}", dtype=dtype) for i, dtype in enumerate(dtypes)]
    packed = TensorSpec(name="p", column="a ... b", dtype="int64", shape=(2,), sources=("a", "b"))
    raw = TensorSpec(name="r", column="bytes", dtype="uint8", shape=(4,), kind="binary", layout="raw")
    columns = Columns(inputs=(*[t for t in tensors if t.dtype not in ("uint8", "float16")], packed, raw))
    summary = cast(Any, SimpleNamespace(rows=1, validationRows=0, fingerprint="0" * 16))
    schema = json.loads(data_set(columns, summary).dataset.schema)["mlflow_colspec"]
    assert [column["name"] for column in schema][-3:] == ["a", "b", "bytes"]


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
        "import sys; from sparktorch import TorchClassifier; from sparktorch.ml.fit.listeners import Fit\n"
        "from sparktorch.tracking.listener import listener_for\n"
        "copy = TorchClassifier().copy()\n"
        "assert listener_for(Fit(estimator=copy, spark=None)) is None\n"
        "print({'mlflow', 'matplotlib', 'sklearn', 'requests'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr


class Box:
    """Keeps the metrics that would be sent."""

    def __init__(self) -> None:
        self.sent: set[tuple[str, float, int]] = set()

    def metrics(self, samples: Iterable[Sample]) -> None:
        self.sent |= {(sample.name, sample.value, sample.step) for sample in samples}


def test_validations_are_logged_at_their_steps_and_epochs_at_their_numbers() -> None:
    listener, box = object.__new__(MLflowListener), Box()
    listener._outbox, listener._names = cast(Any, box), {}
    validations = [{"step": 12, "val_loss": 0.5}, {"step": 14, "val_loss": 0.25}]
    listener.epoch({"epoch": 2, "loss": 0.75, "val_loss": 0.25, "steps": 7, "validations": validations})
    assert box.sent == {
        ("step_val_loss", 0.5, 12),
        ("step_val_loss", 0.25, 14),
        ("loss", 0.75, 2),
        ("val_loss", 0.25, 2),
    }


def test_a_metric_has_a_name_of_its_own_that_mlflow_takes_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, box = object.__new__(MLflowListener), Box()
    listener._outbox, listener._names = cast(Any, box), {}
    for epoch in (1, 2):
        listener.epoch({"epoch": epoch, "loss": 0.75, "top@5": 0.5, "top#5": 0.25})
    values = {"loss": 0.75, "top_5": 0.5, "top_5_": 0.25}
    assert box.sent == {(name, value, epoch) for name, value in values.items() for epoch in (1, 2)}
    told = [record.getMessage().split(", which")[0] for record in caplog.records]
    assert told == ["the metric 'top@5' is 'top_5' in MLflow", "the metric 'top#5' is 'top_5_' in MLflow"]


def test_the_curve_of_the_validation_shows_the_epochs_that_had_one() -> None:
    history = [{"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0, "val_loss": 2.5}, {"epoch": 3, "loss": 1.0}]
    training, validation = loss_curve(cast(Any, history)).axes[0].lines
    assert [list(map(float, cast(Any, data))) for data in training.get_data()] == [[1, 2, 3], [3, 2, 1]]
    assert [list(map(float, cast(Any, data))) for data in validation.get_data()] == [[2], [2.5]]
    for epochs in (1, 3):
        ticks = loss_curve(cast(Any, history[:epochs])).axes[0].get_xticks()
        assert all(float(tick).is_integer() for tick in ticks), "an epoch is a whole number"
