"""Fits, and scores, once the session of the rows has been stopped; prints what is said of each as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparktorch import TorchRegressor
from sparktorch.errors import ConfigError
from tests.support.sessions import spark_session


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return error.what
    return "nothing"


def main(folder: str) -> None:
    linear = {"in_features": 1, "out_features": 1}
    estimator = TorchRegressor(module="torch.nn:Linear", moduleParams=linear, epochs=1, batchSize=5, progress=False)
    with spark_session("local[1]", Path(folder)) as spark:
        rows = spark.createDataFrame([([float(i)], float(i)) for i in range(20)], "features array<float>, label float")
        fitted_on, never_fitted = estimator.prepare(rows), estimator.prepare(rows)
        model = estimator.fit(fitted_on)
    calls = {
        "fit": lambda: estimator.fit(rows),
        "fit on rows that were read": lambda: estimator.fit(fitted_on),
        "fit on rows that were not": lambda: estimator.fit(never_fitted),
        "transform": lambda: model.transform(rows),
    }
    print(json.dumps({name: said(call) for name, call in calls.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
