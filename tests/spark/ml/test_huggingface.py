"""Models of transformers as users have them: folders, configurations, tokenizers; trained, scored, saved and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from sparktorch import (
    ImageClassifier,
    TextClassificationModel,
    TextClassifier,
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
)
from sparktorch.errors import ConfigError, ModuleError
from tests.support.tiny_transformers import LENGTH, WORDS, bert, causal, gpt2, masked, tokenizer_folder, vit

GOOD, BAD = ["fine", "bright", "kind"], ["grim", "dull", "vile"]
QUICK: dict[str, Any] = {"batchSize": 16, "learningRate": 0.01, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = bert("BertForMaskedLM", max_position_embeddings=16)
    return tokenizer_folder(tmp_path_factory.mktemp("model"), ["the", "day", "was", *GOOD, *BAD], config)


@pytest.fixture(scope="module")
def texts(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    random = np.random.default_rng(0)
    lines = []
    for number in range(96):
        label = number % 2
        filler = ["the", "day", "was"] * int(random.integers(1, 4))
        lines.append(f"{' '.join(filler)} {random.choice((BAD, GOOD)[label])}\t{label}")
    path = tmp_path_factory.mktemp("texts") / "rows.tsv"
    path.write_text("\n".join(lines))
    return spark.read.csv(str(path), sep="\t", schema="text string, label int")


def test_text_from_a_file_is_classified_by_a_folder_and_written_as_one(
    folder: Path, texts: DataFrame, tmp_path: Path
) -> None:
    classifier = TextClassifier(modelFolder=str(folder), epochs=4, microBatchSize=8, **QUICK)
    model = classifier.fit(texts)
    scored = model.transform(texts).collect()
    assert np.mean([row.prediction == row.label for row in scored]) > 0.9

    model.save_pretrained(str(tmp_path / "folder"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder", local_files_only=True)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.module.state_dict()), atol=0, rtol=0)
    classify = pipeline(
        "text-classification", model=again, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "folder")
    )
    answers = classify([row.text for row in scored[:8]])
    assert [answer["label"] for answer in answers] == [f"LABEL_{int(row.prediction)}" for row in scored[:8]]

    model.save(str(tmp_path / "saved"))
    loaded = TextClassificationModel.load(str(tmp_path / "saved"))
    assert loaded.transform(texts).select("prediction").collect() == [(row.prediction,) for row in scored]
    moved = loaded.copy({loaded.modelFolder: "/nowhere"})
    with pytest.raises(Exception, match="there is no folder /nowhere on .*(\n.*)*copy it to this path on each machine"):
        moved.transform(texts).collect()
