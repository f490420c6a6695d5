"""The sides of `benchmarks.ingest` that need Spark, a process for each kind of column.

`python -m benchmarks.ingest_sides KIND FOLDER ROWS` takes a turn for every line on its standard input: each side once,
every other turn in reverse. Each turn prints what the sides have measured as a line of JSON. A KIND that ends in
`, cached` reads from DataFrames that Spark holds in memory. KIND `inputs` writes the files that the others read, and
takes no turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import SparseVector, VectorUDT
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import seconds, session, touch_memory
from sparktorch.data.columns import Columns, InputOptions
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.spark.frame.partition import split
from sparktorch.spark.frame.prepare import prepare

__all__ = ["CACHED", "CORES_THAT_DECODE", "WIDTH"]

CACHED = ", cached"
CORES = 2
CORES_THAT_DECODE = "images: cores that decode"
WIDTH, SCALARS = 100, 99
BATCH = 1_024
IMAGE, IMAGE_BATCH = 224, 64
OPENING = "65536"  # Spark takes opening a file as long as reading so many bytes.
BATCHES = "rows long, wall double, cpu double"  # `to_batches` yields rows of this schema.
SPARSE_WIDTH, FILLED = 1_000, 10


def write_rows(spark: SparkSession, directory: Path, rows: int) -> None:
    """Has Spark write the rows as arrays and as scalar columns, in a file for each core."""
    drafts = directory / "drafts"
    drafts.mkdir()
    for part in range(CORES):
        random = np.random.default_rng(part)
        features = random.standard_normal((rows // CORES, WIDTH), np.float32)
        label = pa.array(features[:, 0])
        offsets = pa.array(np.arange(0, features.size + 1, WIDTH, dtype=np.int32))
        arrays = {"features": pa.ListArray.from_arrays(offsets, pa.array(features.reshape(-1))), "label": label}
        scalars = {f"f{index}": pa.array(np.ascontiguousarray(features[:, index])) for index in range(SCALARS)}
        for name, columns in (("arrays", arrays), ("scalars", {**scalars, "label": label})):
            (drafts / name).mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), drafts / name / f"part-{part}.parquet")
    for name in ("arrays", "scalars"):
        spark.read.parquet(str(drafts / name)).write.parquet(str(directory / name))


def write_vectors(spark: SparkSession, directory: Path, rows: int) -> None:
    """Writes the rows of the arrays as dense vectors, and others as sparse ones."""
    arrays = spark.read.parquet(str(directory / "arrays"))
    dense = arrays.select(array_to_vector("features").alias("features"), "label")
    dense.write.parquet(str(directory / "dense"))

    sparse = F.udf(lambda row: sparse_row(row), VectorUDT())
    numbered = spark.range(0, rows, 1, CORES)
    numbered.select(sparse("id").alias("features"), F.col("id").cast("float").alias("label")).write.parquet(
        str(directory / "sparse")
    )


def write_images(directory: Path, count: int) -> None:
    """Writes photographs of nothing: smooth noise, which JPEG files of 10 to 20 kB hold."""
    directory.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (28, 28, 3), np.uint8))
        coarse.resize((IMAGE, IMAGE), Image.Resampling.BICUBIC).save(directory / f"{number:05d}.jpg", quality=90)


class Files(Dataset[torch.Tensor]):
    """The same files, one by one."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self._paths[number]) as image:
            pixels = np.asarray(image.convert("RGB"))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)


def sparse_row(number: int) -> SparseVector:
    """Returns a row of the sparse vectors."""
    random = np.random.default_rng(number)
    return SparseVector(SPARSE_WIDTH, sorted(random.choice(SPARSE_WIDTH, FILLED, replace=False)), random.random(FILLED))


def to_shard(batches: Iterable[pa.RecordBatch], columns: Columns) -> Iterator[pa.RecordBatch]:
    """Reads rows as a rank does."""
    yield _count(read_shard(batches, columns, by_key=columns.keyed).rows)


