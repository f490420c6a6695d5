"""Saved models and estimators come back as they were, and run nobody's pickles unasked."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import (
    TorchClassificationModel,
    TorchClassifier,
    TorchRegressionModel,
    TorchRegressor,
)
from sparktorch.errors import ConfigError, PersistenceError
from sparktorch.ml import persistence as io
from tests.spark.modules import MLP
from tests.spark.scored import sorted_rows
from tests.support.programs import run_python
from tests.support.sessions import settings

QUICK = {"batchSize": 128, "progress": False, "epochs": 1}


def weights_of(fitted: PipelineModel) -> bytes:
    model: Any = fitted.stages[-1]
    weights: bytes = model.trained.weights
    return weights


def test_a_model_round_trips_bit_for_bit_with_the_defaults_of_its_estimator_and_dots_in_its_uid(
    frame: DataFrame, tmp_path: Path
) -> None:
    classifier = TorchClassifier(module=MLP, moduleParams={"outputs": 3}, probabilityCol="p", **QUICK)
    classifier._setDefault(predictionCol="class")
    classifier._resetUid("net.v1.2")
    model = classifier.fit(frame)
    model.save(str(tmp_path / "model"))
    loaded = TorchClassificationModel.load(str(tmp_path / "model"))
    assert (loaded.uid, loaded.isSet("predictionCol")) == (model.uid, False) == ("net.v1.2", False)
    assert loaded.summary == model.summary
    assert loaded.extractParamMap() == model.extractParamMap()
    scored = loaded.transform(frame)
    assert {"p", "class"} <= {*scored.columns}
    assert sorted_rows(scored) == sorted_rows(model.transform(frame))


def test_what_lies_on_disk_is_spark_metadata_and_safetensors_and_is_not_replaced_unasked(
    frame: DataFrame, tmp_path: Path
) -> None:
    model = TorchRegressor(module=MLP, labelCol="target", **QUICK).fit(frame)
    model.save(str(tmp_path / "model"))
    metadata = json.loads(next((tmp_path / "model" / "metadata").glob("part-*")).read_text())
    assert metadata["class"] == "sparktorch.ml.regression.TorchRegressionModel"
    files = {row["name"] for row in frame.sparkSession.read.parquet(str(tmp_path / "model" / "data")).collect()}
    assert files == {"model.json", "module.json", "weights.safetensors"}
    with pytest.raises(Exception, match="model already exists"):
        model.save(str(tmp_path / "model"))


class Uncapturable(nn.Module):
    """Returns a sum whose sign depends on the values, which no graph can say."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        total = self.scale * features.sum(1)
        return total if bool(total.sum() > 0) else -total


def test_what_overwrite_replaces_stays_until_the_new_one_is_complete(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "saved")
    model = TorchRegressor(module=MLP, labelCol="target", **QUICK).fit(frame)
    model.save(path)

    def stays(unsaved: Any, error: str) -> None:
        with pytest.raises(Exception, match=error):
            unsaved.write().overwrite().save(path)
        assert TorchRegressionModel.load(path).trained.weights == model.trained.weights
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]

    stays(TorchRegressionModel.fromModule(Uncapturable().eval(), frame), "torch.export cannot capture its graph")
    stays(TorchRegressor(module=MLP, lossParams={"weight": torch.ones(1)}), "lossParams has no import path")
    with monkeypatch.context() as broken:  # once its files are written
        broken.setattr(io.ModelWriter, "_write_metadata", lambda *_: json.loads("["))
        stays(model, "Expecting value")

    other = TorchRegressor(module=MLP, labelCol="target", **{**QUICK, "epochs": 2}).fit(frame)
    other.write().overwrite().save(Path(path).as_uri() + "/")
    assert TorchRegressionModel.load(path).trained.weights == other.trained.weights
    TorchRegressor(module=MLP).write().overwrite().save(path)
    assert TorchRegressor.load(path).getModule() is MLP
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]

    with_colon = str(tmp_path / "at 10:30")
    for _ in range(2):
        TorchRegressor(module=MLP).write().overwrite().save(with_colon)
    assert any((tmp_path / "at 10:30" / "metadata").iterdir())  # Spark 3.5 writes there, and reads no such path.
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["at 10:30", "saved"]


def test_a_pipeline_and_its_model_are_pickled_where_the_session_says_so(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    def doubled(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"input": 2 * torch.as_tensor(columns["features"])}

    params = {"preprocess": doubled, "inputShapes": {"features": [5]}, "labelCol": "target", **QUICK}
    pipeline = Pipeline(stages=[TorchRegressor(module=nn.Sequential(nn.Linear(5, 1)), **params)])
    fitted = pipeline.fit(frame)
    for stages, name in ((pipeline, "pipeline"), (fitted, "model")):
        path = str(tmp_path / name)
        asked = "spark.conf.set('spark.sparktorch.allowPickle', 'true')"
        with pytest.raises(PersistenceError, match=re.escape(asked)):
            stages.write().option("allowPickle", "true").save(path)
        with settings(spark, {"spark.sparktorch.allowPickle": "true"}):
            stages.write().overwrite().save(path)
        with pytest.raises(PersistenceError, match=re.escape(asked)):
            type(stages).load(path)
    with settings(spark, {"spark.sparktorch.allowPickle": "true"}):
        again = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)
        loaded = PipelineModel.load(str(tmp_path / "model"))
    assert weights_of(again) == weights_of(fitted)
    assert sorted_rows(loaded.transform(frame)) == sorted_rows(fitted.transform(frame))


