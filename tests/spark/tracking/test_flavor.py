"""A model that was logged to MLflow comes back from the store as it went in."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import requests
import torch
from mlflow.models.model import ModelInfo
from pyspark.sql import DataFrame, SparkSession

import sparktorch
from sparktorch import TorchClassificationModel, TorchClassifier, TorchRegressor
from sparktorch.tracking import load_model, log_model, save_model
from tests.spark.modules import MLP
from tests.spark.scored import sorted_rows
from tests.support.mlflow import QUIET, answer, serving
from tests.support.nets import Mlp

pytestmark = QUIET


def classifier(**params: object) -> TorchClassifier:
    given: dict[str, object] = {"module": MLP, "moduleParams": {"outputs": 3}, "progress": False, "epochs": 3}
    return TorchClassifier(**{**given, **params})  # type: ignore[arg-type]


def test_a_logged_model_loads_as_spark_model_and_as_pyfunc(
    store: mlflow.MlflowClient, frame: DataFrame, table: pd.DataFrame
) -> None:
    model = classifier().fit(frame)
    with mlflow.start_run():
        info = log_model(model, registered_model_name="tests")
    store.set_registered_model_alias("tests", "champion", info.registered_model_version)

    loaded = load_model("models:/tests@champion")
    expected = sorted_rows(model.transform(frame))
    assert sorted_rows(loaded.transform(frame)) == expected

    pyfunc = mlflow.pyfunc.load_model(info.model_uri)
    scored = pyfunc.predict(table[["features"]])
    assert list(scored.columns) == ["rawPrediction", "probability", "prediction"]
    by_target = scored.assign(target=table["target"]).sort_values("target", kind="stable")
    assert by_target["prediction"].tolist() == [row["prediction"] for row in expected]
    np.testing.assert_allclose(
        np.stack(by_target["probability"].tolist()), [row["probability"].toArray() for row in expected], atol=1e-6
    )


@pytest.fixture(scope="module")
def logged(store: mlflow.MlflowClient, frame: DataFrame) -> tuple[TorchClassificationModel, ModelInfo]:
    model = classifier(module=Mlp).fit(frame)  # of a module file that can be imported without pyspark
    with mlflow.start_run():
        return model, log_model(model, extra_pip_requirements=["a-library==1.0"])


def test_the_graph_is_there_for_mlflows_own_pytorch_flavour(
    logged: tuple[TorchClassificationModel, ModelInfo], table: pd.DataFrame
) -> None:
    model, info = logged
    assert info.flavors["pytorch"]["model_data"] == "data"
    graph = mlflow.pytorch.load_model(info.model_uri)
    x = torch.from_numpy(np.stack(table["features"].tolist()))
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model.module(x))


def test_the_logged_model_says_what_it_takes_and_needs(logged: tuple[TorchClassificationModel, ModelInfo]) -> None:
    _, info = logged
    (features,) = info.signature.inputs
    assert (features.name, str(features.type), features.required) == ("features", "Any", True)
    assert info.signature.outputs.input_names() == ["rawPrediction", "probability", "prediction"]
    local = mlflow.artifacts.download_artifacts(info.model_uri)
    example = mlflow.models.Model.load(local).load_input_example(local)
    assert len(mlflow.pyfunc.load_model(local).predict(example)) == 2
    needed = Path(local, "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.partition('+')[0]}" in needed
    assert "a-library==1.0" in needed
    assert not any(line.startswith("pyspark") for line in needed)


def shelves(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    box, books, note = columns["box"], columns["books"], columns["note"]
    pages = [sum(book["pages"] for book in row) for row in books.to_pylist()]
    width = box.field("my-width").to_numpy(zero_copy_only=False)
    names = box.field("name").to_pylist()
    text = [len(value or "") + bool(name) for value, name in zip(note.to_pylist(), names, strict=True)]
    return {"x": torch.from_numpy(np.stack([width, pages, text], 1).astype(np.float32))}


def test_structs_that_a_callable_takes_score_as_dicts_and_as_rows_of_spark(
    store: mlflow.MlflowClient, spark: SparkSession, tmp_path: Path
) -> None:
    data = spark.range(12).selectExpr(
        "named_struct('my-width', cast(id as decimal(9,2)), 'name', if(id % 2 = 0, 'a', null)) as box",
        "array(named_struct('title', 'b', 'pages', cast(id % 3 as int))) as books",
        "if(id % 4 = 1, null, 'c') as note",
        "cast(id as float) as target",
    )
    model = TorchRegressor(
        module="tests.spark.columns:Flat",
        moduleParams={"width": 3},
        inputCols=["box", "books", "note"],
        labelCol="target",
        preprocess=shelves,
        nullPolicy="fill",
        progress=False,
    ).fit(data)
    save_model(model, str(tmp_path / "model"))
    inputs = mlflow.models.Model.load(str(tmp_path / "model")).signature.inputs
    assert {spec.name: str(spec.type) for spec in inputs} == dict.fromkeys(["box", "books", "note"], "Any")
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    rows = data.drop("target").collect()
    table = pd.DataFrame([row.asDict(recursive=True) for row in rows])
    table["box"] = [{**box, "my-width": float(box["my-width"])} for box in table["box"]]
    table["note"] = table["note"].astype(object).where(table["note"].notna(), np.nan)  # as pandas reads a missing one
    expected = [row["prediction"] for row in model.transform(data).collect()]
    np.testing.assert_allclose(served.predict(table)["prediction"], expected, atol=1e-5)
    as_rows = pd.DataFrame(rows, columns=rows[0].__fields__)  # whose structs are rows of Spark
    as_rows["note"] = table["note"]
    np.testing.assert_allclose(served.predict(as_rows)["prediction"], expected, atol=1e-5)


@pytest.fixture
def without_spark(tmp_path: Path) -> dict[str, str]:
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("pyspark", "py4j", "__editable__", "_sparktorch")):
            (site / entry.name).symlink_to(entry)
    if not (site / "sparktorch").exists():
        (site / "sparktorch").symlink_to(Path(sparktorch.__file__).parent)
    return {"PYTHONPATH": str(site), "PATH": "/nonexistent", "HOME": str(tmp_path)}


def test_the_pyfunc_scores_where_neither_pyspark_nor_java_is(
    tmp_path: Path,
    table: pd.DataFrame,
    logged: tuple[TorchClassificationModel, ModelInfo],
    without_spark: dict[str, str],
) -> None:
    model, info = logged
    local = mlflow.artifacts.download_artifacts(info.model_uri)
    x = np.stack(table["features"].tolist())
    np.save(tmp_path / "x.npy", x)
    program = f"""
