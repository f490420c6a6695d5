"""Whole fits and scores on a CUDA device, beside the same on the CPU; `make test-gpu` runs it, where there is one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TextClassifier, TorchClassificationModel, TorchClassifier
from sparktorch.errors import ClusterError
from tests.support.resume import Counts
from tests.support.sessions import spark_session

DEVICES = torch.cuda.device_count()
SHAPE = (3, 4, 4)


class Convolved(nn.Module):
    """Scores of three classes for images of 3 x 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.norm(self.convolution(x)).tanh().flatten(1))
        return scores


class OnDevice(Convolved):
    """Has kernels for the accelerator alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cpu:
            raise NotImplementedError("no kernel for the host")
        return super().forward(x)


def scaled(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": columns["features"] * 0.5}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session(f"local[{DEVICES + 1}]", tmp_path_factory.mktemp("warehouse")) as session:
        yield session


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("rows") / "rows")
    made = spark.range(600).selectExpr("id", "transform(sequence(1, 48), x -> float(sin(id * x))) AS features")
    label = "CASE WHEN features[0] + features[1] > 0.5 THEN 2 WHEN features[5] > 0 THEN 1 ELSE 0 END AS label"
    made.selectExpr("id", "features", label, "id % 5 = 0 AS held_out").write.parquet(path)
    return spark.read.parquet(path)


def classifier(**params: Any) -> TorchClassifier:
    given: dict[str, Any] = {
        "module": Convolved,
        "inputShapes": {"features": list(SHAPE)},
        "optimizer": "SGD",
        "optimizerParams": {"momentum": 0.9},
        "learningRate": 0.05,
        "batchSize": 60,
        "epochs": 3,
        "idCol": "id",
        "validationIndicatorCol": "held_out",
        "progress": False,
    }
    return TorchClassifier(**given | params)


# The same on the CPU as on the device; what the CPU does differently has its own entry in `ON_CPU`.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows on the device": ("device", {}),
    "rows on disk": ("disk", {"storage": "disk"}),
    "rows in the host's memory": ("memory", {"preprocess": scaled}),
    "micro-batches": ("device", {"microBatchSize": 16}),
    "micro-batches that are found": ("device", {"microBatchSize": "auto"}),
    "channels last": ("device", {"channelsLast": True}),
    "compiled": ("device", {"compile": True}),
    "deterministic": ("device", {"deterministic": True}),
    "an average of the weights": ("device", {"emaDecay": 0.9}),
    "clipped": ("device", {"gradientClipNorm": 0.1}),
    "zero1": ("device", {"strategy": "zero1"}),
    "zero2": ("device", {"strategy": "zero2", "strategyParams": {"min_parameters": 1}}),
    "zero3": ("device", {"strategy": "zero3", "strategyParams": {"min_parameters": 1}}),
    "zero3, offloaded": ("device", {"strategy": "zero3", "strategyParams": {"min_parameters": 1, "cpu_offload": True}}),
    "mesh": ("device", {"strategy": "mesh", "strategyParams": {"shard": 1}}),
}
ON_CPU: dict[str, dict[str, Any]] = {
    "micro-batches that are found": {},
    "compiled": {},
    "zero3, offloaded": {"strategy": "zero3", "strategyParams": {"min_parameters": 1}},
}


def weights(model: TorchClassificationModel) -> torch.Tensor:
    return torch.cat([value.double().flatten().cpu() for value in model.module.state_dict().values()])


def difference(first: TorchClassificationModel, second: TorchClassificationModel) -> float:
    return float((weights(first) - weights(second)).abs().max())


@pytest.mark.parametrize("way", WAYS)
def test_a_fit_trains_what_the_cpu_trains(way: str, rows: DataFrame) -> None:
    storage, params = WAYS[way]
    model = classifier(**params, device="cuda").fit(rows)
    expected = classifier(**ON_CPU.get(way, params), device="cpu").fit(rows)
    found = difference(model, expected)
    (rank,) = model.summary.ranks
    print(f"{way}: weights differ by {found:.1e}; {rank}")
    assert (rank["device"], rank["storage"]) == ("cuda:0", storage)
    assert rank["peak_device_memory"] > 0
    assert found < 1e-4
    losses = [[record["val_loss"] for record in each.summary.history] for each in (model, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_precisions_differ_as_their_mantissas_do(rows: DataFrame) -> None:
    expected = classifier(device="cpu").fit(rows)
    found = {
        precision: difference(classifier(device="cuda", precision=precision).fit(rows), expected)
        for precision in ("fp32", "tf32", "fp16", "bf16")
    }
    print({name: f"{value:.1e}" for name, value in found.items()})
    assert found["fp32"] < 1e-4
    assert found["fp32"] < found["tf32"] < found["bf16"] < 0.3
    assert found["fp16"] < found["bf16"]


def test_all_devices_train_one_model(rows: DataFrame) -> None:
    model = classifier(device="auto", numWorkers=DEVICES).fit(rows)
    assert [rank["device"] for rank in model.summary.ranks] == [f"cuda:{index}" for index in range(DEVICES)]
    assert difference(model, classifier(device="cpu").fit(rows)) < 1e-4


def test_more_workers_than_devices_train_on_the_cpu_or_say_why_not(rows: DataFrame) -> None:
    model = classifier(device="auto", numWorkers=DEVICES + 1).fit(rows)
    assert {rank["device"] for rank in model.summary.ranks} == {"cpu"}
    with pytest.raises(ClusterError) as caught:
        classifier(device="cuda", numWorkers=DEVICES + 1).fit(rows)
    print(caught.value)


def test_a_module_that_the_host_cannot_run_trains_and_scores(rows: DataFrame, tmp_path: Path) -> None:
    model = classifier(module=OnDevice, dryRun="worker", device="auto").fit(rows)
    scored = model.transform(rows)
    measured = np.mean([row.prediction == row.label for row in scored.select("prediction", "label").collect()])
    print(f"accuracy {measured:.3f}")
    assert measured > 0.8
    model.write().overwrite().save(str(tmp_path / "model"))
    again = TorchClassificationModel.load(str(tmp_path / "model"))
    first, second = (each.transform(rows).select("id", "prediction").sort("id").collect() for each in (model, again))
    assert first == second


@pytest.mark.parametrize("params", [{}, {"predictPrecision": "bf16"}, {"predictCompile": True}], ids=str)
def test_scores_are_those_of_the_cpu(params: dict[str, Any], rows: DataFrame) -> None:
    model = classifier(device="cpu").fit(rows)

    def scores(device: str, **more: Any) -> np.ndarray:
        for name, value in {"device": device, **more}.items():
            model.set(model.getParam(name), value)
        scored = model.transform(rows).select("id", "probability").sort("id").collect()
        return np.array([row.probability.toArray() for row in scored])

    expected, found = scores("cpu"), scores("cuda", **params)
    print(f"{params}: probabilities differ by {np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, atol=2e-2 if "predictPrecision" in params else 1e-5)


def test_a_stream_is_scored(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    rows.write.parquet(str(tmp_path / "in"))
    model = classifier(module=OnDevice, dryRun="worker").fit(rows)
    stream = model.transform(spark.readStream.schema(rows.schema).parquet(str(tmp_path / "in")))
    query = stream.select("id", "prediction").writeStream.format("parquet").trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "log")).start(str(tmp_path / "out")).awaitTermination()
    assert spark.read.parquet(str(tmp_path / "out")).where("prediction IS NOT NULL").count() == 600


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning")  # MLflow, of its own functions
def test_a_pyfunc_scores_on_the_device(rows: DataFrame, tmp_path: Path) -> None:
    import mlflow

    from sparktorch.tracking import flavor

    model = classifier(module=OnDevice, dryRun="worker").fit(rows)
    flavor.save_model(model, str(tmp_path / "model"), pytorch=False)
    some = np.array([row.features for row in rows.limit(7).collect()], np.float32)
    inputs = {"features": some.reshape(-1, *SHAPE)}
    scored = mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(inputs)
    assert len(scored["prediction"]) == 7


def test_a_killed_worker_is_replaced_and_its_training_goes_on(rows: DataFrame, tmp_path: Path) -> None:
    calm = classifier(device="cuda", deterministic=True).fit(rows)
    rough = classifier(
        device="cuda",
        deterministic=True,
        callbacks=[Counts(tmp_path, rank=0, step=12)],
        checkpointDir=str(tmp_path / "checkpoints"),
        checkpointUnit="step",
        checkpointInterval=4,
        maxRestarts=1,
    ).fit(rows)
    assert (tmp_path / "killed").exists()
    assert difference(rough, calm) == 0


def test_a_model_of_transformers_is_fine_tuned(spark: SparkSession, tmp_path: Path) -> None:
    from tests.support.tiny_transformers import bert, tokenizer_folder

    folder = tokenizer_folder(tmp_path, ["red", "blue", "round", "square"], bert(num_labels=2))
    texts = spark.createDataFrame(
        [(f"{colour} {form}", int(colour == "red")) for colour in ("red", "blue") for form in ("round", "square")] * 20,
        "text string, label int",
    )
    fit = functools.partial(
        TextClassifier, modelFolder=str(folder), maxLength=8, epochs=8, batchSize=20, learningRate=3e-3, progress=False
    )
    model, expected = fit(device="cuda").fit(texts), fit(device="cpu").fit(texts)
    assert model.summary.ranks[0]["device"] == "cuda:0"
    losses = [each.summary.history[-1]["loss"] for each in (model, expected)]
    print(losses)
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)
    scored = model.transform(texts).select("prediction", "label").collect()
    assert all(row.prediction == row.label for row in scored)
