"""outputLayers: columns of what layers return, wherever a model scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import DataFrame
from torch import nn

from sparktorch import TorchClassificationModel, TorchClassifier, TorchModel
from sparktorch.errors import ColumnError, ConfigError, PersistenceError
from sparktorch.tracking import save_model
from tests.spark.modules import MLP
from tests.spark.scored import sorted_rows
from tests.support.mlflow import QUIET

pytestmark = QUIET
LAYERS = {"embedding": "body.1", "first": "body.0"}


@pytest.fixture(scope="module")
def model(frame: DataFrame) -> TorchClassificationModel:
    estimator = TorchClassifier(module=MLP, moduleParams={"outputs": 3}, outputLayers=LAYERS, progress=False)
    return estimator.fit(frame)


@pytest.fixture(scope="module")
def expected(model: TorchClassificationModel, table: pd.DataFrame) -> Any:
    ordered = table.sort_values("target", kind="stable")
    with torch.no_grad():
        return model.module.body[:2](torch.from_numpy(np.stack(ordered["features"].tolist()))).numpy()


def test_transform_adds_what_layers_return_also_once_loaded(
    model: TorchClassificationModel, frame: DataFrame, expected: Any, tmp_path: Path
) -> None:
    scored = model.transform(frame)
    added = ["rawPrediction", "probability", "prediction", "embedding", "first"]
    assert scored.columns == [*frame.columns, *added]
    assert scored.schema["embedding"].dataType.simpleString() == "array<float>"
    assert scored.schema["embedding"].metadata == {}
    rows = sorted_rows(scored)
    np.testing.assert_allclose([row["embedding"] for row in rows], expected, atol=1e-6)
    model.save(str(tmp_path / "model"))
    loaded = TorchClassificationModel.load(str(tmp_path / "model"))
    assert sorted_rows(loaded.transform(frame)) == rows
    assert loaded.predict([0.0] * 5) == model.predict([0.0] * 5)


def test_sql_and_mlflow_return_them_too(
    model: TorchClassificationModel, frame: DataFrame, table: pd.DataFrame, expected: Any, tmp_path: Path
) -> None:
    model.registerUDF("embed", "embedding", frame.sparkSession)
    rows = sorted_rows(frame.selectExpr("target", "embed(features) as e"))
    np.testing.assert_allclose([row["e"] for row in rows], expected, atol=1e-6)
    save_model(model, str(tmp_path / "model"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    assert str(served.metadata.signature.outputs.input_dict()["embedding"].type) == "Array(float)"
    found = served.predict(table.sort_values("target", kind="stable")[["features"]])
    np.testing.assert_allclose(np.stack(found["embedding"]), expected, atol=1e-6)


def test_they_may_be_all_that_a_model_adds(frame: DataFrame) -> None:
    torch.manual_seed(0)
    net = MLP(5, 2)
    model = TorchModel.fromModule(net, frame, predictionCol="", outputLayers={"e": "body.0"})
    scored = model.transform(frame)
    assert scored.columns == [*frame.columns, "e"]
    row = scored.head()
    with torch.no_grad():
        np.testing.assert_allclose(row["e"], net.body[0](torch.tensor([row["features"]]))[0], atol=1e-6)
    with pytest.raises(ConfigError, match="two output columns are called 'e'"):
        model.copy().setPredictionCol("e").transform(frame)


def test_a_layer_that_is_not_there_is_refused_before_any_job(model: TorchClassificationModel, frame: DataFrame) -> None:
    with pytest.raises(ConfigError, match=r"no layer 'body.7'(.|\n)*body"):
        model.copy().setOutputLayers({"e": "body.7"}).transform(frame)
    with pytest.raises(ConfigError, match=r"no layer 'head'"):
        TorchClassifier(module=MLP, moduleParams={"outputs": 3}, outputLayers={"e": "head"}).fit(frame)
    with pytest.raises(ColumnError, match="already has a column 'label'"):
        TorchClassifier(module=MLP, moduleParams={"outputs": 3}, outputLayers={"label": "body"}).fit(frame)


def test_graphs_have_no_layers(frame: DataFrame, tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    graph = torch.export.export(MLP(5, 2), (torch.zeros(2, 5),), dynamic_shapes=({0: batch},))
    with pytest.raises(ConfigError, match="a graph has no layers"):
        TorchModel.fromModule(graph, frame, outputLayers={"e": "body.0"}).transform(frame)

    class Local(nn.Sequential):
        """Without an import path: it is saved as its graph."""

    model = TorchModel.fromModule(Local(nn.Linear(5, 2)), frame, outputLayers={"e": "0"})
    with pytest.raises(PersistenceError, match="a graph has no layers"):
        model.save(str(tmp_path / "model"))
    model.write().option("allowPickle", "true").overwrite().save(str(tmp_path / "model"))
    loaded = TorchModel.read().option("allowPickle", "true").load(str(tmp_path / "model"))
    assert loaded.transform(frame).head() == model.transform(frame).head()
