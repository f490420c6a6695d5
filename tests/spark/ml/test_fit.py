"""What a user does with the estimators: fit, transform, evaluate, inspect."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.ml.evaluation import (
    MulticlassClassificationEvaluator,
)
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchClassificationModel, TorchClassifier, TorchEstimator, TorchRegressor
from sparktorch.errors import ModuleError
from tests.spark.modules import MLP, DigitsCNN, TwoInputs
from tests.spark.scored import same_weights


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


@pytest.fixture(scope="module")
def pairs(spark: SparkSession) -> DataFrame:
    rows = pd.DataFrame({"item": np.arange(600) % 10, "value": np.linspace(-1, 1, 600)})
    rows["target"] = rows["item"] / 10 + 2 * rows["value"]
    return spark.createDataFrame(rows, "item int, value double, target double")


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


@pytest.mark.newest
def test_two_ranks_meet_at_rank_0_where_the_driver_cannot_be_reached(frame: DataFrame) -> None:
    estimator = TorchRegressor(module=MLP, labelCol="target", numWorkers=2, epochs=2, progress=False)
    assert same_weights(estimator.fit(frame), estimator.copy().setRendezvous("rank0").fit(frame))


def test_equal_rows_are_split_by_place_when_they_crowd_into_one_rank(spark: SparkSession) -> None:
    same = spark.range(3000).selectExpr("array(1f, 2f, 3f, 4f, 5f) features", "1f label")
    model = TorchRegressor(module=MLP, numWorkers=3, progress=False).fit(same)
    assert model.summary.rows == 3000
    assert max(rank["rows"] for rank in model.summary.ranks) < 1300
