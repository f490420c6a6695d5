"""Models, estimators and a checkpoint as version 0.1.0 saved them, under `tests/data/saved`.

`python -m tests.support.saved` writes them anew. Do so only to add one: what lies there stands for what users have,
and a later version must read it as it is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.ml import Pipeline
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TorchClassifier, TorchEstimator, TorchRegressor
from tests.support.programs import ROOT
from tests.support.sessions import spark_session

SAVED = ROOT / "tests" / "data" / "saved"

NET: dict[str, Any] = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 3, "out_features": 3}}


def rows(spark: SparkSession) -> DataFrame:
    """96 rows: `x` array of 3 floats, `label` class 0 ... 2, `target` float."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(96, 3)).round(3)
    values = [(row.tolist(), int(np.argmax(row)), float(row.sum())) for row in x]
    return spark.createDataFrame(values, "x array<float>, label int, target float")


def checkpointed(directory: Path | str) -> TorchClassifier:
    """An estimator that keeps checkpoints, of two workers."""
    return TorchClassifier(
        **NET,
        featuresCol="x",
        batchSize=16,
        epochs=4,
        scheduler="StepLR",
        schedulerParams={"step_size": 1, "gamma": 0.8},
        emaDecay=0.9,
        gradientClipNorm=2.0,
        strategy="zero1",
        numWorkers=2,
        seed=4,
        checkpointDir=str(directory),
        keepCheckpoints=4,
        progress=False,
    )


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def main() -> None:
    """Writes all of them."""
    import mlflow

    from sparktorch.tracking import flavor

    shutil.rmtree(SAVED, ignore_errors=True)
    SAVED.mkdir()
    with spark_session("local[2]", Path("/tmp/saved-warehouse")) as spark:
        data = rows(spark)
        scores: dict[str, Any] = {}
        quick: dict[str, Any] = {"featuresCol": "x", "batchSize": 32, "progress": False}
        model = TorchClassifier(**NET, **quick, thresholds=[0.2, 0.5, 0.9], handleInvalid="keep").fit(data)
        graph = TorchRegressor(module=_net, labelCol="target", predictionCol="found", **quick).fit(data)
        for name, saved, column in (("model", model, "probability"), ("graph", graph, "found")):
            saved.save(str(SAVED / name))
            values = [row[0] for row in saved.transform(data).select(column).collect()]
            scores[name] = [value.toArray().tolist() if hasattr(value, "toArray") else value for value in values]
        flavor.save_model(model, SAVED / "mlflow", input_example=data.limit(2).toPandas()[["x"]])
        (SAVED / "scores.json").write_text(json.dumps(scores))
        estimator = TorchEstimator(
            **NET, **quick, loss="tests.support.nets:mean_output_error", metrics={"r2": "R2Score"}, maxRestarts=2
        )
        Pipeline(stages=[estimator, checkpointed("checkpoints")]).save(str(SAVED / "pipeline"))
        first = TorchRegressor(
            module=NET["module"], moduleParams={"in_features": 3, "out_features": 1}, labelCol="target", **quick
        ).fit(data)
        pickled = TorchRegressor(module=first, optimizerParams={"betas": (0.9, 0.95)}, labelCol="target", **quick)
        pickled.write().option("allowPickle", "true").save(str(SAVED / "pickled"))
        fitted = checkpointed(SAVED / "checkpoint").fit(data)
        (SAVED / "history.json").write_text(json.dumps(fitted.summary.history))
        for path in sorted((SAVED / "checkpoint").glob("step-*"))[2:]:  # as if it had been killed in the third epoch
            shutil.rmtree(path)
        (SAVED / "checkpoint" / "finished.json").unlink()
    for path in SAVED.rglob(".*.crc"):
        path.unlink()
    assert mlflow.pyfunc.load_model(str(SAVED / "mlflow")) is not None


if __name__ == "__main__":
    main()
