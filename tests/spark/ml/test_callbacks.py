"""Hooks run in the workers and on the driver, beside metrics, averages and validation by step."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame
from sklearn.metrics import f1_score
from torch import nn

from sparktorch import TorchClassifier
from tests.support.callbacks import Adds, Diary


def classifier(**params: object) -> TorchClassifier:
    given = {"numWorkers": 2, "epochs": 2, "batchSize": 100, "progress": False, "validationIndicatorCol": "held_out"}
    return TorchClassifier(module=lambda: nn.Linear(64, 10), **{**given, **params})  # type: ignore[arg-type]


def test_hooks_run_in_every_worker_and_on_the_driver(digits: DataFrame, tmp_path: Path) -> None:
    diary = Diary(tmp_path, "all")
    estimator = classifier(
        callbacks=[diary, Adds(7)],
        metrics={"f1": {"name": "MulticlassF1Score", "average": "macro"}},  # num_classes is known
        validationUnit="step",
        validationInterval=10,
        emaDecay=0.9,
    )
    model = estimator.fit(digits)
    history = model.summary.history
    assert diary.told == history
    assert {place["steps"] for place in diary.places} == {15}
    written = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert written["rank0"] == written["rank1"]
    assert [line for line in written["rank1"] if line.startswith("validated")] == [
        "validated 1 10",
        "validated 2 20",
        "validated 2 30",
    ]
    assert [[v["step"] for v in record["validations"]] for record in history] == [[10], [20, 30]]
    assert model.summary.totalIterations == 30
    assert history[-1]["added"] == 7.0
    scored = model.transform(digits.where("held_out")).select("label", "prediction").toPandas()
    assert history[-1]["val_f1"] == pytest.approx(
        f1_score(scored["label"], scored["prediction"], average="macro"), abs=1e-6
    )
