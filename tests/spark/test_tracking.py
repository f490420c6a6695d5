"""A fit inside an MLflow run is logged live, and its model comes back from the store as it went in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame

from sparktorch import TorchClassifier
from sparktorch.errors import PersistenceError, RankError
from sparktorch.tracking import load_model, log_model
from tests.spark.modules import MLP, Faulty

pytestmark = [
    # MLflow's SQLAlchemy store leaves its connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <sqlite3:pytest.PytestUnraisableExceptionWarning"),
    # MLflow warns about its own type hints when mlflow.pyfunc is imported.
    pytest.mark.filterwarnings("ignore:.*is inferred as AnyType:UserWarning"),
    # MLflow 3.17 against the pydantic, SQLAlchemy and Alembic of today.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def classifier(**params: object) -> TorchClassifier:
    given: dict[str, object] = {"module": MLP, "moduleParams": {"outputs": 3}, "progress": False, "epochs": 3}
    return TorchClassifier(**{**given, **params})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mlflow.MlflowClient]:
    directory = tmp_path_factory.mktemp("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
    mlflow.create_experiment("tests", artifact_location=(directory / "artifacts").as_uri())
    mlflow.set_experiment("tests")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


def test_params_epochs_and_digest_are_in_the_run(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    with mlflow.start_run() as run:
        model = classifier(numWorkers=2).fit(frame)
    data = store.get_run(run.info.run_id).data
    assert data.params["module"] == "MLP"
    assert data.params["numWorkers"] == "2"
    assert data.tags["sparktorch.data_digest"] == model.summary.fingerprint
    losses = store.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == list(enumerate(model.summary.objectiveHistory, 1))


def test_outside_of_a_run_nothing_is_logged(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    before = len(store.search_runs(["1"]))
    classifier().fit(frame)
    assert len(store.search_runs(["1"])) == before


def test_a_second_fit_in_a_run_has_a_nested_run_of_its_own(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    with mlflow.start_run() as run:
        classifier(epochs=1).fit(frame)
        classifier(epochs=2).fit(frame)
    children = store.search_runs(["1"], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert [child.data.params["epochs"] for child in children] == ["2"]
    assert children[0].info.status == "FINISHED"
    assert store.get_run(run.info.run_id).data.params["epochs"] == "1"


def test_a_failed_fit_says_so_in_its_run(store: mlflow.MlflowClient, frame: DataFrame) -> None:
    planted = "transform(features, x -> if(target > 4, 2e6f, x)) features"
    two_classes = frame.selectExpr(planted, "int(label = 1) label")
    with mlflow.start_run() as run, pytest.raises(RankError):
        classifier(module=Faulty, moduleParams={}, loss="BCEWithLogitsLoss").fit(two_classes)
    assert "planted row" in store.get_run(run.info.run_id).data.tags["sparktorch.error"]


def test_a_logged_model_loads_as_spark_model_and_as_pyfunc(
    store: mlflow.MlflowClient, frame: DataFrame, table: pd.DataFrame
) -> None:
    model = classifier().fit(frame)
    with mlflow.start_run():
        info = log_model(model, registered_model_name="tests")
    store.set_registered_model_alias("tests", "champion", info.registered_model_version)

    loaded = load_model("models:/tests@champion")
    expected = model.transform(frame).orderBy("target").collect()
    assert loaded.transform(frame).orderBy("target").collect() == expected

    pyfunc = mlflow.pyfunc.load_model(info.model_uri)
    scored = pyfunc.predict(table[["features"]])
    assert list(scored.columns) == ["rawPrediction", "probability", "prediction"]
    by_target = scored.assign(target=table["target"]).sort_values("target", kind="stable")
    assert by_target["prediction"].tolist() == [row["prediction"] for row in expected]
    np.testing.assert_allclose(
        np.stack(by_target["probability"].tolist()), [row["probability"].toArray() for row in expected], atol=1e-6
    )


def test_a_module_of_this_session_is_logged_as_pickle_only_on_request(
    store: mlflow.MlflowClient, frame: DataFrame
) -> None:
    class Local(MLP):
        pass

    model = classifier(module=Local).fit(frame)
    with mlflow.start_run():
        with pytest.raises(PersistenceError, match="allow_pickle=True"):
            log_model(model)
        info = log_model(model, allow_pickle=True)
    with pytest.raises(PersistenceError, match="loading a pickle"):
        load_model(info.model_uri)
    assert load_model(info.model_uri, allow_pickle=True).uid == model.uid


def test_code_beside_the_module_travels_with_the_model(
    store: mlflow.MlflowClient, frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_net.py").write_text("from tests.spark.modules import MLP\n\nclass Net(MLP):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # Executors would get the file with --py-files; here the driver alone is looked at.
    from users_net import Net

    model = classifier(module=MLP).fit(frame)
    model._trained = model.trained.__class__(**{**vars(model.trained), "source": Net})
    with mlflow.start_run():
        info = log_model(model)
    files = [item.path for item in store.list_logged_model_artifacts(info.model_id, "code")]
    assert files == ["code/users_net.py"]
