"""What an estimator refuses by its Params alone, without a session: each row names the Param that the error names."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from sparktorch import (
    Forecaster,
    ImageClassifier,
    Ranker,
    Recommender,
    TabularClassifier,
    TextClassifier,
    TorchClassifier,
    TorchEstimator,
    run,
)
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.translate import translate
from tests.support.callbacks import Locked, Misspelt, Stops
from tests.support.nets import Mlp

# What each estimator has, beside the Params of a row.
GIVEN: dict[Any, dict[str, Any]] = {
    TorchEstimator: {"module": Mlp, "loss": "MSELoss"},
    TorchClassifier: {"module": Mlp},
    Forecaster: {"orderCol": "day", "labelCol": "sold", "context": 3, "horizon": 2},
    Ranker: {"module": "torch.nn:Linear", "groupCol": "query"},
}
FOLDS: dict[str, Any] = {"strategy": "independent", "strategyParams": {"folds": True}}


def check_refused(kind: Any, params: dict[str, Any], param: str, says: str | None = None) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        translate(kind(**{**GIVEN.get(kind, {}), **params}), kind._task)
    assert caught.value.where == {"param": param}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"module": None}, "module"),
        ({"loss": None}, "loss"),
        ({"accumulationSteps": 2, "microBatchSize": 8}, "microBatchSize"),
        ({"scheduler": "ReduceLROnPlateau", "schedulerInterval": "step"}, "schedulerInterval"),
        ({"scheduler": ReduceLROnPlateau}, "scheduler"),  # without validation rows
        ({"schedulerParams": {"gamma": 0.5}}, "schedulerParams"),
        ({"epochs": 0}, "epochs"),
        ({"device": "gpu"}, "device"),
        ({"optimizer": SGD(Mlp().parameters())}, "optimizer"),
        ({"scheduler": StepLR(SGD(Mlp().parameters()), 1)}, "scheduler"),
        ({"module": torch.export.export(Mlp(), (torch.ones(2, 5),))}, "module"),
        ({"batchSize": 3, "numWorkers": 4}, "batchSize"),
        ({"batchSize": 16, "numWorkers": 3, "accumulationSteps": 6}, "accumulationSteps"),
        ({"trainingStep": "tests.support.nets:mean_output_error"}, "trainingStep"),  # and a loss
        ({"earlyStoppingPatience": 2}, "earlyStoppingPatience"),
        ({"earlyStoppingMetric": "val_mae"}, "earlyStoppingMetric"),
        (
            {"earlyStoppingMetric": "val_accuracy", "validationIndicatorCol": "v", "metrics": {"r2": "R2Score"}},
            "earlyStoppingMetric",
        ),
        (
            {"earlyStoppingMetric": "val_x", "validationIndicatorCol": "v", "metrics": {"x": "R2Score"}},
            "earlyStoppingMode",
        ),
        (
            {"earlyStoppingMetric": "loss", "validationIndicatorCol": "v", "earlyStoppingPatience": 1},
            "earlyStoppingMetric",
        ),
        ({"strategy": "zero1", "optimizer": lambda parameters, lr: None}, "optimizer"),
        ({"metrics": {"r2": "R2Score"}}, "metrics"),
        ({"callbacks": [3]}, "callbacks"),
        ({"callbacks": [Stops]}, "callbacks"),
        ({"callbacks": [Misspelt()]}, "ranks of Misspelt"),
        ({"callbacks": [Locked()]}, "callbacks"),
        ({"syncBatchNorm": True, "microBatchSize": 8}, "syncBatchNorm"),
        ({"syncBatchNorm": True, "strategy": "localSGD"}, "syncBatchNorm"),
        ({"channelsLast": True, "strategy": "zero3"}, "channelsLast"),
        ({"predictBatchSize": "64"}, "predictBatchSize"),
        ({"microBatchSize": "auto", "strategy": "zero2"}, "microBatchSize"),
        ({"strategy": "fsdp"}, "strategy"),
        ({"optimizerParams": {"lr": 1}}, "optimizerParams"),
        ({"inputCols": []}, "inputCols"),
        ({"nullPolicy": "skip"}, "nullPolicy"),
        ({"fillValue": 1.0}, "fillValue"),
        ({"inputShapes": {"a": [2, 0]}}, "inputShapes"),
        ({"labelCols": ["a"], "labelCol": "b"}, "labelCols"),
        ({"labelCols": []}, "labelCols"),
        ({"split": "keep", "strategy": "independent", "strategyParams": {"folds": True}}, "split"),
        ({"split": "keep", "numWorkers": (1, 2)}, "split"),
        ({"memoryBudget": 10}, "memoryBudget"),
        ({"checkpointDir": "/folder", "strategy": "localSGD"}, "checkpointDir"),
        ({"inputCols": ["a"], "featuresCol": "b"}, "inputCols"),
        ({"modelDir": "s3://bucket/models", "strategy": "zero3"}, "modelDir"),
        ({"modelDir": f"{__file__}/within", "strategy": "zero3"}, "modelDir"),
        ({"modelDir": "/models", "strategy": "zero3", "module": Mlp()}, "module"),
        ({"startTimeout": 0.0}, "startTimeout"),
        ({"minWorkers": 3, "numWorkers": 2}, "numWorkers"),
        ({"numWorkers": (1, 2), "strategy": "localSGD"}, "numWorkers"),
        ({**FOLDS, "validationIndicatorCol": "v"}, "validationIndicatorCol"),
        ({"modelDir": "/models", "strategy": "ddp"}, "modelDir"),
    ],
)
def test_a_param_that_cannot_work_is_refused_by_name(params: dict[str, Any], param: str) -> None:
    check_refused(TorchEstimator, params, param)


@pytest.mark.parametrize(
    ("kind", "params", "param"),
    [
        (Forecaster, {"orderCol": None}, "orderCol"),
        (Forecaster, {"context": 1}, "context"),
        (Forecaster, {"quantiles": [0.9, 0.1]}, "quantiles"),
        (Forecaster, {"quantiles": [0.5], "loss": "MSELoss"}, "loss"),
        (Forecaster, {"nullPolicy": "fill"}, "nullPolicy"),
        (Forecaster, {"scaling": "series"}, "scaling"),
        (Recommender, {"ratingCol": ""}, "ratingCol"),
        (Recommender, {"rank": 0}, "rank"),
        (Recommender, {"coldStartStrategy": "zero"}, "coldStartStrategy"),
        (Ranker, {"groupCol": None}, "groupCol"),
        (Ranker, {"loss": "listnett"}, "loss"),
        (Ranker, {"split": "keep"}, "split"),
        (Ranker, {"strategy": "mesh", "strategyParams": {"shard": 1}}, "strategy"),
        (TabularClassifier, {"epochs": "many"}, "epochs"),
        (TabularClassifier, {"learningRate": "fast"}, "learningRate"),
        (TabularClassifier, {"validationFraction": 1.0}, "validationFraction"),
        (TabularClassifier, {"validationFraction": -0.1}, "validationFraction"),
        (TextClassifier, {"modelFolder": "/models", "nullPolicy": "fill"}, "nullPolicy"),
        (ImageClassifier, {"imageCol": "photo", "inputShapes": {"photo": [28, 28]}}, "inputShapes"),
        (ImageClassifier, {"modelFolder": "/models", "inputShapes": {"image": [3, 8, 8]}}, "inputShapes"),
    ],
)
def test_what_an_estimator_of_a_task_cannot_do_is_refused_by_name(
    kind: Any, params: dict[str, Any], param: str
) -> None:
    check_refused(kind, params, param)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("params", "param"), [({"learningRate": 0.1}, "learningRate"), ({"microBatchSize": "auto"}, "microBatchSize")]
)
def test_what_a_lightning_module_brings_or_does_not_go_with_is_refused_by_name(
    params: dict[str, Any], param: str
) -> None:
    module = "tests.support.lightning_modules:LitMinimal"
    check_refused(TorchEstimator, {"module": module, "loss": None, **params}, param, "LightningModule")


@pytest.mark.parametrize(
    ("function", "params", "says"),
    [
        (lambda: None, {}, "cannot be called: too many positional arguments"),
        (len, {"numWorker": 2}, "did you mean 'numWorkers'"),
        (len, {"strategy": "independent"}, "trains a model in each worker"),
        (len, {"strategy": "mesh", "strategyParams": {"shard": 2}, "numWorkers": 3}, "3 workers cannot be divided"),
        (lambda context, lock: None, {"args": [threading.Lock()]}, "cannot be shipped to the ranks"),
        (lambda context: None, {"kwargs": {"lr": 1}}, "cannot be called: got an unexpected keyword argument 'lr'"),
        (len, {"lr": 1}, "arguments of the function go into args"),
        (len, {"data": [1, 2]}, "run takes a DataFrame of Spark's, and got builtins's list"),
    ],
)
def test_what_cannot_run_is_refused_before_a_session_is_asked_for(function: Any, params: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(function, **params)
