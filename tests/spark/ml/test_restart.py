"""A fit that loses a worker starts again from its checkpoint, and ends as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressor
from sparktorch.errors import PersistenceError, RankLostError
from tests.spark.modules import Dies
from tests.spark.scored import same_weights
from tests.support.faults import Fault
from tests.support.nets import Score


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5))
    return spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1)}))


def regressor(folder: Path, **params: Any) -> TorchRegressor:
    values: dict[str, Any] = {
        "module": Score,
        "epochs": 3,
        "batchSize": 32,
        "numWorkers": 2,
        "progress": False,
        "checkpointDir": str(folder / "checkpoints"),
        "checkpointInterval": 2,
        "checkpointUnit": "step",
        **params,
    }
    return TorchRegressor(**values)


def test_ranks_wait_for_a_silent_driver_as_long_as_they_are_told(
    frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.distributed.server._BEAT_SECONDS", 600.0)  # after the first heartbeat
    slow = Fault("slow", tmp_path / "marks", seconds=0.5)  # 15 s and more
    with pytest.raises(RankLostError, match="died while training"):
        regressor(tmp_path, driverTimeout=1.0, callbacks=[slow]).fit(frame)


def test_the_next_fit_goes_on_with_an_unfinished_training_and_no_other(
    frame: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killer = Dies(tmp_path / "killed", rank=1, step=15)
    with pytest.raises(RankLostError):
        regressor(tmp_path, callbacks=[killer]).fit(frame)
    with pytest.raises(PersistenceError, match=r"learningRate: '0\.001' there, '0\.5' here"):
        regressor(tmp_path, learningRate=0.5).fit(frame)
    model = regressor(tmp_path).fit(frame)
    told = [record.getMessage() for record in caplog.records if "going on from" in record.getMessage()]
    calm = regressor(tmp_path / "calm").fit(frame)
    assert same_weights(model, calm)
    assert len(told) == 1
    assert re.search(
        f"going on from the checkpoint in {tmp_path}/checkpoints: (epoch 2, after step [1-4]|after epoch 1)$", told[0]
    )
