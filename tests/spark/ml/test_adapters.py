"""A fit of adapters on a base from a folder: scored, saved, loaded, logged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.sql import SparkSession

from sparktorch import TorchClassificationModel, TorchClassifier
from sparktorch.errors import PersistenceError
from tests.support.adapters import LENGTH, WORDS, Adapted, adapted, save_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft reads it
    pytest.mark.landing,
]


def test_a_fitted_saved_and_loaded_model_scores_as_its_merged_module(spark: SparkSession, tmp_path: Path) -> None:
    folder = str(save_base(tmp_path / "base"))
    random = np.random.default_rng(3)
    ids = random.integers(1, WORDS, (96, LENGTH))
    table = pd.DataFrame({"ids": ids.tolist(), "mask": [[1] * LENGTH] * 96, "label": (ids[:, 0] > 1000).astype(float)})
    frame = spark.createDataFrame(table).coalesce(1)  # each worker that scores imports peft, which takes seconds
    estimator = TorchClassifier(
        module="tests.support.adapters:adapted",
        moduleParams={"folder": folder},
        inputCols=["ids", "mask"],
        numWorkers=2,
        batchSize=24,
        epochs=2,
        learningRate=0.02,
        seed=3,
        progress=False,
    )
    model = estimator.fit(frame)
    assert model.summary.history[-1]["loss"] < model.summary.history[0]["loss"]
    assert len(model.trained.weights) < 20_000 < 250_000 < (Path(folder) / "model.safetensors").stat().st_size

    model.save(str(tmp_path / "model"))
    saved = sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert saved < 60_000
    with pytest.raises(PersistenceError, match="and loading it calls that"):
        TorchClassificationModel.load(str(tmp_path / "model"))
    loaded = TorchClassificationModel.read().option("allowPickle", "true").load(str(tmp_path / "model"))
    scored = [np.array([row["probability"] for row in m.transform(frame).collect()]) for m in (model, loaded)]
    np.testing.assert_array_equal(*scored)

    module = model.module
    untouched = adapted(folder).state_dict()
    frozen = [name for name, value in module.named_parameters() if not value.requires_grad]
    assert all(torch.equal(module.state_dict()[name], untouched[name]) for name in frozen)
    merged = Adapted(module.model.merge_and_unload()).eval()
    with torch.inference_mode():
        expected = merged(torch.from_numpy(ids), torch.ones(ids.shape, dtype=torch.int64)).softmax(1)
    np.testing.assert_allclose(scored[0], expected, atol=1e-6)

    save_base(Path(folder), seed=2)
    with pytest.raises(Exception, match="not those that its adapters were trained on"):
        loaded.module  # noqa: B018 - builds it
