"""Rows a second of `model.transform`, beside what one would score with otherwise.

400,000 rows of 100 float32 through an MLP 100-256-1, and images of 32x32x3 through ResNet-20, on CPU,
`local[2]`, one torch thread a task. The sides in Spark read the same cached rows, in 8 partitions, so that the scan
costs next to nothing, and end in the noop sink; each has Python workers of its own, as in an application of its own.
The slow ones score a quarter of the rows, and are compared with `transform` of that quarter. The floor is an Arrow UDF
that drains the rows: all of them, the quarter, and the quarter in 200 partitions, where tasks cost more than rows.
Raw torch is two processes, as the tasks are, that score tensors in memory, in batches of the same size. Two threads in
one would share each batch.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import FloatType
from torch import nn

from benchmarks.by_hand import MLP, WIDTH
from benchmarks.common import Goal, arguments, interleave, machine, report, seconds, session, workspace
from sparktorch import TorchClassifier, TorchRegressionModel, TorchRegressor

TASKS = 2
PARTITIONS = 8
QUARTER = "transform, a quarter of the rows"
MANY = "transform, 200 partitions of 500 rows"
FLOORS = {QUARTER: "floor, a quarter of the rows", MANY: "floor, 200 partitions of 500 rows"}
FEW_ROWS = 500  # Each of many partitions has so few rows.
SLOW = ("mlflow spark_udf", "row udf")
BATCH = 2048
IMAGE_BATCH = 64
GOALS = {
    "transform / predict_batch_udf": Goal(1.2, at_least=True),
    "transform / floor": Goal(0.65, at_least=True),
    "transform / raw torch": Goal(0.45, at_least=True),
    f"seconds of {MANY} / of the floor": Goal(2),
    "transform / mlflow spark_udf": Goal(3, at_least=True),
    "transform / row udf": Goal(10, at_least=True),
    "classifier / transform": Goal(0.7, at_least=True),
    "images / raw torch": Goal(0.9, at_least=True),
}


class Block(nn.Module):
    """Two convolutions and a shortcut, which pads with zeros where it must grow."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, inputs, height, width)` to `(rows, outputs, height / stride, width / stride)`."""
        body = self.body(x)
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(body + nn.functional.pad(shortcut, (0, 0, 0, 0, 0, body.shape[1] - x.shape[1])))


