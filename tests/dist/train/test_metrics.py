"""Metrics of torchmetrics are those of all validation rows, whichever ranks have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from sparktorch.base.config import Task, TrainConfig
from sparktorch.data.columns import VALIDATION
from sparktorch.train.recipe.recipe import Recipe
from tests.support.frames import Table
from tests.support.nets import Logit, Mlp, Score
from tests.support.ranks import train_job, train_on
from tests.support.reference import validation_rows

ROWS = 403


def without_validation_rows(table: Table, ranks: int, rank: int) -> Table:
    keys = table.parts(ranks)[rank].arrays["k"]
    flags = table.arrays[VALIDATION] & ~np.isin(table.arrays["k"], keys)
    return replace(table, arrays={**table.arrays, VALIDATION: flags})


def trained(
    table: Table, ranks: int, task: Task, module: Any, metrics: dict[str, Any], loss: str
) -> tuple[dict[str, float], torch.Tensor, np.ndarray[Any, Any]]:
    job = train_job(
        table,
        Recipe(module=module, metrics=metrics, loss=loss, learning_rate=0.02),
        TrainConfig(task=task, batch_size=64, epochs=2, seed=5),
    )
    state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
    built = module().eval()
    built.load_state_dict(state)
    held_out = validation_rows(table)
    with torch.no_grad():
        return metas[0]["history"][-1], built(held_out.x), held_out.y.numpy()


def test_metrics_of_classes_are_those_of_all_rows_with_a_rank_without_any() -> None:
    table = without_validation_rows(Table.random(ROWS, classes=3, weighted=True, validated=True), 3, 0)
    metrics = {
        "f1": {"name": "F1Score", "task": "multiclass", "num_classes": 3, "average": "macro"},
        "auroc": {"name": "MulticlassAUROC", "num_classes": 3},  # exact: keeps every row
        "recall": {"name": "MulticlassRecall", "num_classes": 3, "average": None},
        "by_class": {"name": "tests.support.metrics:by_class", "num_classes": 3},
        "rows": "tests.support.metrics:Rows",
    }
    record, scores, labels = trained(table, 3, "classification", Mlp, metrics, "CrossEntropyLoss")
    probability = scores.double().softmax(1).numpy()
    classes = probability.argmax(1)
    recall = sk.recall_score(labels, classes, average=None)
    expected = {
        "val_f1": sk.f1_score(labels, classes, average="macro"),
        "val_auroc": sk.roc_auc_score(labels, probability, multi_class="ovr", average="macro"),
        **{f"val_recall_{i}": value for i, value in enumerate(recall)},
        **{f"val_by_class_multiclassrecall_{i}": value for i, value in enumerate(recall)},
        "val_rows": len(labels),
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_metrics_of_two_classes_take_one_score_as_a_logit() -> None:
    table = Table.random(ROWS, classes=2, validated=True)
    metrics = {"ap": "BinaryAveragePrecision", "brier": "tests.support.metrics:Brier"}
    record, scores, labels = trained(table, 1, "classification", Logit, metrics, "BCEWithLogitsLoss")
    probability = scores.double().sigmoid().numpy()[:, 0]
    expected = {
        "val_ap": sk.average_precision_score(labels, probability),
        "val_brier": ((probability - labels) ** 2).mean(),
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_metrics_of_values_are_those_of_all_rows() -> None:
    table = Table.random(ROWS, validated=True)
    metrics = {"r2": "R2Score", "pearson": "PearsonCorrCoef", "spearman": "SpearmanCorrCoef", "rmse": {
        "name": "MeanSquaredError", "squared": False}}  # fmt: skip
    record, output, labels = trained(table, 3, "regression", Score, metrics, "MSELoss")
    values = output.double().numpy()
    ranked = [np.argsort(np.argsort(column)) for column in (values, labels)]
    expected = {
        "val_r2": sk.r2_score(labels, values),
        "val_pearson": np.corrcoef(values, labels)[0, 1],
        "val_spearman": np.corrcoef(*ranked)[0, 1],
        "val_rmse": sk.root_mean_squared_error(labels, values),
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_each_validation_starts_anew_and_a_rank_without_any_rows_takes_part() -> None:
    table = Table.random(ROWS, validated=True)
    job = train_job(
        table,
        Recipe(module=Score, metrics={"rows": "tests.support.metrics:Rows", "spearman": "SpearmanCorrCoef"}),
        TrainConfig(task="regression", batch_size=64, epochs=3, seed=5),
    )
    held_out = int(table.arrays[VALIDATION].sum())
    for partitions in ([[], table.batches()], [table.batches(), [], []]):
        history = train_on(partitions, job)[1][0]["history"]
        assert [record["val_rows"] for record in history] == [held_out] * 3
        assert len({record["val_spearman"] for record in history}) > 1
