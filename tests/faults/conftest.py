"""One cluster for the ring: two executors with a process and a slot each, which may be killed as often as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressor
from tests.support.nets import Score
from tests.support.sessions import spark_session


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = {"spark.deploy.maxExecutorRetries": "-1", "spark.task.maxFailures": "8"}
    settings |= {"spark.decommission.enabled": "true", "spark.python.daemon.module": "sparktorch.spark.daemon"}
    warehouse = tmp_path_factory.mktemp("warehouse")
    with spark_session("local-cluster[2,1,1024]", warehouse, **settings) as session:
        yield session


@pytest.fixture(scope="package")
def frame(spark: SparkSession) -> DataFrame:
    """400 rows: `features` (5 floats), `label`, `held_out`."""
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 5))
    held_out = np.arange(400) % 4 == 0
    return spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1), "held_out": held_out}))


def regressor(*callbacks: Callback, **params: Any) -> TorchRegressor:
    values: dict[str, Any] = {"module": Score, "batchSize": 32, "numWorkers": 2, "progress": False}
    return TorchRegressor(**{**values, "validationIndicatorCol": "held_out", "callbacks": list(callbacks), **params})