class ResNet(nn.Module):
    """ResNet-20 (He et al. 2016, https://arxiv.org/abs/1512.03385, section 4.2) over flat images; one number each."""

    width = 3 * 32 * 32

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        channels = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(*pair) for pair in pairwise(channels)))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `(rows, 3072)` to `(rows, 1)`."""
        images = x.view(-1, 32, 32, 3).permute(0, 3, 1, 2)
        scores: torch.Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return scores


class Raw:
    """A module and its share of the rows, in a process of the raw torch side."""

    module: nn.Module
    batches: tuple[torch.Tensor, ...]

    @classmethod
    def prepare(cls, module: nn.Module, rows: int, width: int, batch: int) -> None:
        """Makes the rows of this process."""
        torch.set_num_threads(1)
        cls.module, cls.batches = module.eval(), torch.split(torch.randn(rows, width), batch)

    @classmethod
    @torch.inference_mode()
    def score(cls, _: int) -> float:
        """Scores the rows, and returns the sum of the predictions."""
        return float(torch.cat([cls.module(rows) for rows in cls.batches]).sum())

    @classmethod
    def processes(cls, module: nn.Module, rows: int, width: int, batch: int) -> ProcessPoolExecutor:
        """Starts a process for each task slot."""
        share = (module, rows // TASKS, width, batch)
        return ProcessPoolExecutor(TASKS, multiprocessing.get_context("spawn"), cls.prepare, share)


def cached(spark: SparkSession, path: Path, rows: int, width: int) -> DataFrame:
    """Writes random `features` and a `label` of 0 or 1 as Parquet, and caches them in equal partitions."""
    values = np.random.default_rng(7).standard_normal((rows, width), np.float32)
    features = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width).cast(pa.list_(pa.float32()))
    pq.write_table(pa.table({"features": features, "label": pa.array((values[:, 0] > 0).astype(np.float32))}), path)
    frame = spark.read.parquet(str(path)).repartition(PARTITIONS).cache()
    frame.count()
    return frame


def fitted(module: type[nn.Module] | str, rows: DataFrame, batch: int, **params: Any) -> Any:
    """Fits for an epoch; a classifier if it is given a loss for one."""
    estimator = TorchClassifier if "loss" in params else TorchRegressor
    return estimator(module=module, predictBatchSize=batch, progress=False, device="cpu", **params).fit(rows)


def floor_udf() -> Any:
    """Returns an Arrow UDF that takes the batches and gives a constant: its seconds are Spark's."""

    def drain(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for batch in batches:
            yield pa.array(np.zeros(len(batch), np.float32))

    arrow_udf: Any = F.arrow_udf  # type: ignore[attr-defined]  # pyspark's stubs leave it out
    return arrow_udf(drain, "float")


def batch_udf(module: nn.Module, path: Path) -> Any:
    """Returns `predict_batch_udf`, as its documentation shows it."""
    torch.save(module.state_dict(), path)

    def make_predict() -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
        torch.set_num_threads(1)
        module = MLP()
        module.load_state_dict(torch.load(path, weights_only=True))
        module.eval()

        def predict(inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
            with torch.inference_mode():
                scores: npt.NDArray[Any] = module(torch.from_numpy(inputs)).squeeze(1).numpy()
            return scores

        return predict

    return predict_batch_udf(make_predict, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[WIDTH]])


def mlflow_udf(spark: SparkSession, model: TorchRegressionModel, work: Path) -> Any:
    """Returns `mlflow.pyfunc.spark_udf` of the model, logged to a store of its own."""
    import mlflow  # Processes that import this file for its ResNet do not need it.

    from sparktorch.tracking import log_model

    mlflow.set_tracking_uri(f"sqlite:///{work}/mlflow.db")
    experiment = mlflow.create_experiment("score", artifact_location=(work / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        uri = log_model(model).model_uri
    return mlflow.pyfunc.spark_udf(spark, uri, result_type="double", env_manager="local")


def row_udf(module: nn.Module) -> Any:
    """Returns a Python UDF that calls the module for every row."""

    def predict(features: list[float]) -> float:
        with torch.inference_mode():
            return float(module(torch.tensor(features)))

    return F.udf(predict, "float", useArrow=False)


def check(scored: dict[str, DataFrame]) -> None:
    """Compares what the sides say of the first rows.

    Raises:
        RuntimeError: They differ.
    """
    predictions = {name: [row[-1] for row in frame.limit(100).collect()] for name, frame in scored.items()}
    for name, values in predictions.items():
        if not np.allclose(values, predictions["transform"], atol=1e-4):
            raise RuntimeError(f"{name} predicts other values than transform")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rows, images, rounds = (40_000, 800, 2) if options.quick else (400_000, 4_000, 5)
    few = rows // 4
    with workspace() as work, session(work, cores=TASKS) as spark:
        table = cached(spark, work / "rows.parquet", rows, WIDTH)
        pictures = cached(spark, work / "images.parquet", images, ResNet.width)
        subset = table.limit(few).repartition(PARTITIONS).cache()
        scattered = subset.repartition(few // FEW_ROWS).cache()
        model = fitted(MLP, subset.limit(1000), BATCH)
        classifier = fitted(MLP, subset.limit(1000), BATCH, loss="BCEWithLogitsLoss")
        resnet = fitted("benchmarks.score:ResNet", pictures.limit(100), IMAGE_BATCH)
        raw = Raw.processes(model.module, rows, WIDTH, BATCH)
        raw_images = Raw.processes(resnet.module, images, ResNet.width, IMAGE_BATCH)
        udfs = {
            "predict_batch_udf": batch_udf(model.module, work / "state.pt"),
            "mlflow spark_udf": mlflow_udf(spark, model, work),
            "row udf": row_udf(model.module),
            "floor": floor_udf(),
        }

        def through(name: str) -> Callable[[DataFrame], DataFrame]:
            return lambda frame: frame.withColumn("prediction", udfs[name](F.col("features")))

        transforms: dict[str, Callable[[DataFrame], DataFrame]] = {
            "transform": model.transform,
            QUARTER: model.transform,
            MANY: model.transform,
            "classifier": classifier.transform,
            "images": resnet.transform,
        } | {name: through(name) for name in udfs}
        transforms |= dict.fromkeys(FLOORS.values(), transforms["floor"])
        frames = dict.fromkeys(transforms, (table, rows))
        frames |= {"images": (pictures, images)} | dict.fromkeys((QUARTER, FLOORS[QUARTER], *SLOW), (subset, few))
        frames |= dict.fromkeys((MANY, FLOORS[MANY]), (scattered, few))

        def scored(name: str, frame: DataFrame) -> DataFrame:
            spark.sparkContext.environment["SIDE"] = name  # Each side gets Python workers of its own.
            return transforms[name](frame.select("features"))

        def sink(name: str) -> float:
            frame, count = frames[name]
            return count / seconds(lambda: scored(name, frame).write.format("noop").mode("overwrite").save())

        def processes(pool: ProcessPoolExecutor, count: int) -> float:
            return count / seconds(lambda: list(pool.map(Raw.score, range(TASKS))))

        check(
            {name: scored(name, subset) for name in ("transform", "predict_batch_udf", "mlflow spark_udf", "row udf")}
        )
        sides = {name: partial(sink, name) for name in transforms} | {
            "raw torch": partial(processes, raw, rows),
            "images, raw torch": partial(processes, raw_images, images),
        }
        interleave(sides, 2)  # These turns warm up.
        samples = interleave(sides, rounds)
        raw.shutdown()
        raw_images.shutdown()
    rate = {name: statistics.median(values) for name, values in samples.items()}
    others = ("predict_batch_udf", "floor", "raw torch")
    report(
        "score",
        samples={f"{name}, rows/s": values for name, values in samples.items()},
        ratios={f"transform / {other}": rate["transform"] / rate[other] for other in others}
        | {f"transform / {slow}": rate[QUARTER] / rate[slow] for slow in SLOW}
        | {
            "floor / row udf": rate[FLOORS[QUARTER]] / rate["row udf"],
            f"seconds of {MANY} / of the floor": rate[FLOORS[MANY]] / rate[MANY],
            "classifier / transform": rate["classifier"] / rate["transform"],
            "images / raw torch": rate["images"] / rate["images, raw torch"],
        },
        goals=GOALS,
        facts={"rows": rows, "images": images, "quarter": few, **machine("torch", "pyspark", "pyarrow", "mlflow")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