def test_a_model_is_written_and_read_in_batches(
    frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "_PART_BYTES", 1000)
    monkeypatch.setattr(io, "_BATCH_BYTES", 3000)
    model = TorchRegressor(module=MLP, moduleParams={"hidden": 400}, labelCol="target", **QUICK).fit(frame)
    path = (tmp_path / "model").as_uri()
    model.save(path)
    data = frame.sparkSession.read.parquet(path + "/data")
    assert data.agg({"batch": "max"}).head()[0] >= 3
    assert data.where("name = 'weights.safetensors'").count() > 8
    model.write().overwrite().save(path)
    loaded = TorchRegressionModel.load(path)
    assert loaded.trained.weights == model.trained.weights
    row = frame.first()
    assert row is not None
    assert loaded.predict(row) == model.predict(row)


def test_an_estimator_round_trips_with_import_paths_tuples_nan_and_defaults_without_pickles(
    spark: SparkSession, tmp_path: Path
) -> None:
    params = {
        "moduleParams": {"kernel_size": (3, 3), "sizes": [(1, (2,))], "n": np.int64(3), "rates": [np.float32(0.5)]},
        "numWorkers": (2, 4),
    }
    given: dict[str, Any] = {"optimizer": torch.optim.SGD, "microBatchSize": "auto", "fillValue": math.nan, **params}
    estimator = TorchRegressor(module=MLP, labelCol="target", **given)
    estimator._setDefault(predictionCol="p")
    estimator.save(str(tmp_path / "estimator"))
    loaded = TorchRegressor.load(str(tmp_path / "estimator"))
    assert (loaded.getModule(), loaded.getOptimizer(), loaded.getMicroBatchSize()) == (MLP, torch.optim.SGD, "auto")
    assert (loaded.getModuleParams(), loaded.getNumWorkers()) == (params["moduleParams"], (2, 4))
    assert math.isnan(loaded.getFillValue())
    assert loaded.getPredictionCol() == "p"
    with pytest.raises(PersistenceError, match=r"holds a sparktorch.ml.regression.TorchRegressor"):
        TorchClassifier.load(str(tmp_path / "estimator"))


@pytest.mark.newest
def test_fitting_goes_on_from_a_loaded_model(frame: DataFrame, tmp_path: Path) -> None:
    plain = {**QUICK, "labelCol": "target", "optimizer": "SGD", "shuffle": False, "learningRate": 0.05}
    both = TorchRegressor(module=MLP, **{**plain, "epochs": 2}).fit(frame)
    first = TorchRegressor(module=MLP, **plain).fit(frame)
    first.save(str(tmp_path / "first"))
    loaded = TorchRegressionModel.load(str(tmp_path / "first"))
    second = TorchRegressor(module=loaded, **plain).fit(frame)
    for name, value in both.module.state_dict().items():
        torch.testing.assert_close(second.module.state_dict()[name], value, atol=1e-6, rtol=1e-5)
    second.save(str(tmp_path / "second"))  # its code has the import path that the first one's has
    assert TorchRegressionModel.load(str(tmp_path / "second")).trained.source == MLP.__module__ + ":MLP"
    with pytest.raises(ConfigError, match="moduleParams are given"):
        TorchRegressor(module=loaded, moduleParams={"hidden": 3}, **plain).fit(frame)


@pytest.mark.newest
def test_an_instance_trains_from_its_own_weights_and_stays_as_it_was(frame: DataFrame, tmp_path: Path) -> None:
    instance = nn.Sequential(nn.Linear(5, 1))
    before = {name: value.clone() for name, value in instance.state_dict().items()}
    estimator = TorchRegressor(module=instance, labelCol="target", learningRate=1e-12, numWorkers=2, **QUICK)
    model = estimator.fit(frame)
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=1e-6, rtol=0)
        assert torch.equal(instance.state_dict()[name], before[name])
    with pytest.raises(PersistenceError, match="module has no import path"):
        estimator.save(str(tmp_path / "estimator"))
    estimator.write().option("allowPickle", "true").overwrite().save(str(tmp_path / "estimator"))
    with pytest.raises(PersistenceError, match="pickled"):
        TorchRegressor.load(str(tmp_path / "estimator"))
    loaded = TorchRegressor.read().option("allowPickle", "true").load(str(tmp_path / "estimator"))
    assert torch.equal(loaded.getModule()[0].weight, instance[0].weight)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_more_than_2_gib_is_fitted_saved_loaded_and_scores(tmp_path: Path) -> None:
    out = run_python(tmp_path, "-m", "tests.spark.programs.large", str(tmp_path / "model"), seconds=800)
    result = json.loads(out.splitlines()[-1])
    assert result["bytes"] > 2**31
    assert result["error"] < 0.1
    assert result["same"]
