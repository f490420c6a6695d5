"""Classifiers of text and images of which nothing is set but columns, and rows from which nothing can be learned."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyspark.sql import DataFrame, SparkSession

from sparktorch import ImageClassificationModel, ImageClassifier, TextClassifier
from sparktorch.errors import ColumnError
from sparktorch.tasks.images.image_size import usual_size
from tests.support.tiny_transformers import bert, tokenizer_folder

WORDS = ["the", "day", "was", "fine", "grim", "long"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = bert("BertForMaskedLM", max_position_embeddings=8)
    return str(tokenizer_folder(tmp_path_factory.mktemp("model"), WORDS, config))


def texts(spark: SparkSession, rows: int, classes: int) -> DataFrame:
    lines = [(f"the day was {WORDS[3 + number % classes]} {number}", number % classes) for number in range(rows)]
    return spark.createDataFrame(lines, "text string, label int")


def picture(level: int, height: int = 10, width: int = 12) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def pictures(spark: SparkSession, levels: list[int], **size: int) -> DataFrame:
    rows = [(bytearray(picture(level + number % 20, **size)), int(level > 99)) for number, level in enumerate(levels)]
    return spark.createDataFrame(rows, "photo binary, bright int")


def test_images_need_their_columns_only_and_the_model_is_saved(spark: SparkSession, tmp_path: Path) -> None:
    rows = pictures(spark, [10, 200] * 32)
    classifier = ImageClassifier(imageCol="photo", labelCol="bright", progress=False)
    learned, _ = classifier._learn_from(rows)
    assert learned.completed().getModuleParams() == {"classes": 2, "shape": [3, 10, 12]}
    assert learned.completed().completed().getLearningRate() == 3e-3
    model = classifier.copy({classifier.epochs: 4, classifier.batchSize: 16}).fit(rows)
    scored = model.transform(pictures(spark, [12, 190] * 4, height=15, width=9)).collect()
    assert [row.prediction for row in scored] == [row.bright for row in scored]
    model.save(str(tmp_path / "model"))
    loaded = ImageClassificationModel.load(str(tmp_path / "model"))
    assert loaded.predict(picture(200)) == 1.0


def test_large_images_are_resized_and_unreadable_ones_do_not_say_a_size(spark: SparkSession) -> None:
    rows = [(bytearray(picture(1, 600, 300)),)] * 3 + [(bytearray(b"no image"),), (None,)]
    assert usual_size(spark.createDataFrame(rows, "photo binary"), "photo") == (128, 64)
    assert usual_size(spark.createDataFrame(rows[3:], "photo binary"), "photo") is None


@pytest.mark.parametrize("label", ["CASE WHEN label = 2 THEN NULL ELSE label END", "label"])
def test_rows_that_null_policy_drop_leaves_out_are_neither_counted_nor_have_classes(
    spark: SparkSession, folder: str, label: str
) -> None:
    text = "CASE WHEN label < 2 THEN text END text"  # Rows without a text or a label are those of the third class.
    rows = texts(spark, 60, 3).selectExpr("text" if label != "label" else text, f"{label} AS label")
    learned, _ = TextClassifier(modelFolder=folder, nullPolicy="drop", progress=False)._learn_from(rows)
    assert learned._learned is not None
    assert (learned._learned.rows, learned._learned.classes) == (40, 2)


@pytest.mark.parametrize("rows", [2, 12])
def test_of_rows_too_few_to_hold_any_back_there_is_a_model_without_nan(
    spark: SparkSession, folder: str, rows: int
) -> None:
    data = texts(spark, rows, 2)
    model = TextClassifier(modelFolder=folder, numWorkers=2, progress=False).fit(data)
    assert not model.summary.heldOut
    assert all(math.isfinite(value) for row in model.transform(data).collect() for value in row.probability)


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (["0"] * 60, "the same label in all rows"),
        (["-1", "0"] * 30, r"labels -1 \.\.\. 0, and classes are counted from 0"),
        ([], "no rows that train"),
    ],
)
def test_one_class_and_no_rows_are_refused_in_a_sentence(
    spark: SparkSession, folder: str, labels: list[str], what: str
) -> None:
    rows = spark.createDataFrame(
        [(f"the day {n}", int(label)) for n, label in enumerate(labels)], "text string, label int"
    )
    with pytest.raises(ColumnError, match=what):
        TextClassifier(modelFolder=folder, progress=False).fit(rows)
    with pytest.raises(ColumnError, match=what):
        ImageClassifier(imageCol="text", progress=False).fit(rows)


def test_labels_that_name_rows_are_refused(spark: SparkSession, folder: str) -> None:
    rows = texts(spark, 60, 2)
    with pytest.raises(ColumnError, match=r"(?s)labels up to 1,000,001, .*does labelCol name identifiers"):
        TextClassifier(modelFolder=folder, progress=False).fit(rows.selectExpr("text", "label + 1000000 AS label"))
