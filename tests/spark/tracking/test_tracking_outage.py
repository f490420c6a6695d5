"""MLflow may be away, slow or back late: a fit goes on as if nothing were, and all of its log arrives once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import mlflow
import pytest
from mlflow.entities import Run
from pyspark.sql import DataFrame

from sparktorch import TorchClassifier
from sparktorch.ml.fit.summary import TrainingSummary
from tests.spark.modules import Slow
from tests.support.mlflow import QUIET, answers
from tests.support.proxy import Proxy, free_port
from tests.support.waiting import until

pytestmark = [*QUIET, pytest.mark.timeout(180), pytest.mark.landing]

Away = Literal["refuse", "stall"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[int]:
    directory, port = tmp_path_factory.mktemp("server"), free_port()
    command = (
        f"{sys.executable} -m mlflow server --host 127.0.0.1 --port {port} --workers 1 "
        f"--backend-store-uri sqlite:///{directory}/mlflow.db --artifacts-destination {directory}/artifacts"
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # six more processes, of no use here
    process = subprocess.Popen(command.split(), cwd=directory, env=environment, start_new_session=True, **quiet)
    try:
        request.getfixturevalue("unlogged")
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), seconds=90, what="the server answers")
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # on a busy machine, it takes its time to end by itself
        process.wait()


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it too
    before, proxy = mlflow.get_tracking_uri(), Proxy(server)
    mlflow.set_tracking_uri(f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
    mlflow.set_tracking_uri(before)


def fit(frame: DataFrame, name: str | None) -> TrainingSummary:
    where = {"mlflowExperiment": "outage", "mlflowRunName": name} if name else {}
    return TorchClassifier(module=Slow, epochs=6, batchSize=128, progress=False, **where).fit(frame).summary


def logged(server: int, name: str) -> list[Run]:
    client = mlflow.MlflowClient(f"http://127.0.0.1:{server}")
    experiment = client.get_experiment_by_name("outage")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    assert len([run for run in found if run.info.run_name == name]) <= 1
    return [run for run in found if run.info.run_name == name and run.info.status == "FINISHED"]


def check_complete(server: int, name: str, summary: TrainingSummary) -> None:
    (run,) = logged(server, name)
    client = mlflow.MlflowClient(f"http://127.0.0.1:{server}")
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in losses] == list(enumerate(summary.objectiveHistory, 1))
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "step_loss")]
    assert len(steps) == len(set(steps)) > 5
    assert run.data.params["epochs"] == "6"
    assert run.inputs.dataset_inputs[0].dataset.digest == summary.fingerprint
    assert [item.path for item in client.list_artifacts(run.info.run_id, "figures")] == ["figures/loss.png"]


@pytest.fixture(scope="module")
def unlogged(frame: DataFrame) -> TrainingSummary:
    return fit(frame, None)


@pytest.mark.parametrize("away", ["refuse", "stall"])  # MLflow's own retries would go on beyond the time limit
def test_a_fit_ends_without_mlflow_and_its_log_follows(
    server: int, proxy: Proxy, unlogged: TrainingSummary, frame: DataFrame, caplog: pytest.LogCaptureFixture, away: Away
) -> None:
    proxy.set(away)
    with caplog.at_level(logging.WARNING):
        summary = fit(frame, away)
    assert summary.objectiveHistory == unlogged.objectiveHistory
    (warning,) = [record for record in caplog.records if record.name == "sparktorch.tracking.async_logger"]
    assert f"http://127.0.0.1:{proxy.port} cannot be reached" in warning.getMessage()
    assert not logged(server, away)

    proxy.set("pass")
    until(lambda: logged(server, away), seconds=60, what="the run is logged")
    check_complete(server, away, summary)


def test_an_outage_in_the_middle_of_a_fit_loses_nothing(server: int, proxy: Proxy, frame: DataFrame) -> None:
    proxy.set("pass")
    name = "middle"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fit, frame, name)
        until(lambda: proxy.taken > 5, seconds=60, what="something is logged")
        before = proxy.taken
        proxy.set("stall")
        until(lambda: proxy.taken > before, seconds=60, what="something is logged")
        proxy.set("pass")
        summary = running.result()
    until(lambda: logged(server, name), seconds=60, what="the run is logged")
    check_complete(server, name, summary)


def test_what_is_left_at_exit_is_tried_once_more(server: int, proxy: Proxy) -> None:
    code = (
        "from sparktorch.tracking.runs import Target; from sparktorch.tracking.async_logger import Outbox\n"
        f"target = Target(name='exit', uri='http://127.0.0.1:{proxy.port}', experiment='outage')\n"
        "outbox = Outbox(target.connect, target.open)\n"
        "outbox.send(lambda client, run: client.set_terminated(run, 'FINISHED'))\n"
        "print(outbox.close(), flush=True)\n"
        "input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    proxy.set("pass")
    _, errors = process.communicate("\n", timeout=60)  # lets it exit
    assert logged(server, "exit"), errors
