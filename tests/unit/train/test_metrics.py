"""Metrics are completed and tried on the driver, and what cannot be computed is refused there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import MulticlassF1Score

from sparktorch.base.config import Task
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.train.recipe.dry_run import DryRunResult, complete, dry_run
from sparktorch.train.recipe.metrics import Metrics
from sparktorch.train.recipe.recipe import Recipe
from tests.support.metrics import Lists, Mean, Rows
from tests.support.nets import Logit, Mlp, Score

FEATURES = {"column 'features'": torch.ones(2, 5)}


def trial(module: Any, task: Task, metrics: dict[str, Any]) -> DryRunResult:
    loss = {Mlp: "CrossEntropyLoss", Logit: "BCEWithLogitsLoss", Score: "MSELoss"}[module]
    label = torch.ones(2) if task == "regression" else torch.ones(2, dtype=torch.float64)
    return complete(dry_run(Recipe(module=module, loss=loss), task, 0, FEATURES, label), metrics, task)


def test_what_a_metric_asks_for_is_filled_in_where_it_is_known() -> None:
    given = MulticlassF1Score(num_classes=3)
    metrics = {
        "f1": "F1Score",
        "of_two": {"name": "MulticlassF1Score", "num_classes": 3, "average": "macro"},
        "class": MulticlassF1Score,
        "rows": "tests.support.metrics:Rows",
        "given": given,
    }
    assert trial(Mlp, "classification", metrics).metrics == {
        "f1": {"name": "F1Score", "task": "multiclass", "num_classes": 3},
        "of_two": {"name": "MulticlassF1Score", "num_classes": 3, "average": "macro"},
        "class": {"name": MulticlassF1Score, "num_classes": 3},
        "rows": {"name": "tests.support.metrics:Rows"},
        "given": given,
    }
    assert not given.update_called
    assert trial(Logit, "classification", {"f1": "F1Score"}).metrics == {"f1": {"name": "F1Score", "task": "binary"}}
    assert trial(Score, "regression", {"r2": "R2Score"}).metrics == {"r2": "R2Score"}


@pytest.mark.parametrize(
    ("module", "task", "metrics", "message", "hint"),
    [
        (Score, "regression", {"e": "R2Scor"}, "metric 'R2Scor' is unknown", "did you mean 'R2Score'?"),
        (Score, "regression", {"e": {"name": "R2Score", "power": 2}}, "metric 'e' cannot be built: ValueE", "(adjus"),
        (Score, "regression", {"e": MetricCollection([MeanSquaredError()])}, "metric 'e' is a Metr", "one by one"),
        (Score, "regression", {"loss": "R2Score"}, "metrics cannot hold one named 'loss'", "another name"),
        (Mlp, "classification", {"e": "BinaryF1Score"}, "metric 'e' failed on the first row: ", "(rows, classes)"),
        (Mlp, "classification", {"e": "ConfusionMatrix"}, "metric 'e' gives a tensor of shape (3, 3)", "vectors"),
        (Score, "regression", {"e": Mean()}, "metric 'e' cannot be computed over several workers: Mean keeps", "'cat'"),
        (Score, "regression", {"e": Lists}, "metric 'e' cannot be computed over several workers: Lists keeps", "'cat'"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused(
    module: Any, task: Task, metrics: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(SparkTorchError) as caught:
        trial(module, task, metrics)
    assert caught.value.what.startswith(message)
    assert hint in caught.value.hint
    assert caught.value.where == {"param": "metrics"}


def test_without_torchmetrics_the_hint_is_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigError, match="torchmetrics, which cannot be imported") as caught:
        trial(Score, "regression", {"r2": "R2Score"})
    assert caught.value.hint.startswith("pip install sparktorch-estimator[metrics]")
    assert trial(Score, "regression", {}).metrics == {}


def test_an_instance_is_copied_before_it_counts() -> None:
    given = Rows()
    metrics = Metrics({"rows": given}, "regression", "cpu")
    metrics.update(torch.ones(3), torch.ones(3))
    assert metrics.compute() == {"rows": 3.0}
    assert metrics.compute() == {"rows": 0.0}
    assert int(given.rows) == 0
