"""Modules that were trained elsewhere score as they do in torch, and are saved and loaded like fitted ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sparktorch import TextClassificationModel, TorchClassificationModel, TorchModel, TorchRegressionModel
from sparktorch.errors import ConfigError, ModuleError, PersistenceError
from tests.support.nets import Mlp
from tests.support.tiny_transformers import bert, tokenizer_folder

INPUTS = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    rows = spark.createDataFrame(
        [(number, row.tolist()) for number, row in enumerate(INPUTS)], "id int, features array<float>"
    )
    path = str(tmp_path_factory.mktemp("rows") / "rows.parquet")
    rows.repartition(3).write.parquet(path)
    return spark.read.parquet(path)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def expected(net: nn.Module) -> Any:
    with torch.no_grad():
        return net.eval()(torch.from_numpy(INPUTS)).numpy()


def jit(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function of TorchScript, which warns that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def scored(model: TorchModel, data: DataFrame) -> Any:
    return np.array([row[0] for row in model.transform(data).orderBy("id").select("prediction").collect()])


@pytest.mark.parametrize("form", ["instance", "exported file", "exported graph", "script", "script file"])
def test_a_module_scores_as_in_torch_and_after_it_was_saved(
    form: str, net: nn.Module, data: DataFrame, tmp_path: Path
) -> None:
    example, file = torch.from_numpy(INPUTS[:3]), str(tmp_path / "net.pt2")
    module: Any = net.train()  # as training leaves it
    if form.startswith("exported"):
        module = torch.export.export(net.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        torch.export.save(module, file)
        module = module.module() if form.endswith("graph") else module  # as MLflow loads it
    elif form.startswith("script"):
        module = jit(torch.jit.trace, net.eval(), example)
        file = file.removesuffix("2")
        jit(torch.jit.save, module, file)
    model = TorchModel.fromModule(file if form.endswith("file") else module, data)
    np.testing.assert_allclose(scored(model, data), expected(net), atol=1e-6)

    model.write().option("allowPickle", "true").save(str(tmp_path / "saved"))
    again = TorchModel.read().option("allowPickle", "true").load(str(tmp_path / "saved"))
    np.testing.assert_allclose(scored(again, data), expected(net), atol=1e-6)
    if form.startswith("script"):
        with pytest.raises(PersistenceError, match="TorchScript"):
            TorchModel.load(str(tmp_path / "saved"))


@pytest.mark.parametrize("form", ["state", "safetensors", "torch.save", "checkpoint"])
def test_a_class_with_weights_scores_as_the_module_that_had_them(form: str, data: DataFrame, tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = Mlp(inputs=4, outputs=1)
    state: Any = module.state_dict()
    weights: Any = tmp_path / "weights"
    if form == "safetensors":
        weights = f"{weights}.safetensors"
        save_file(state, weights)
    elif form == "state":
        weights = state
    else:
        torch.save({"state_dict": state, "epoch": 3} if form == "checkpoint" else state, weights)
    sizes = {"inputs": 4, "outputs": 1}
    model = TorchRegressionModel.fromModule(Mlp, data, weights=weights, moduleParams=sizes, predictionCol="prediction")
    np.testing.assert_allclose(scored(model, data), expected(module).squeeze(1), atol=1e-6)


def test_a_classifier_has_probabilities_labels_and_an_evaluation(net: nn.Module, data: DataFrame) -> None:
    best = expected(net).argmax(1)
    model = TorchClassificationModel.fromModule(net, data, labels=["a", "b", "c"], labelCol="best")
    rows = model.transform(data).orderBy("id")
    assert [row.prediction for row in rows.collect()] == best.tolist()
    shares = torch.from_numpy(expected(net)).softmax(1).numpy()
    np.testing.assert_allclose([row.probability.toArray() for row in rows.collect()], shares, atol=1e-6)
    assert rows.schema["prediction"].metadata["ml_attr"]["vals"] == ["a", "b", "c"]
    labelled = data.sparkSession.createDataFrame(
        [(row.tolist(), int(label)) for row, label in zip(INPUTS, best, strict=True)], "features array<float>, best int"
    )
    assert model.evaluate(labelled).accuracy == 1.0
    assert not model.hasSummary


def test_a_folder_of_hugging_face_scores_text(spark: SparkSession, tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "folder", ["good", "bad", "day"], bert(num_labels=2))
    texts = ["good day", "bad bad day", "day"]
    data = spark.createDataFrame([(text,) for text in texts], "text string")
    model = TextClassificationModel.fromModule(str(folder), data, maxLength=8)
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        shares = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**tokens).logits.softmax(1)
    found = [row[0].toArray() for row in model.transform(data).select("probability").collect()]
    np.testing.assert_allclose(found, shares.numpy(), atol=1e-6)


def test_what_has_no_trained_weights_is_refused(data: DataFrame, tmp_path: Path, spark: SparkSession) -> None:
    sizes = {"inputs": 4, "outputs": 1}
    with pytest.raises(ConfigError, match="class Mlp, without weights"):
        TorchModel.fromModule("tests.support.nets:Mlp", data, moduleParams=sizes)
    with pytest.raises(ModuleError, match=r"not those of the module: (?s:.*)Missing key"):
        TorchModel.fromModule(Mlp, data, moduleParams=sizes, weights={})
    torch.save({"epoch": 3, "model_state_dict": Mlp(**sizes).state_dict()}, tmp_path / "checkpoint")
    with pytest.raises(ModuleError, match=r"'epoch', 'model_state_dict', pass what is under 'model_state_dict'"):
        TorchModel.fromModule(Mlp, data, moduleParams=sizes, weights=tmp_path / "checkpoint")
    (tmp_path / "net.pt").write_bytes(b"rubbish")
    with pytest.raises(ModuleError, match="holds no program"):
        TorchModel.fromModule(str(tmp_path / "net.pt"), data)
    with pytest.raises(ModuleError, match=r"other\.pt2 holds no program"):
        TorchModel.fromModule("other.pt2", data)
    folder = tokenizer_folder(tmp_path / "folder", ["day"], bert("BertForMaskedLM"))
    with pytest.raises(ModuleError, match=r"has no values for .* classifier\.bias"):
        TextClassificationModel.fromModule(str(folder), spark.createDataFrame([("day",)], "text string"), maxLength=8)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_a_program_of_a_module_in_training_mode_is_refused(layer: nn.Module, data: DataFrame) -> None:
    net, example = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1)).train(), torch.from_numpy(INPUTS[:3])
    exported = torch.export.export(net, (example,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for module in (exported, jit(torch.jit.trace, net, example, check_trace=False)):
        with pytest.raises(ModuleError, match=r"call module\.eval\(\) before it is exported"):
            TorchModel.fromModule(module, data)


def test_a_function_is_called_on_the_driver_alone(net: nn.Module, data: DataFrame) -> None:
    called: list[int] = []

    def make() -> nn.Module:
        if called:
            raise AssertionError("called again")
        called.append(1)
        return net

    np.testing.assert_allclose(scored(TorchModel.fromModule(make, data), data), expected(net), atol=1e-6)


def test_the_first_row_without_nulls_says_what_the_columns_are(net: nn.Module, spark: SparkSession) -> None:
    rows = spark.createDataFrame([(0, None), (1, INPUTS[1].tolist())], "id int, features array<float>").coalesce(1)
    model = TorchModel.fromModule(net, rows, handleInvalid="keep")
    none, scores = (row["prediction"] for row in model.transform(rows).orderBy("id").collect())
    assert none is None
    np.testing.assert_allclose(scores, expected(net)[1], atol=1e-6)


def test_what_does_not_fit_is_refused_by_name(net: nn.Module, data: DataFrame) -> None:
    with pytest.raises(ConfigError, match="labels has 2 names, and the module 3 classes"):
        TorchClassificationModel.fromModule(net, data, labels=["a", "b"])
    with pytest.raises(ModuleError, match="argument 0 of forward <- column 'features'"):
        TorchModel.fromModule(nn.Linear(5, 1), data)
    with pytest.raises(TypeError, match="did you mean 'inputCols'"):
        TorchModel.fromModule(net, data, inputCol=["features"])
