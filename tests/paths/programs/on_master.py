"""Carries out requests on the master it is given; prints what came of each, by its name, as one JSON line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from pyspark.sql import DataFrame, SparkSession

import sparktorch
from sparktorch import Callback, RunContext, TorchClassifier, TorchEstimator
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.spark.checks.doctor import check_all
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.train.callbacks import FitContext

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
    return {"findings": [asdict(finding) for finding in findings]}


def refused(data: DataFrame, directory: str) -> Result:
    """Fits on GPUs, which there are none of."""
    try:
        classifier("cuda").fit(data)
    except SparkTorchError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


class Heavy(Callback):
    """Holds more than a Connect server takes in a message, and says in which ranks it has arrived."""

    ranks = "all"

    def __init__(self, folder: str) -> None:
        self._folder, self._ballast = folder, torch.ones(33 << 20)

    def on_fit_start(self, context: FitContext) -> None:
        Path(self._folder, f"heavy-{context.world.rank}").write_text(str(int(self._ballast.sum())))


def heavy(data: DataFrame, directory: str) -> Result:
    """Fits with much to send."""
    classifier("cpu").setCallbacks([Heavy(directory)]).setEpochs(1).fit(data)
    return {"arrived": [path.read_text() for path in sorted(Path(directory).glob("heavy-*"))]}


def stream(data: DataFrame, directory: str) -> Result:
    """Scores a stream with a model that is too large to travel with the tasks of other queries."""
    rows, sink = f"{directory}/rows", f"{directory}/sink"
    data.limit(20).write.parquet(rows)
    wide = TorchClassifier(
        module="torch.nn:Linear", moduleParams={"in_features": 64, "out_features": 8192}, numWorkers=1, epochs=1
    ).setRawPredictionCol("")
    model = wide.setProbabilityCol("").fit(data.limit(100))
    arriving = data.sparkSession.readStream.schema(data.schema).parquet(rows)
    writer = model.transform(arriving).writeStream.option("checkpointLocation", f"{directory}/checkpoint")
    query = writer.trigger(availableNow=True).format("parquet").start(sink)
    query.awaitTermination(120)
    assert query.exception() is None, query.exception()
    return {"rows": len(data.sparkSession.read.parquet(sink).select("prediction").collect())}


def looped(data: DataFrame, directory: str) -> Result:
    """Runs a loop on the rows and a function without any; fits the same."""

    def loop(context: RunContext) -> dict[str, torch.Tensor]:
        torch.manual_seed(context.seed)
        net = torch.nn.Linear(64, 10)
        net, optimizer = context.wrap(net, torch.optim.AdamW(net.parameters(), lr=0.02))
        for epoch in context.epochs:
            for batch in context.loader(epoch):
                losses = torch.nn.functional.cross_entropy(net(batch.inputs[0]), batch.label.long(), reduction="none")
                optimizer.zero_grad()
                batch.mean(losses).backward()
                optimizer.step()
        return context.state_dict(net)

    same = {
        "labelCol": "label",
        "validationIndicatorCol": "is_validation",
        "epochs": 2,
        "batchSize": 128,
        "seed": 3,
        "numWorkers": 2,
    }
    net = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 64, "out_features": 10}}
    model = TorchEstimator(**net, loss="CrossEntropyLoss", learningRate=0.02, **same).fit(data)
    state = sparktorch.run(loop, data, progress=False, **same)[0]
    weights = model.module.state_dict()
    far = max(float((weights[name] - state[name]).abs().max()) for name in weights)
    spark = data.sparkSession
    return {"far": far, "ranks": sparktorch.run(lambda context: context.rank, numWorkers=2, spark=spark)}


def rdds(data: DataFrame, directory: str) -> Result:
    """Asks for the rows as an RDD of tensors."""
    try:
        sparktorch.tensor_rdd(data)
    except ConfigError as error:
        return {"message": str(error)}
    return {"message": ""}


REQUESTS = {
    **{"loop": looped, "check": check, "fit on GPUs": refused},
    **{"much to send": heavy, "stream": stream, "rdds": rdds},
}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:])))