def to_count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Counts rows and bytes, and makes nothing of them."""
    sizes = [(batch.num_rows, batch.nbytes) for batch in batches]
    assert sum(size for _, size in sizes)
    yield _count(sum(rows for rows, _ in sizes))


def to_batches(batches: Iterable[pa.RecordBatch], columns: Columns, size: int) -> Iterator[pa.RecordBatch]:
    """Reads rows as a rank does, and takes each once; says how long that took, and how much of a core."""
    torch.set_num_threads(1)
    with closing(read_shard(batches, columns, by_key=columns.keyed)) as shard:
        shard.schedule(0, SamplingPlan(rows=shard.rows, batch_size=size))
        started, busy = time.perf_counter(), time.process_time()
        rows = sum(len(batch.inputs[0]) for batch in shard.epoch(0))
        took = {"rows": rows, "wall": time.perf_counter() - started, "cpu": time.process_time() - busy}
    yield pa.RecordBatch.from_pylist([took])


def to_stack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Stacks scalar columns, as one does by hand."""
    parts = [np.stack([batch.column(f"f{index}").to_numpy() for index in range(SCALARS)], axis=1) for batch in batches]
    yield _count(len(np.concatenate(parts)))


def rows_to_array(rows: Iterator[Row]) -> Iterator[int]:
    """Stacks the rows of an RDD."""
    yield len(np.asarray([row.features for row in rows], np.float32))


def _count(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})


