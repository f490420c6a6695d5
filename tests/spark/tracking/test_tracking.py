"""A fit is logged to MLflow while it runs: into the active run, a nested one, or one of its own."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import mlflow
import pytest
from mlflow.entities import Run
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame
from sklearn.metrics import confusion_matrix

from sparktorch import TorchClassifier
from sparktorch.errors import ColumnError, RankError
from sparktorch.ml.fit.summary import TrainingSummary
from sparktorch.tracking import load_model
from tests.spark.modules import MLP, Dies, DigitsCNN, Faulty, Slow, Unlogged
from tests.support.mlflow import QUIET

pytestmark = QUIET


def classifier(**params: object) -> TorchClassifier:
    given: dict[str, object] = {"module": MLP, "moduleParams": {"outputs": 3}, "progress": False, "epochs": 3}
    return TorchClassifier(**{**given, **params})  # type: ignore[arg-type]


def runs(store: mlflow.MlflowClient, experiment: str = "tests") -> list[Run]:
    found = store.get_experiment_by_name(experiment)
    return list(store.search_runs([found.experiment_id])) if found else []


def children(store: mlflow.MlflowClient, run: Run) -> list[Run]:
    return list(store.search_runs(["1"], f"tags.mlflow.parentRunId = '{run.info.run_id}'"))


def history(store: mlflow.MlflowClient, run: Run, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in store.get_metric_history(run.info.run_id, metric)]


def files(store: mlflow.MlflowClient, run: Run, folder: str = "") -> list[str]:
    return [item.path for item in store.list_artifacts(run.info.run_id, folder)]


# What is logged


@pytest.fixture(scope="module")
def logged(store: mlflow.MlflowClient, digits: DataFrame) -> tuple[Run, TrainingSummary]:
    with mlflow.start_run() as active:
        cnn = classifier(module=DigitsCNN, moduleParams={}, validationIndicatorCol="held_out", numWorkers=(1, 2))
        summary = cnn.fit(digits).summary
    return store.get_run(active.info.run_id), summary


def test_params_metrics_and_tags_are_in_the_run(
    store: mlflow.MlflowClient, logged: tuple[Run, TrainingSummary]
) -> None:
    run, summary = logged
    assert run.data.params["module"] == "DigitsCNN"
    assert run.data.params["numWorkers"] == "(1, 2)"
    assert run.data.tags["sparktorch.data_digest"] == summary.fingerprint
    assert run.data.tags["sparktorch.ended"] == summary.ended == "all epochs"
    assert run.data.metrics["best.val_loss"] == summary.best["val_loss"]
    assert run.data.metrics["baseline.val_accuracy"] == summary.baseline["val_accuracy"] < 0.2
    assert history(store, run, "loss") == list(enumerate(summary.objectiveHistory, 1))
    steps = [step for step, _ in history(store, run, "step_loss")]
    assert steps == sorted(set(steps))
    assert steps[0] >= 1
    assert steps[-1] <= summary.totalIterations
    for name, seconds in summary.seconds.items():
        assert run.data.metrics[f"seconds.{name}"] == seconds
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0


def test_the_data_set_is_an_input_of_the_run(logged: tuple[Run, TrainingSummary]) -> None:
    run, summary = logged
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.digest == summary.fingerprint
    assert json.loads(given.dataset.profile) == {"num_rows": 1437, "num_validation_rows": 360}
    schema = json.loads(given.dataset.schema)["mlflow_colspec"]
    assert [column["name"] for column in schema] == ["features", "label"]
    assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "train"}


def test_figures_and_environment_are_artifacts(store: mlflow.MlflowClient, logged: tuple[Run, TrainingSummary]) -> None:
    run, _ = logged
    assert files(store, run, "figures") == ["figures/confusion_matrix.png", "figures/loss.png"]
    environment = json.loads(Path(url2pathname(urlparse(run.info.artifact_uri).path), "environment.json").read_text())
    assert environment["spark.master"] == "local[3]"
    assert environment["world_size"] == len(environment["hosts"]) == 2
    assert environment["java"].startswith(("17", "21"))
    assert {"python", "torch", "pyspark", "pyarrow", "mlflow"} <= environment.keys()


def test_the_confusion_matrix_counts_every_validation_row(digits: DataFrame) -> None:
    data = digits.selectExpr("pixels features", "int(label > 4) label", "held_out")
    params: dict[str, Any] = {"module": MLP, "moduleParams": {"inputs": 64}, "loss": "BCEWithLogitsLoss"}
    fitted = classifier(**params, validationIndicatorCol="held_out", weightCol=None, numWorkers=2)
    model = fitted.fit(data)
    scored = model.transform(data.where("held_out")).select("label", "prediction").toPandas()
    expected = confusion_matrix(scored["label"], scored["prediction"], labels=range(2))
    assert model.summary.confusionMatrix == expected.tolist()


def test_epochs_arrive_while_the_fit_runs(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    slow = classifier(module=Slow, moduleParams={}, epochs=20, mlflowRunName="live")
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(slow.fit, frame)
        seen = 0
        while not fit.done():
            (run,) = [run for run in runs(store) if run.info.run_name == "live"] or [None]
            if run is not None and "loss" in run.data.metrics:
                seen = max(seen, len(history(store, run, "loss")))
            time.sleep(0.1)
    assert seen > 5


def test_ranks_neither_import_mlflow_nor_hold_credentials(
    store: mlflow.MlflowClient, frame: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame.count()  # the session was started before there was a credential
    # Workers of its own: those of tests before this one may have scored with MLflow.
    monkeypatch.setitem(frame.sparkSession.sparkContext.environment, "SPARKTORCH_TEST_WORKERS", "fresh")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    with mlflow.start_run() as active:
        classifier(module=Unlogged, moduleParams={"outputs": 3}, numWorkers=2).fit(frame)
    assert history(store, active, "loss")


def test_a_failed_fit_says_so_in_its_run(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    planted = "transform(features, x -> if(target > 4, 2e6f, x)) features"
    two_classes = frame.selectExpr(planted, "int(label = 1) label")
    faulty = classifier(module=Faulty, moduleParams={}, loss="BCEWithLogitsLoss")
    with mlflow.start_run() as active:
        with pytest.raises(RankError):
            faulty.fit(two_classes)
        with pytest.raises(RankError):
            faulty.fit(two_classes)
    (child,) = children(store, active)
    for run in (store.get_run(active.info.run_id), child):
        assert "planted row" in run.data.tags["sparktorch.error"]
    assert child.info.status == "FAILED"
    assert store.get_run(active.info.run_id).info.status == "FINISHED"  # the caller's own run is the caller's


def test_a_fit_that_is_refused_before_its_job_says_so_in_its_run_and_leaves_it_to_the_next(
    store: mlflow.MlflowClient, frame: DataFrame
) -> None:
    with mlflow.start_run() as active:
        with pytest.raises(ColumnError):
            classifier(featuresCol="fetures").fit(frame)
        refused = store.get_run(active.info.run_id)
        classifier(epochs=1).fit(frame)
    assert "fetures" in refused.data.tags["sparktorch.error"]
    assert not refused.data.params
    run = store.get_run(active.info.run_id)
    assert "sparktorch.error" not in run.data.tags
    assert (run.data.params["featuresCol"], run.data.params["epochs"]) == ("features", "1")
    assert history(store, active, "loss")
    assert not children(store, active)
    with pytest.raises(ColumnError):
        classifier(featuresCol="fetures", mlflowRunName="refused").fit(frame)
    (own,) = [run for run in runs(store) if run.info.run_name == "refused"]
    assert (own.info.status, own.data.params["featuresCol"]) == ("FAILED", "fetures")


def test_a_param_that_the_run_has_with_another_value_keeps_it_and_the_others_are_logged(
    store: mlflow.MlflowClient, frame: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run() as active, caplog.at_level(logging.WARNING):
        mlflow.log_param("epochs", "many")
        mlflow.log_param("batchSize", "256")
        classifier(epochs=1).fit(frame)
    found = store.get_run(active.info.run_id).data.params
    assert (found["epochs"], found["batchSize"], found["numWorkers"]) == ("many", "256", "1")
    assert "other values of epochs already" in caplog.text


def test_a_restarted_fit_goes_on_in_its_run_and_logs_nothing_twice(
    store: mlflow.MlflowClient, frame: DataFrame, tmp_path: Path
) -> None:
    before = len(runs(store))
    killer = Dies(tmp_path / "killed", rank=1, step=11)  # in the third epoch, which then begins again
    restarting = {"checkpointDir": str(tmp_path / "checkpoints"), "maxRestarts": 1, "callbacks": [killer]}
    slow = {"module": Slow, "moduleParams": {"seconds": 0.1}, "epochs": 4, "numWorkers": 2}
    with mlflow.start_run() as active:
        summary = classifier(**slow, **restarting).fit(frame).summary
    assert (tmp_path / "killed").read_text() == "x"
    assert len(runs(store)) == before + 1
    run = store.get_run(active.info.run_id)
    assert history(store, run, "loss") == list(enumerate(summary.objectiveHistory, 1))
    steps = [step for step, _ in history(store, run, "step_loss")]
    assert steps == sorted(set(steps))
    assert steps
    assert "sparktorch.error" not in run.data.tags
    assert run.info.status == "FINISHED"


# Where it is logged


def test_a_named_fit_and_the_second_one_in_a_run_have_nested_runs_of_their_own(
    store: mlflow.MlflowClient, frame: DataFrame
) -> None:
    with mlflow.start_run() as active:
        classifier(mlflowRunName="mine").fit(frame)
        assert not store.get_run(active.info.run_id).data.params
        classifier(epochs=1).fit(frame)
        classifier(epochs=2).fit(frame)
    second, named = children(store, active)
    assert (named.info.run_name, second.data.params["epochs"]) == ("mine", "2")
    assert second.info.status == "FINISHED"
    assert store.get_run(active.info.run_id).data.params["epochs"] == "1"


def test_params_start_a_run_of_its_own(store: mlflow.MlflowClient, frame: DataFrame, tmp_path: Path) -> None:
    store.create_experiment("new", artifact_location=tmp_path.as_uri())
    classifier(mlflowExperiment="new", mlflowRunName="mine").fit(frame)
    classifier(mlflowExperiment="new").fit(frame)
    named, other = sorted(runs(store, "new"), key=lambda run: run.info.start_time)
    assert named.info.run_name == "mine"
    assert named.info.status == other.info.status == "FINISHED"
    assert named.data.metrics.keys() >= {"loss", "step_loss"}
    assert mlflow.active_run() is None


def test_a_search_has_a_nested_run_for_each_fit(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    tuned = classifier(epochs=1)
    grid = ParamGridBuilder().addGrid(tuned.learningRate, [1e-3, 1e-2]).build()
    evaluator = MulticlassClassificationEvaluator()
    search = TrainValidationSplit(
        estimator=Pipeline(stages=[tuned]), estimatorParamMaps=grid, evaluator=evaluator, parallelism=2, seed=3
    )
    with mlflow.start_run() as active:
        search.fit(frame)
    nested = children(store, active)
    assert len(nested) == 3
    assert {run.data.params["learningRate"] for run in nested} == {"0.001", "0.01"}
    assert {run.info.status for run in nested} == {"FINISHED"}
    assert all(len(history(store, run, "loss")) == 1 for run in nested)
    assert not store.get_run(active.info.run_id).data.params


# Beside MLflow's autologging


@pytest.fixture
def autolog(store: mlflow.MlflowClient) -> Any:
    yield mlflow.pyspark.ml.autolog
    mlflow.pyspark.ml.autolog(disable=True)


def test_autologging_logs_a_fit_once_with_its_model(
    store: mlflow.MlflowClient, frame: DataFrame, autolog: Any, caplog: pytest.LogCaptureFixture
) -> None:
    autolog(extra_tags={"team": "a"})
    before = {run.info.run_id for run in runs(store)}
    model = classifier().fit(frame)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (run,) = [run for run in runs(store) if run.info.run_id not in before]
    assert run.data.tags["team"] == "a"
    assert run.data.params["module"] == "MLP"
    assert len(history(store, run, "loss")) == 3
    (logged,) = store.search_logged_models(["1"], filter_string=f"source_run_id = '{run.info.run_id}'")
    loaded = load_model(logged.model_uri)
    assert loaded.module.body[0].weight.tolist() == model.module.body[0].weight.tolist()
    MulticlassClassificationEvaluator(metricName="accuracy").evaluate(model.transform(frame))
    assert any(name.startswith("accuracy") for name in store.get_run(run.info.run_id).data.metrics)


def test_autologging_without_models_or_switched_off_is_respected(
    store: mlflow.MlflowClient, frame: DataFrame, autolog: Any
) -> None:
    autolog(log_models=False, log_datasets=False)
    with mlflow.start_run() as active:
        classifier().fit(frame)
    assert history(store, active, "loss")
    assert not store.search_logged_models(["1"], filter_string=f"source_run_id = '{active.info.run_id}'")
    assert not store.get_run(active.info.run_id).inputs.dataset_inputs
    autolog(disable=True)
    before = len(runs(store))
    classifier().fit(frame)
    assert len(runs(store)) == before


def test_autologging_of_a_search_has_the_fits_nested_and_one_model(
    store: mlflow.MlflowClient, frame: DataFrame, autolog: Any
) -> None:
    autolog()
    before = {run.info.run_id for run in runs(store)}
    tuned = classifier(epochs=1)
    grid = ParamGridBuilder().addGrid(tuned.learningRate, [1e-2]).build()
    evaluator = MulticlassClassificationEvaluator()
    CrossValidator(estimator=tuned, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2).fit(frame)
    new = [run for run in runs(store) if run.info.run_id not in before]
    (outer,) = [run for run in new if "mlflow.parentRunId" not in run.data.tags]
    fits = [run for run in children(store, outer) if "sparktorch.estimator" in run.data.tags]
    assert len(fits) == 3
    assert len(new) == 5  # and MLflow's own, with the mean over the folds
    ids = ", ".join(f"'{run.info.run_id}'" for run in fits)
    assert len(store.search_logged_models(["1"], filter_string=f"source_run_id IN ({ids})")) == 1


def test_autologging_of_a_pipeline_has_the_fit_nested(
    store: mlflow.MlflowClient, frame: DataFrame, autolog: Any
) -> None:
    autolog()
    before = {run.info.run_id for run in runs(store)}
    Pipeline(stages=[classifier()]).fit(frame)
    outer, inner = sorted(
        (run for run in runs(store) if run.info.run_id not in before), key=lambda run: run.info.start_time
    )
    assert inner.data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert inner.data.params["module"] == "MLP"
    assert store.search_logged_models(["1"], filter_string=f"source_run_id = '{inner.info.run_id}'")
