"""A model that only the workers' folder holds is fitted, scored, saved and gone on from like any other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import (
    Callback,
    TorchClassificationModel,
    TorchClassifier,
    TorchCrossValidator,
    TorchEstimator,
    TorchTuner,
)
from sparktorch.base.weights_folder import INDEX, WeightsFolder
from sparktorch.errors import ModuleError, PersistenceError, RankError
from sparktorch.train.callbacks import FitContext
from tests.spark.modules import MLP, Fixed
from tests.spark.scored import same_weights, sorted_rows
from tests.support.mlflow import QUIET
from tests.support.tiny_transformers import LENGTH, llama

pytestmark = QUIET  # Optuna's storage is SQLAlchemy

SHARDS: dict[str, Any] = {"strategy": "zero3", "strategyParams": {"min_parameters": 20}}

asked = partial(
    TorchClassifier,
    module=Fixed,
    moduleParams={"outputs": 3},
    epochs=2,
    batchSize=100,
    numWorkers=2,
    progress=False,
    **SHARDS,
)


@pytest.fixture(scope="module")
def fitted(frame: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> TorchClassificationModel:
    return asked(modelDir=str(tmp_path_factory.mktemp("models"))).fit(frame)


def scores(model: TorchClassificationModel, frame: DataFrame) -> list[Any]:
    return [row.probability for row in sorted_rows(model.transform(frame))]


def test_it_is_the_model_that_fits_return(fitted: TorchClassificationModel, frame: DataFrame, tmp_path: Path) -> None:
    weights = fitted.trained.weights
    assert isinstance(weights, WeightsFolder)
    assert INDEX in {path.name for path in Path(weights.path).iterdir()}
    plain = asked().fit(frame)
    assert same_weights(fitted, plain)
    expected = scores(plain, frame)
    assert scores(fitted, frame) == expected
    row = frame.orderBy("target").first()
    assert row is not None
    assert fitted.predictProbability(row.features).toArray() == pytest.approx(expected[0].toArray(), abs=1e-6)

    fitted.save(str(tmp_path / "saved"))
    loaded = TorchClassificationModel.load(str(tmp_path / "saved"))
    assert loaded.trained.weights == weights
    assert scores(loaded, frame) == expected


class PrunesSecond(optuna.pruners.BasePruner):
    """Ends the second trial after its first epoch."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number == 1


def test_searches_leave_the_folder_of_the_model_that_they_return(frame: DataFrame, tmp_path: Path) -> None:
    def left() -> set[str]:
        return {str(path) for path in tmp_path.iterdir()}

    estimator = asked(modelDir=str(tmp_path))
    maps = [{estimator.seed: 1}, {estimator.seed: 2}]
    evaluator = MulticlassClassificationEvaluator(labelCol="label")
    validator = TorchCrossValidator(estimator=estimator, estimatorParamMaps=maps, evaluator=evaluator, numFolds=2)
    best: Any = validator.fit(frame).bestModel
    assert left() == {best.trained.weights.path}
    best.deleteWeights()
    assert left() == set()

    search = partial(
        TorchTuner,
        estimator=estimator,
        pruner=PrunesSecond(),
        parallelism=1,
        workersPerTrial=2,
        storage=optuna.storages.InMemoryStorage(),
        studyName="study",
    )
    one = search(space={"learningRate": FloatDistribution(0.01, 0.1)}, trials=4).fit(frame).bestModel
    assert left() == {one.trained.weights.path}
    again = (
        search(space={"learningRate": FloatDistribution(1e-9, 2e-9)}, trials=5).fit(frame).bestModel
    )  # the first one is fitted again
    assert left() == {one.trained.weights.path, again.trained.weights.path}
    assert scores(one, frame) == scores(again, frame)


class Fails(Callback):
    """Fails after the first epoch."""

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        raise ArithmeticError("planted")


def test_a_fit_that_fails_leaves_no_folder(frame: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="planted"):
        asked(modelDir=str(tmp_path), callbacks=[Fails()]).fit(frame)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PersistenceError, match="has its weights with it"):
        asked(epochs=1).fit(frame).deleteWeights()


def test_a_folder_that_is_gone_is_named(fitted: TorchClassificationModel, frame: DataFrame, tmp_path: Path) -> None:
    weights: Any = fitted.trained.weights
    trained = replace(fitted.trained, weights=replace(weights, path=str(tmp_path / "gone")))
    TorchClassificationModel()._with(trained, None).save(str(tmp_path / "saved"))
    loaded = TorchClassificationModel.load(str(tmp_path / "saved"))
    said = "must be mounted under this path wherever the model is trained, loaded or scored"
    with pytest.raises(PersistenceError, match=said):
        loaded.predict([0.0] * 5)
    with pytest.raises(Exception, match=said):
        loaded.transform(frame).collect()


class Adapted(nn.Module):
    """Has what adapters have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP(5, 3)
        self.body.peft_config = {}  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Looks(Fixed):
    """Looks at the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.abs().max() < 100 else x / 100)


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ({"module": Adapted, "moduleParams": {}}, ModuleError, "the module has adapters"),
        ({"module": Looks}, ModuleError, r"(?s)test_model_dir.py:\d+, 'return.*meta.*dryRun='worker' tries values"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    params: dict[str, Any], error: type[Exception], said: str, frame: DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        asked(**{"modelDir": str(tmp_path / "models"), **params}).fit(frame)
    assert not (tmp_path / "models").exists()


def test_a_module_that_looks_at_values_is_tried_in_a_worker(
    fitted: TorchClassificationModel, frame: DataFrame, tmp_path: Path
) -> None:
    model = asked(module=Looks, modelDir=str(tmp_path), dryRun="worker").fit(frame)
    assert isinstance(model.trained.weights, WeightsFolder)
    assert scores(model, frame) == scores(fitted, frame)  # these values it leaves as they are


def both(columns: Any, *, epoch: int, generator: Any) -> dict[str, torch.Tensor]:
    ids = torch.tensor(columns["ids"].to_pylist())
    return {"input_ids": ids, "labels": ids}


def test_a_causal_model_is_written_from_its_folder_as_one(spark: SparkSession, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(llama()).save_pretrained(tmp_path / "base")
    texts = spark.createDataFrame([([1 + n % 7] * LENGTH,) for n in range(40)], "ids array<int>")
    model = TorchEstimator(
        module=str(tmp_path / "base"),
        inputCols=["ids"],
        labelCol="",
        preprocess=both,
        outputCols=["loss", "logits"],
        batchSize=10,
        numWorkers=2,
        progress=False,
        modelDir=str(tmp_path / "models"),
        **{**SHARDS, "strategyParams": {"wrap_classes": ["LlamaDecoderLayer"]}},
    ).fit(texts)
    model.save_pretrained(str(tmp_path / "tuned"))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "tuned", local_files_only=True).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.module.state_dict().items())
