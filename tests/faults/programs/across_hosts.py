"""A driver that fits what it is asked to, one JSON object a line, and says as one what came out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressor
from sparktorch.errors import SparkTorchError
from sparktorch.train.callbacks import FitContext
from tests.support.nets import Score

__all__ = ["HIDDEN", "Gate", "fit", "rows"]

HIDDEN = 500


class Gate(Callback):
    """Each rank notes in a folder that it has taken a step, and goes on once there is a file `open`."""

    ranks = "all"

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def on_step_end(self, context: FitContext) -> None:
        if context.step == self._step:
            (self._folder / f"rank-{context.world.rank}").touch()
            while not (self._folder / "open").exists():
                time.sleep(0.01)


def rows(spark: SparkSession) -> DataFrame:
    """300 rows: `features` of five numbers, `label` their sum."""
    x = np.random.default_rng(0).normal(size=(300, 5))
    return spark.createDataFrame(pd.DataFrame({"features": list(x), "label": x.sum(1)}))


def fit(data: DataFrame, weights: str, gate: list[Any] | None = None, **params: Any) -> dict[str, Any]:
    """Trains on two ranks, with Params over those given here; returns what came out, ready for JSON."""
    started = time.monotonic()
    fixed = {
        "module": Score,
        "moduleParams": {"hidden": HIDDEN},
        "epochs": 3,
        "batchSize": 32,
        "numWorkers": 2,
        "progress": False,
        "callbacks": [Gate(Path(gate[0]), gate[1])] if gate else None,
    }
    try:
        model = TorchRegressor(**{**fixed, **params}).fit(data)
    except SparkTorchError as error:
        form = error.to_dict()
        return {**form, "message": str(error), "seconds": time.monotonic() - started}
    np.save(weights, torch.nn.utils.parameters_to_vector(model.module.parameters()).detach().numpy())
    return {
        "hosts": [rank["host"] for rank in model.summary.ranks],
        "losses": [record["loss"] for record in model.summary.history],
        "seconds": time.monotonic() - started,
    }


def main(master: str, settings: dict[str, str]) -> None:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    data = rows(spark)
    print(json.dumps({"host": spark.conf.get("spark.driver.host")}), flush=True)
    for line in sys.stdin:
        print(json.dumps(fit(data, **json.loads(line))), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
