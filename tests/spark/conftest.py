"""One Spark session for the whole ring, the demo's data as DataFrames, and small modules.

Settings that make the session quick (`tests/support/sessions.py`), and DataFrames that are cached and of
the driver's rows, hide what a user's session does with files and tables: tests/paths proves that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits

from tests.support.sessions import spark_session

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session("local[3]", tmp_path_factory.mktemp("warehouse")) as session:
        yield session


@pytest.fixture(scope="package")
def digits(spark: SparkSession) -> DataFrame:
    """1,797 rows: `features` vector, `pixels` array<double>, `label` int, `held_out` boolean."""
    x, y = load_digits(return_X_y=True)
    rows = [
        (Vectors.dense(row), row.tolist(), int(label), i % 5 == 0)
        for i, (row, label) in enumerate(zip(x / 16, y, strict=True))
    ]
    frame = spark.createDataFrame(rows, ["features", "pixels", "label", "held_out"])
    return frame.repartition(4).cache()


@pytest.fixture(scope="package")
def table() -> pd.DataFrame:
    """1,001 rows with weights: `features` (5 floats), `label` class 0 ... 2, `target` float, `weight`."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(1001, 5)).astype(np.float32)
    target = x @ np.array([1.0, -2.0, 0.5, 0.0, 3.0], np.float32) + draw.normal(size=1001).astype(np.float32)
    return pd.DataFrame(
        {
            "features": list(x),
            "label": np.digitize(target, [-2.0, 2.0]).astype(np.int64),
            "target": target,
            "weight": draw.uniform(0.1, 2.0, 1001).astype(np.float32),
        }
    )


@pytest.fixture(scope="package")
def frame(spark: SparkSession, table: pd.DataFrame) -> DataFrame:
    schema = "features array<float>, label bigint, target float, weight float"
    data = spark.createDataFrame(table, schema).repartition(3).cache()
    data.count()
    return data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowClient]:
    """An MLflow store of its own, with the experiment "tests", number 1."""
    import mlflow

    directory = tmp_path_factory.mktemp("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{directory}/mlflow.db")
    mlflow.create_experiment("tests", artifact_location=(directory / "artifacts").as_uri())
    mlflow.set_experiment("tests")
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)
