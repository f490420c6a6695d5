"""Models of transformers as users have them, in folders or as configurations: trained, scored, saved and written."""

from __future__ import annotations

import json
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
    folder: Path, texts: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # tokenizers sets it in a process that forks
    classifier = TextClassifier(modelFolder=str(folder), epochs=8, maxLength=16, microBatchSize=8, **QUICK)
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
    with pytest.raises(
        Exception, match=r"there is no folder /nowhere on .*(\n.*)*copy it to this path on each machine"
    ):
        moved.transform(texts).collect()


def test_a_decoder_classifies_text_by_a_tokenizer_that_pads(texts: DataFrame, tmp_path: Path) -> None:
    from transformers import DistilBertConfig, GPT2Config

    words = ["the", "day", "was", *GOOD, *BAD]
    small: dict[str, Any] = {"architectures": ["GPT2Model"], "n_embd": 32, "n_layer": 1, "n_head": 2}
    decoder = tokenizer_folder(tmp_path / "decoder", words, GPT2Config(n_positions=16, **small))
    classifier = TextClassifier(modelFolder=str(decoder), maxLength=16, epochs=4, **QUICK)
    model = classifier.fit(texts)
    assert model.module.config.pad_token_id == 0
    assert np.mean([row.prediction == row.label for row in model.transform(texts).collect()]) > 0.9
    settings = decoder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": None}))
    with pytest.raises(ModuleError, match=r"(?s)has no padding token.*set tokenizer.pad_token"):
        classifier.copy().setModelFolder(f"{decoder}/").fit(texts)
    # Its tokenizer makes token_type_ids, which this model does not take.
    tiny: dict[str, Any] = {"architectures": ["DistilBertModel"], "dim": 32, "n_layers": 1, "n_heads": 2}
    other = tokenizer_folder(tmp_path / "other", words, DistilBertConfig(max_position_embeddings=16, **tiny))
    TextClassifier(modelFolder=str(other), maxLength=16, **QUICK).fit(texts).transform(texts).collect()


def test_images_are_classified_by_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    from PIL import Image
    from transformers import ViTForImageClassification, ViTImageProcessorPil

    torch.manual_seed(0)
    ViTForImageClassification(vit()).save_pretrained(tmp_path / "model")
    size = {"height": 8, "width": 8}
    ViTImageProcessorPil(size=size).save_pretrained(tmp_path / "model")
    (tmp_path / "images").mkdir()
    for number in range(24):
        Image.new("RGB", (10, 10), (200 * (number % 2), 30, number)).save(tmp_path / f"images/{number:02}.png")
    files = spark.read.format("binaryFile").load(str(tmp_path / "images"))
    rows = files.selectExpr("content AS image", "int(substr(path, -6, 2)) % 2 AS label")
    model = ImageClassifier(modelFolder=str(tmp_path / "model"), epochs=8, **QUICK).fit(rows)
    scored = model.transform(rows).collect()
    assert all(row.prediction == row.label for row in scored)


def test_a_model_given_as_a_configuration_trains_on_its_own_loss_and_is_saved_without_pickles(
    spark: SparkSession, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    rows = [(row.tolist(),) for row in random.integers(3, WORDS, (32, LENGTH))]
    data = spark.createDataFrame(rows, "ids array<long>")
    estimator = TorchEstimator(
        module=gpt2(), featuresCol="ids", labelCol="", preprocess=causal, epochs=2, outputCols=["logits"], **QUICK
    ).setInputDtypes({"ids": "int64"})
    estimator.save(str(tmp_path / "estimator"))
    model = TorchEstimator.load(str(tmp_path / "estimator")).fit(data)
    losses = [record["loss"] for record in model.summary.history]
    assert losses[1] < losses[0]
    model.save(str(tmp_path / "model"))
    loaded = type(model).load(str(tmp_path / "model"))
    (first,) = model.transform(data).limit(1).select("logits").collect()
    (again,) = loaded.transform(data).limit(1).select("logits").collect()
    assert first == again
    ids = torch.tensor([rows[0][0]])
    with torch.inference_mode():
        expected = loaded.module(input_ids=ids).logits[0]
    torch.testing.assert_close(torch.tensor(first.logits), expected, atol=1e-5, rtol=0)


def test_what_a_folder_cannot_be_used_for_is_refused_before_a_job(
    folder: Path, texts: DataFrame, tmp_path: Path
) -> None:
    with pytest.raises(ModuleError, match="there is no config"):
        TorchClassifier(module=str(tmp_path), featuresCol="text", **QUICK).fit(texts)
    with pytest.raises(ConfigError, match="maxLength is 17, and the model and its tokenizer take 16 tokens"):
        TextClassifier(modelFolder=str(folder), maxLength=17, **QUICK).fit(texts)
    usual = TextClassifier(modelFolder=str(folder), **QUICK)
    assert usual.completed().getPreprocess().max_length == 16
    with pytest.raises(ConfigError, match="module is set, which the estimator chooses itself"):
        TextClassifier(modelFolder=str(folder), maxLength=9, **QUICK).setModule("torch.nn:Linear").fit(texts)
    with pytest.raises(ModuleError, match=r"(?s)BertConfig has no entry 'num_label' .*did you mean 'num_labels'"):
        TorchClassifier(module=str(folder), moduleParams={"num_label": 3}, featuresCol="text", **QUICK).fit(texts)
    with pytest.raises(ModuleError, match="column 'label' holds no text"):
        TextClassifier(modelFolder=str(folder), maxLength=9, textCol="label", **QUICK).fit(texts)
    weighted = TorchEstimator(module=bert(), featuresCol="ids", preprocess=masked, weightCol="label", **QUICK)
    weighted.setInputDtypes({"ids": "int64"})
    with pytest.raises(ModuleError, match=r"(?s)the model's own loss returns one number .*set loss, such as"):
        weighted.fit(texts.selectExpr("array(1L, 2L) AS ids", "label"))
