"""What a user does with the estimators: fit, transform, evaluate, inspect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassificationModel, TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ConfigError, ModuleError
from tests.spark.modules import MLP, DigitsCNN, TwoInputs


@pytest.fixture(scope="module")
def digits_model(digits: DataFrame) -> TorchClassificationModel:
    return TorchClassifier(
        module=DigitsCNN,
        validationIndicatorCol="held_out",
        epochs=8,
        batchSize=64,
        learningRate=5e-3,
        numWorkers=2,
        progress=False,
    ).fit(digits)


def test_a_classifier_learns_the_digits_and_every_evaluator_takes_its_columns(
    digits: DataFrame, digits_model: TorchClassificationModel
) -> None:
    scored = digits_model.transform(digits.where("held_out"))
    assert [f.name for f in scored.schema][-3:] == ["rawPrediction", "probability", "prediction"]
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    log_loss = MulticlassClassificationEvaluator(metricName="logLoss").evaluate(scored)
    assert accuracy > 0.95
    assert log_loss < 0.3
    last = digits_model.summary.history[-1]
    assert last["val_accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert last["val_loss"] == pytest.approx(log_loss, abs=1e-4)


def test_a_module_that_the_driver_has_no_memory_for_is_built_in_tasks_alone(frame: DataFrame) -> None:
    module = "tests.spark.modules:only_in_tasks"
    regressor = TorchRegressor(module=module, labelCol="target", dryRun="worker", epochs=1, progress=False)
    model = regressor.fit(frame)
    assert model.summary.totalIterations > 0
    assert len(model.transform(frame).select("prediction").collect()) == 1001
    with pytest.raises(ModuleError, match="built on the driver"):
        _ = model.module


def test_the_summary_tells_the_course_of_the_fit(digits_model: TorchClassificationModel) -> None:
    summary = digits_model.summary
    assert [record["epoch"] for record in summary.history] == list(range(1, 9))
    assert summary.objectiveHistory[0] > 2 * summary.objectiveHistory[-1]
    assert (summary.rows, summary.validationRows, summary.numWorkers) == (1437, 360, 2)
    assert summary.totalIterations == 8 * summary.stepsPerEpoch == 8 * 23
    assert sum(rank["rows"] for rank in summary.ranks) == 1437
    assert all(0 <= record["data_wait_share"] <= 1 for record in summary.history)


def test_the_module_is_plain_torch_and_agrees_with_transform(
    digits: DataFrame, digits_model: TorchClassificationModel
) -> None:
    rows = digits_model.transform(digits.limit(20)).toPandas()
    module = digits_model.module
    assert type(module) is DigitsCNN
    assert not module.training
    with torch.no_grad():
        scores = module(torch.tensor(np.stack(rows["pixels"].tolist()), dtype=torch.float32))
    raw = np.stack([vector.toArray() for vector in rows["rawPrediction"]])
    np.testing.assert_allclose(raw, scores.numpy(), atol=1e-5)
    assert rows["prediction"].tolist() == scores.argmax(1).tolist()


@pytest.mark.newest
def test_one_score_a_row_is_a_two_class_problem(frame: DataFrame) -> None:
    two = frame.withColumn("label", (F.col("target") > 0).cast("int"))
    model = TorchClassifier(
        module=MLP, loss="BCEWithLogitsLoss", learningRate=0.01, epochs=10, numWorkers=2, progress=False
    ).fit(two)
    scored = model.transform(two)
    assert model.numClasses == 2
    assert BinaryClassificationEvaluator().evaluate(scored) > 0.9
    probability = np.stack([v.toArray() for v in scored.toPandas()["probability"]])
    np.testing.assert_allclose(probability.sum(1), 1.0, atol=1e-9)


@pytest.mark.newest
def test_a_training_step_class_weights_frozen_parts_and_groups_work_together(digits: DataFrame) -> None:
    def step(module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scores = module(batch.inputs[0])
        losses = torch.nn.functional.cross_entropy(scores, batch.label, reduction="none")
        return losses, {"accuracy": (scores.argmax(1) == batch.label).float()}

    given = DigitsCNN()
    frozen = next(iter(dict(given.named_parameters())))
    estimator = TorchClassifier(
        module=given,
        trainingStep=step,
        classWeights="balanced",
        freeze=[frozen],
        parameterGroups=[{"params": "*.bias", "weight_decay": 0.0}],
        nonFiniteLoss="skip",
        validationIndicatorCol="held_out",
        epochs=4,
        batchSize=64,
        learningRate=5e-3,
        numWorkers=2,
        progress=False,
    )
    model = estimator.fit(digits)
    last = model.summary.history[-1]
    assert min(last["train_accuracy"], last["val_accuracy"]) > 0.9
    assert last["skipped_steps"] == 0
    assert torch.equal(model.module.state_dict()[frozen], given.state_dict()[frozen])
    with pytest.raises(ConfigError, match="classWeights holds 2 weights, and the module tells 10 classes apart"):
        estimator.copy().setClassWeights([1.0, 2.0]).fit(digits)


@pytest.mark.newest
def test_schedule_clipping_precision_and_micro_batches_work_together(digits: DataFrame) -> None:
    model = TorchClassifier(
        module=DigitsCNN,
        validationIndicatorCol="held_out",
        epochs=6,
        validationInterval=4,
        batchSize=64,
        microBatchSize=20,
        learningRate=1e-2,
        scheduler="OneCycleLR",
        schedulerParams={"max_lr": 2e-2},
        schedulerInterval="step",
        gradientClipNorm=1.0,
        precision="bf16",
        numWorkers=2,
        progress=False,
    ).fit(digits)
    history = model.summary.history
    rates = [record["learning_rate"] for record in history]
    assert max(rates) == pytest.approx(2e-2, rel=0.1)
    assert rates[-1] < 1e-4
    assert ["val_accuracy" in record for record in history] == [False, False, False, True, False, True]
    assert history[-1]["val_accuracy"] > 0.93
    assert model.summary.microBatchSize is None
    with pytest.raises(ModuleError, match="scheduler 'OneCycle' is unknown") as caught:
        TorchClassifier(module=DigitsCNN, scheduler="OneCycle").fit(digits)
    assert "'OneCycleLR'" in caught.value.hint


def test_a_regressor_learns_and_feeds_the_evaluator(frame: DataFrame) -> None:
    model = TorchRegressor(
        module=MLP,
        labelCol="target",
        learningRate=0.02,
        epochs=15,
        batchSize=64,
        microBatchSize="auto",
        predictBatchSize="auto",
        numWorkers=3,
        progress=False,
    ).fit(frame)
    scored = model.transform(frame)
    assert dict(scored.dtypes)["prediction"] == "double"
    assert RegressionEvaluator(labelCol="target").evaluate(scored) < 1.6
    assert model.summary.microBatchSize == 64


@pytest.fixture(scope="module")
def pairs(spark: SparkSession) -> DataFrame:
    rows = pd.DataFrame({"item": np.arange(600) % 10, "value": np.linspace(-1, 1, 600)})
    rows["target"] = rows["item"] / 10 + 2 * rows["value"]
    return spark.createDataFrame(rows, "item int, value double, target double")


def test_several_inputs_arrive_as_arguments_in_their_own_dtypes(pairs: DataFrame) -> None:
    model = TorchRegressor(
        module=TwoInputs, inputCols=["item", "value"], labelCol="target", learningRate=0.05, epochs=30, progress=False
    ).fit(pairs)
    assert [spec.dtype for spec in model.trained.inputs] == ["int64", "float32"]
    assert model.summary.history[-1]["loss"] < 0.01
    assert RegressionEvaluator(labelCol="target", metricName="mse").evaluate(model.transform(pairs)) < 0.01


def named_loss(output: dict[str, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    return (output["total"] - label) ** 2


@pytest.mark.newest
def test_the_general_estimator_takes_any_loss_and_names_several_outputs(pairs: DataFrame) -> None:
    model = TorchEstimator(
        module=TwoInputs,
        moduleParams={"named": True},
        inputCols=["item", "value"],
        labelCol="target",
        outputCols=["all", "part"],
        loss=named_loss,
        optimizer=torch.optim.SGD,
        optimizerParams={"momentum": 0.9},
        epochs=2,
        numWorkers=2,
        progress=False,
    ).fit(pairs)
    scored = model.transform(pairs)
    assert dict(scored.dtypes)["all"] == "float"
    row = scored.first()
    with torch.no_grad():
        out = model.module(torch.tensor([row["item"]]), torch.tensor([row["value"]], dtype=torch.float32))
    assert (row["all"], row["part"]) == pytest.approx((float(out["total"]), float(out["base"])), abs=1e-6)


def test_equal_rows_are_split_by_place_when_they_crowd_into_one_rank(spark: SparkSession) -> None:
    same = spark.range(3000).selectExpr("array(1f, 2f, 3f, 4f, 5f) features", "1f label")
    model = TorchRegressor(module=MLP, numWorkers=3, progress=False).fit(same)
    assert model.summary.rows == 3000
    assert max(rank["rows"] for rank in model.summary.ranks) < 1300


def test_an_id_column_stands_in_for_the_contents(frame: DataFrame) -> None:
    numbered = frame.withColumn("id", F.monotonically_increasing_id())
    estimator = TorchRegressor(module=MLP, labelCol="target", numWorkers=2, progress=False)
    by_content = estimator.fit(numbered).summary.fingerprint
    assert estimator.setIdCol("id").fit(numbered).summary.fingerprint != by_content


def test_params_have_getters_setters_copies_and_explanations() -> None:
    estimator = TorchClassifier(module=MLP, epochs=3)
    assert (estimator.getEpochs(), estimator.getBatchSize(), estimator.getLabelCol()) == (3, 256, "label")
    assert estimator.setEpochs(5).setLabelCol("y").getEpochs() == 5
    changed = estimator.copy({estimator.epochs: 9})
    assert (changed.getEpochs(), estimator.getEpochs(), changed.uid) == (9, 5, estimator.uid)
    text = estimator.explainParams()
    assert "epochs: passes over the training rows (> 0) (default: 1, current: 5)" in text
    for param in estimator.params:
        name = param.name[0].upper() + param.name[1:]
        assert callable(getattr(estimator, f"get{name}")), param.name
        assert callable(getattr(estimator, f"set{name}")), param.name


@pytest.mark.newest
def test_two_ranks_meet_at_rank_0_where_the_driver_cannot_be_reached(frame: DataFrame) -> None:
    estimator = TorchRegressor(module=MLP, labelCol="target", numWorkers=2, epochs=2, progress=False)
    usual = estimator.fit(frame).module.state_dict()
    other = estimator.setRendezvous("rank0").fit(frame).module.state_dict()
    assert all(torch.equal(usual[name], other[name]) for name in usual)
