"""Carries out requests on the master it is given; prints what came of each, by its name, as one JSON line."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchClassificationModel, TorchClassifier
from sparktorch.errors import SparkTorchError
from sparktorch.spark import predict
from sparktorch.spark.barrier import Launch
from sparktorch.spark.doctor import check_all

Result = dict[str, object]


def main(master: str, directory: str, settings: dict[str, str], *requests: str) -> dict[str, Result]:
    sys.path.insert(0, str(Path(__file__).parents[3] / "jobs"))
    from datasets import digits

    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    connect = master.startswith("connect:")
    spark = (builder.remote(master.removeprefix("connect:")) if connect else builder.master(master)).getOrCreate()
    results = {name: REQUESTS[name](digits(spark), directory) for name in requests}
    spark.stop()
    return results


def classifier(device: str) -> TorchClassifier:
    return TorchClassifier(
        module="torch.nn:Linear",
        moduleParams={"in_features": 64, "out_features": 10},
        validationIndicatorCol="is_validation",
        learningRate=0.02,
        epochs=5,
        batchSize=128,
        numWorkers=2,
        device=device,
        seed=3,
    )


def check(data: DataFrame, directory: str) -> Result:
    """Checks the cluster for a fit that is too large, with a checkpoint directory that is another on each executor."""
    findings = check_all(data.sparkSession, Launch(world_size=3), "relative/path", 200)
    return {"findings": [finding.to_dict() for finding in findings]}


def refused(data: DataFrame, directory: str) -> Result:
    """Fits on GPUs, which there are none of."""
    try:
        classifier("cuda").fit(data)
    except SparkTorchError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def whole(data: DataFrame, directory: str) -> Result:
    """Fits, scores, saves and loads."""
    spark = data.sparkSession
    model = classifier("auto").fit(data)
    state = b"".join(tensor.numpy().tobytes() for tensor in model.module.state_dict().values())
    scored = model.transform(data).select("label", "prediction", "probability").toPandas()

    path = f"{directory}/model"
    model.write().overwrite().save(path)
    loaded = TorchClassificationModel.load(path)
    predict.INLINE_BYTES = 0  # from here on, weights travel as a file
    loaded.registerUDF("score")
    data.createOrReplaceTempView("digits")
    by_sql = [row[0] for row in spark.sql("select score(features) from digits").collect()]
    again = loaded.transform(data).select("label", "prediction", "probability").toPandas()
    return {
        "weights": hashlib.sha256(state).hexdigest(),
        "accuracy": float((scored["label"] == scored["prediction"]).mean()),
        "round_trip": bool(again.equals(scored)) and loaded.summary == model.summary,
        "by_sql": by_sql == scored["prediction"].tolist(),
        "hosts": [rank["host"] for rank in model.summary.ranks],
        "session": type(spark).__module__,
    }


REQUESTS = {"check": check, "fit": whole, "fit on GPUs": refused}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:])))
