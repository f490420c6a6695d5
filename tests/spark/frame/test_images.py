"""Images from files, from Spark's sources for them, and from bytes: decoded in the ranks and in scoring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchRegressionModel, TorchRegressor
from sparktorch.errors import ColumnError
from tests.spark.columns import Flat
from tests.spark.scored import sorted_rows

ROWS, SHAPE = 12, (4, 5, 3)


pytestmark = pytest.mark.landing


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (ROWS, *SHAPE), dtype=np.uint8)


@pytest.fixture(scope="module")
def images(spark: SparkSession, pixels: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:02}.png")
    number = F.substring_index(F.substring_index("path", "/", -1), ".", 1).cast("int").alias("id")
    files = spark.read.format("binaryFile").load(str(folder)).withColumn("file", F.struct("*"))
    source = spark.read.format("image").load(str(folder)).withColumn("path", F.col("image.origin"))
    rows = [(i, (image / 255).astype(np.float32).transpose(2, 0, 1).ravel().tolist()) for i, image in enumerate(pixels)]
    numbers = spark.createDataFrame(rows, "id int, by_hand array<float>").withColumn("target", F.col("by_hand")[0])
    found = files.select(number, "content", "file").join(source.select(number, "image"), "id").join(numbers, "id")
    return found.repartition(2).cache()


def fit(data: DataFrame, column: str, **params: Any) -> Any:
    given = {
        "featuresCol": column,
        "labelCol": "target",
        "idCol": "id",
        "batchSize": ROWS,
        "epochs": 2,
        "progress": False,
    }
    module = {"module": Flat, "moduleParams": {"width": int(np.prod(SHAPE)), "expects": params.pop("expects", None)}}
    return TorchRegressor(**{**given, **module, "learningRate": 0.1, "seed": 3, **params}).fit(data)


@pytest.fixture(scope="module")
def by_hand(images: DataFrame) -> TorchRegressionModel:
    model: TorchRegressionModel = fit(images, "by_hand")
    return model


@pytest.mark.parametrize(
    ("column", "params"),
    [
        ("content", {"inputLayouts": {"content": "image"}}),
        ("file", {}),
        ("image", {}),
        ("content", {"inputLayouts": {"content": "image"}, "inputShapes": {"content": [3, 4, 5]}, "storage": "disk"}),
    ],
    ids=["bytes", "binaryFile", "image source", "from disk"],
)
def test_images_train_and_score_as_the_numbers_they_hold(
    images: DataFrame, by_hand: TorchRegressionModel, column: str, params: dict[str, Any]
) -> None:
    model = fit(images, column, expects=["float32 4"], **params)
    assert model.trained.inputs[0].shape == (3, 4, 5)
    for found, wanted in zip(model.module.parameters(), by_hand.module.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    scores = [
        [row["prediction"] for row in sorted_rows(m.transform(images), "id")]
        for m in (model, model.copy().setFeaturesCol("image"), by_hand)
    ]
    np.testing.assert_allclose(scores[0], scores[2], atol=1e-4)
    np.testing.assert_allclose(scores[1], scores[2], atol=1e-4)


def test_files_that_sparks_image_source_cannot_read_are_nulls(
    spark: SparkSession, pixels: np.ndarray, tmp_path: Path
) -> None:
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number:02}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    data = spark.read.format("image").load(str(tmp_path)).withColumn("target", F.lit(0.5)).withColumn("id", F.lit(1))
    with pytest.raises(ColumnError, match="column 'image' has 1 row with null values"):
        fit(data, "image")
    fitted = fit(data, "image", nullPolicy="drop")
    assert (fitted.summary.rows, fitted.summary.droppedRows) == (ROWS, 1)
    scored = fitted.setHandleInvalid("skip").transform(data)
    assert len(scored.select("prediction").collect()) == ROWS