import importlib.util, json, shutil, sys
import numpy as np
assert importlib.util.find_spec("pyspark") is None and shutil.which("java") is None
import mlflow, pandas as pd
x = np.load({str(tmp_path / "x.npy")!r})
model = mlflow.pyfunc.load_model({local!r})
frame = model.predict(pd.DataFrame({{"features": list(x)}}))
arrays = model.predict({{"features": x}})
assert frame["prediction"].tolist() == arrays["prediction"].tolist()
print(json.dumps(frame["prediction"].tolist()))
"""
    # -S leaves out this interpreter's own site-packages.
    run = subprocess.run(
        [sys.executable, "-S", "-c", program], env=without_spark, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with torch.no_grad():
        expected = model.module(torch.from_numpy(x)).argmax(1).tolist()
    assert json.loads(run.stdout.splitlines()[-1]) == expected


@pytest.mark.landing
def test_mlflow_serves_it_and_answers_as_transform_does(
    tmp_path: Path, frame: DataFrame, table: pd.DataFrame, logged: tuple[TorchClassificationModel, ModelInfo]
) -> None:
    model, info = logged
    rows = [row.tolist() for row in table.sort_values("target").head(50)["features"]]
    expected = sorted_rows(model.transform(frame))[:50]
    bodies = [
        {"dataframe_split": {"columns": ["features"], "data": [[row] for row in rows]}},
        {"dataframe_records": [{"features": row} for row in rows]},
        {"inputs": {"features": rows}},
        {"inputs": rows},
    ]
    with serving(mlflow.artifacts.download_artifacts(info.model_uri), tmp_path / "serve.log") as address:
        for body in bodies:
            found = answer(address, body)
            assert [row["prediction"] for row in found] == [row["prediction"] for row in expected]
            np.testing.assert_allclose(
                [row["probability"] for row in found], [row["probability"].toArray() for row in expected], atol=1e-6
            )
        refused = requests.post(address, json={"inputs": {"features": [[1.0]]}}, timeout=120)
        assert refused.status_code == 400
        assert "shape (1,), the model takes" in refused.json()["message"]


@pytest.mark.usefixtures("store")
def test_a_model_in_a_folder_of_its_own_is_logged_by_name(frame: DataFrame, tmp_path: Path) -> None:
    shards: dict[str, object] = {"strategy": "zero3", "modelDir": str(tmp_path / "models"), "numWorkers": 2}
    model = classifier(**shards).fit(frame)
    with mlflow.start_run():
        info = log_model(model, name="divided")
    logged = Path(mlflow.artifacts.download_artifacts(info.model_uri), "sparktorch")
    assert {path.name for path in logged.iterdir()} == {"columns.json", "module.json", "model.json"}
    expected = [row.prediction for row in sorted_rows(model.transform(frame))]
    loaded = load_model(info.model_uri)
    assert [row.prediction for row in sorted_rows(loaded.transform(frame))] == expected
    rows = frame.orderBy("target").select("features").toPandas()
    scored = mlflow.pyfunc.load_model(info.model_uri).predict(rows)
    assert scored["prediction"].tolist() == expected