class Sides:
    """The sides by name; each returns MB/s, or seconds where its name says so.

    Attributes:
        besides: What the last turn found out besides the figures of its sides.
    """

    def __init__(self, spark: SparkSession, directory: Path, rows: int, *, cached: bool):
        self._spark, self._directory, self._rows, self._cached = spark, directory, rows, cached
        self.besides: dict[str, float] = {}

    def of(self, kind: str) -> dict[str, Callable[[], float]]:
        """Returns the sides of a kind of column, by name."""
        sides: dict[str, Callable[[], dict[str, Callable[[], float]]]] = {
            "array<float>": self._arrays,
            "100 scalars": self._scalars,
            "dense vectors": self._dense,
            "sparse vectors": self._sparse,
            "images": self._images,
        }
        if kind == "split":
            return self._splits()
        return {f"{kind}: {name}": side for name, side in sides[kind.removesuffix(CACHED)]().items()}

    def _arrays(self) -> dict[str, Callable[[], float]]:
        plain = self._wire("arrays", ["features"])
        return {
            "shard": self._shard(*plain),
            "bare mapInArrow": self._side(plain[0], to_count),
            "Spark alone": self._alone(plain[0]),
            "shard with a key": self._shard(*self._wire("arrays", ["features"], keyed=True)),
            "shard by idCol": self._shard(*self._wire("arrays", ["features"], key="label")),
            "RDD of rows": self._rdd,
        }

    def _scalars(self) -> dict[str, Callable[[], float]]:
        names = [f"f{index}" for index in range(SCALARS)]
        packed = self._wire("scalars", names, InputOptions(assemble=True))
        return {
            "shard": self._shard(*packed, width=SCALARS),
            "bare mapInArrow": self._side(packed[0], to_count, width=SCALARS),
            "stacked in Python": self._side(self._read("scalars"), to_stack, width=SCALARS),
            "Spark alone": self._alone(packed[0], width=SCALARS),
        }

    def _dense(self) -> dict[str, Callable[[], float]]:
        dense = self._wire("dense", ["features"])
        return {
            "shard": self._shard(*dense),
            "bare mapInArrow": self._side(dense[0], to_count),
            "Spark alone": self._alone(dense[0]),
        }

    def _sparse(self) -> dict[str, Callable[[], float]]:
        dense_first = self._read("sparse").select(vector_to_array("features", "float32").alias("features"), "label")
        return {
            "shard": self._handed_over(*self._wire("sparse", ["features"])),
            "densified first": self._handed_over(*self._prepared(dense_first)),
        }

    def _images(self) -> dict[str, Callable[[], float]]:
        files = Files(self._directory / "images")
        loader = DataLoader(files, IMAGE_BATCH, num_workers=CORES, persistent_workers=True)
        return {"shard": self._decoded, "DataLoader": partial(self._loaded, loader)}

    def _splits(self) -> dict[str, Callable[[], float]]:
        plain, _ = self._wire("arrays", ["features"])
        keyed, _ = self._wire("arrays", ["features"], keyed=True)
        return {
            "split by key, s": partial(self._to_nowhere, split(keyed, CORES)),
            "split by key and sort, s": partial(self._to_nowhere, split(keyed, CORES, in_order=True)),
            "repartition, s": partial(self._to_nowhere, plain.repartition(CORES)),
        }

    def _read(self, name: str) -> DataFrame:
        data = self._spark.read.parquet(str(self._directory / name))
        return data.cache() if self._cached else data

    def _wire(
        self,
        name: str,
        inputs: list[str],
        options: InputOptions | None = None,
        *,
        keyed: bool = False,
        key: str | None = None,
    ) -> tuple[DataFrame, Columns]:
        return self._prepared(self._read(name), inputs, options, keyed=keyed, key=key)

    def _prepared(
        self,
        data: DataFrame,
        inputs: list[str] | None = None,
        options: InputOptions | None = None,
        *,
        keyed: bool = False,
        key: str | None = None,
    ) -> tuple[DataFrame, Columns]:
        inputs, options = inputs or ["features"], options or InputOptions()
        frame = prepare(data, "regression", inputs=inputs, label="label", key=key, options=options, keyed=keyed)
        return frame.data, frame.columns

    def _shard(self, data: DataFrame, columns: Columns, *, width: int = WIDTH) -> Callable[[], float]:
        return self._side(data, partial(to_shard, columns=columns), width=width)

    def _handed_over(self, data: DataFrame, columns: Columns) -> Callable[[], float]:
        function = partial(to_batches, columns=columns, size=BATCH)
        return self._side(data, function, rows=self._rows // 2, width=SPARSE_WIDTH, schema=BATCHES)

    def _side(
        self,
        data: DataFrame,
        function: Callable[..., Any],
        *,
        rows: int | None = None,
        width: int = WIDTH,
        schema: str = "rows long",
    ) -> Callable[[], float]:
        expected = self._rows if rows is None else rows

        def run() -> float:
            counted: list[int] = []

            def job() -> None:
                counted.extend(row["rows"] for row in data.mapInArrow(function, schema).collect())

            took = seconds(job)
            assert sum(counted) == expected
            return expected * width * 4e-6 / took

        return run

    def _rdd(self) -> float:
        data = self._read("arrays")
        counted: list[int] = []
        took = seconds(lambda: counted.extend(data.rdd.mapPartitions(rows_to_array).collect()))
        assert sum(counted) == self._rows
        return self._rows * WIDTH * 4e-6 / took

    def _decoded(self) -> float:
        """Returns images a second."""
        files = self._spark.read.format("binaryFile").load(str(self._directory / "images"))
        data = files.select(F.col("content").alias("features"), F.length("content").cast("float").alias("label"))
        wire, columns = self._prepared(data, options=InputOptions(layouts={"features": "image"}), keyed=True)
        results: list[Row] = []

        def job() -> None:
            decoded = partial(to_batches, columns=columns, size=IMAGE_BATCH // CORES)
            results.extend(split(wire, CORES).mapInArrow(decoded, BATCHES).collect())

        took = seconds(job)
        self.besides[CORES_THAT_DECODE] = sum(row["cpu"] for row in results) / max(row["wall"] for row in results)
        return sum(row["rows"] for row in results) / took

    def _loaded(self, loader: DataLoader[torch.Tensor]) -> float:
        """Returns images a second."""
        count: list[int] = []
        took = seconds(lambda: count.extend(len(batch) for batch in loader))
        return sum(count) / took

    def _alone(self, data: DataFrame, *, width: int = WIDTH) -> Callable[[], float]:
        return lambda: self._rows * width * 4e-6 / self._to_nowhere(data)

    def _to_nowhere(self, data: DataFrame) -> float:
        return seconds(lambda: data.write.format("noop").mode("overwrite").save())


def main() -> None:
    """Takes turns until the input ends."""
    kind, directory, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with session(directory / "sessions" / kind, cores=CORES, spark__sql__files__openCostInBytes=OPENING) as spark:
        if kind == "inputs":
            write_images(directory / "images", rows // 100)
            write_rows(spark, directory, rows)
            write_vectors(spark, directory, rows // 2)
            return
        sides = Sides(spark, directory, rows, cached=kind.endswith(CACHED))
        measures = sides.of(kind)
        shard = next(iter(measures.values()))
        for _ in sys.stdin:
            shard()  # Spark ends Python workers that had nothing to do for a minute, and this starts them.
            measured = {}
            for name, side in measures.items():
                touch_memory()
                measured[name] = side()
            print(json.dumps(measured | sides.besides), flush=True)
            measures = dict(reversed(measures.items()))


if __name__ == "__main__":
    main()
