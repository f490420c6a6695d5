"""MB/s from Parquet to tensors, by kind of column, beside the other ways there are.

`local[2]`, both cores, one Python worker a task. MB are those of the float32 tensors that come out, of sparse vectors
those of the dense ones. A side reads its files, sends the rows to Python and makes tensors of them; "shard" is that of
a rank, which also has a key made of every row, of its contents or, "by idCol", of one column, and checks it. All sides
but the split leave the rows where they are. "Spark alone" ends in the noop sink: the rows never leave the JVM.

Spark has written all files but the images, as it has those of its users; another writer may make a dictionary of random
numbers, which Spark then reads more slowly. The scalars are 100 columns with the label, which is as many as
Spark reads from Parquet column by column (`spark.sql.codegen.maxFields`); beyond, both sides read them row by row.

A shard keeps sparse vectors sparse, and makes dense ones of a micro-batch at a time. So both of their sides go on until
each row has been handed over once, in dense micro-batches.

Images are JPEG files of 224 x 224 pixels: read, split over two ranks and decoded once by their shards, beside a torch
`DataLoader` with two workers over the same files, which reads, decodes and collates. Both end in float32. Spark is told
that a small file is soon opened, as docs/data.md advises.

Petastorm's side runs in its own environment (`make test-petastorm` makes it), in a process that stays: its converter
writes the rows to Parquet once more ("materialise") and its loader reads them in two threads: the one that it makes of
itself, and `BatchedDataLoader`, which is faster. Without the environment the side is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
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

from benchmarks.common import Goal, arguments, interleave, machine, report, seconds, session, workspace
from sparktorch.data.columns import KEY, Columns, InputOptions
from sparktorch.data.plan import SamplingPlan
from sparktorch.data.shard import Shard
from sparktorch.spark.frame import prepare
from sparktorch.spark.split import split

CORES = 2
BATCH = 1_024
IMAGE, IMAGE_BATCH = 224, 64
OPENING = "65536"  # bytes that could be read in the time that it takes to open a file
BATCHES = "rows long, wall double, cpu double"  # what `to_batches` yields
WIDTH, SCALARS = 100, 99
SPARSE_WIDTH, FILLED = 1_000, 10
CORES_THAT_DECODE = "images: cores that decode"
GOALS = {
    "array<float>: shard / bare mapInArrow": Goal(0.9, at_least=True),
    "array<float>: shard / RDD of rows": Goal(15, at_least=True),
    "100 scalars: shard / stacked in Python": Goal(4, at_least=True),
    "dense vectors / array<float>": Goal(0.8, at_least=True),
    "sparse vectors: shard / densified first": Goal(5, at_least=True),
    "images: shard / DataLoader": Goal(1, at_least=True),
    CORES_THAT_DECODE: Goal(1.8, at_least=True),
    "split by key / repartition, s": Goal(1.1),
    "array<float>: shard / Petastorm's loader": Goal(5, at_least=True),
    "array<float>: shard / Petastorm, materialising": Goal(10, at_least=True),
}


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
    yield _count(Shard(batches, columns).rows)


def to_count(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Counts rows and bytes, and makes nothing of them."""
    found = [(batch.num_rows, batch.nbytes) for batch in batches]
    assert sum(size for _, size in found)
    yield _count(sum(rows for rows, _ in found))


def to_batches(batches: Iterable[pa.RecordBatch], columns: Columns, size: int) -> Iterator[pa.RecordBatch]:
    """Reads rows as a rank does, and takes each once; says how long that took, and how much of a core."""
    torch.set_num_threads(1)
    with closing(Shard(batches, columns)) as shard:
        shard.place(0, SamplingPlan(rows=shard.rows, batch_size=size))
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
    """The sides by name; each returns MB/s, or seconds where its name says so."""

    def __init__(
        self, spark: SparkSession, directory: Path, rows: int, petastorm: Callable[[], dict[str, float]] | None
    ):
        self._spark, self._directory, self._rows = spark, directory, rows
        self._petastorm = petastorm
        self.besides: defaultdict[str, list[float]] = defaultdict(list)  # what sides find out besides their own figure
        files = Files(directory / "images")
        self._loader = DataLoader(files, IMAGE_BATCH, num_workers=CORES, persistent_workers=True)

    def sides(self) -> dict[str, Callable[[], float]]:
        """Returns the sides by name."""
        arrays, dense = self._wire("arrays", ["features"]), self._wire("dense", ["features"])
        names = [f"f{index}" for index in range(SCALARS)]
        scalars = self._wire("scalars", names, InputOptions(assemble=True))
        sparse = self._wire("sparse", ["features"])
        dense_first = self._read("sparse").select(vector_to_array("features", "float32").alias("features"), "label")
        found: dict[str, Callable[[], float]] = {
            "array<float>: shard": self._shard(*arrays),
            "array<float>: bare mapInArrow": self._side(arrays[0].drop(KEY), to_count),
            "array<float>: bare, with a key": self._side(arrays[0], to_count),
            "array<float>: Spark alone": self._alone(arrays[0].drop(KEY)),
            "array<float>: shard by idCol": self._shard(*self._wire("arrays", ["features"], key="label")),
            "array<float>: RDD of rows": self._rdd,
            "100 scalars: shard": self._shard(*scalars, width=SCALARS),
            "100 scalars: stacked in Python": self._side(self._read("scalars"), to_stack, width=SCALARS),
            "100 scalars: Spark alone": self._alone(scalars[0].drop(KEY), width=SCALARS),
            "dense vectors: shard": self._shard(*dense),
            "dense vectors: Spark alone": self._alone(dense[0].drop(KEY)),
            "sparse vectors: shard": self._handed_over(*sparse),
            "sparse vectors: densified first": self._handed_over(*self._prepared(dense_first)),
            "images: shard": self._decoded,
            "images: DataLoader": self._loaded,
            "split by key, s": partial(self._to_nowhere, split(arrays[0], CORES)),
            "split by key and sort, s": partial(self._to_nowhere, split(arrays[0], CORES, in_order=True)),
            "repartition, s": partial(self._to_nowhere, arrays[0].drop(KEY).repartition(CORES)),
        }
        if self._petastorm is not None:
            found["array<float>: Petastorm's loader"] = self._load
        return found

    def _read(self, name: str) -> DataFrame:
        return self._spark.read.parquet(str(self._directory / name))

    def _wire(
        self, name: str, inputs: list[str], options: InputOptions | None = None, *, key: str | None = None
    ) -> tuple[DataFrame, Columns]:
        return self._prepared(self._read(name), inputs, options, key=key)

    def _prepared(
        self,
        data: DataFrame,
        inputs: list[str] | None = None,
        options: InputOptions | None = None,
        *,
        key: str | None = None,
    ) -> tuple[DataFrame, Columns]:
        inputs, options = inputs or ["features"], options or InputOptions()
        frame = prepare(data, "regression", inputs=inputs, label="label", key=key, options=options)
        return frame.data, frame.columns

    def _shard(self, data: DataFrame, columns: Columns, *, width: int = WIDTH) -> Callable[[], float]:
        return self._side(data, partial(to_shard, columns=columns), width=width)

    def _handed_over(self, data: DataFrame, columns: Columns) -> Callable[[], float]:
        function = partial(to_batches, columns=columns, size=BATCH)
        return self._side(data, function, rows=self._rows // 4, width=SPARSE_WIDTH, schema=BATCHES)

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
        wire, columns = self._prepared(data, options=InputOptions(layouts={"features": "image"}))
        found: list[Row] = []

        def job() -> None:
            decoded = partial(to_batches, columns=columns, size=IMAGE_BATCH // CORES)
            found.extend(split(wire, CORES).mapInArrow(decoded, BATCHES).collect())

        took = seconds(job)
        self.besides[CORES_THAT_DECODE].append(sum(row["cpu"] for row in found) / max(row["wall"] for row in found))
        return sum(row["rows"] for row in found) / took

    def _loaded(self) -> float:
        """Returns images a second."""
        count: list[int] = []
        took = seconds(lambda: count.extend(len(batch) for batch in self._loader))
        return sum(count) / took

    def _alone(self, data: DataFrame, *, width: int = WIDTH) -> Callable[[], float]:
        return lambda: self._rows * width * 4e-6 / self._to_nowhere(data)

    def _to_nowhere(self, data: DataFrame) -> float:
        return seconds(lambda: data.write.format("noop").mode("overwrite").save())

    def _load(self) -> float:
        assert self._petastorm is not None
        took = self._petastorm()
        size = self._rows * WIDTH * 4e-6
        self.besides["array<float>: Petastorm, materialising"].append(size / (took["materialise"] + took["load"]))
        self.besides["array<float>: Petastorm's BatchedDataLoader"].append(size / took["load_batched"])
        return size / took["load"]


@contextmanager
def petastorm(python: Path, data: Path, work: Path) -> Iterator[Callable[[], dict[str, float]] | None]:
    """Starts Petastorm's side, and yields what makes it take a turn; `None` where it cannot run."""
    if not python.exists():
        yield None
        return
    script = Path(__file__).with_name("petastorm_loader.py")
    settings = {**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    with (work / "petastorm.log").open("w") as log:
        process = subprocess.Popen(
            [python, "-W", "ignore", script, data, work / "petastorm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=settings,
            start_new_session=True,
        )

        def turn() -> dict[str, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"Petastorm's side has failed:\n{(work / 'petastorm.log').read_text()[-3000:]}")
            found: dict[str, float] = json.loads(line)
            return found

        try:
            yield turn
        finally:
            try:
                process.communicate(timeout=20)  # the end of its input ends it
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its JVM too
                process.communicate()


def _with_unit(name: str) -> str:
    if name.endswith(", s"):
        return name
    return f"{name}, rows/s" if name.startswith("images") else f"{name}, MB/s"


def main() -> None:
    """Measures, prints and writes the result."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--petastorm",
            type=Path,
            default=Path(".venv-petastorm/bin/python"),
            metavar="PYTHON",
            help="the Python of Petastorm's environment",
        )

    options = arguments(__doc__ or "", add)
    rows = 40_000 if options.quick else 400_000
    with workspace() as work:
        write_images(work / "images", rows // 100)
        with (
            session(work, cores=CORES, spark__sql__files__openCostInBytes=OPENING) as spark,
            petastorm(options.petastorm, work / "arrays", work) as loader,
        ):
            write_rows(spark, work, rows)
            write_vectors(spark, work, rows // 4)
            sides = Sides(spark, work, rows, loader)
            interleave(sides.sides(), 2)  # warms up
            sides.besides.clear()
            samples = interleave(sides.sides(), 2 if options.quick else 5)
            cores = sides.besides.pop(CORES_THAT_DECODE)
            samples |= sides.besides

    def ratio(side: str, other: str) -> float:
        """Returns the median over the rounds: the machine may be slower in one round than in another."""
        return float(np.median(np.divide(samples[side], samples[other])))

    ratios = {
        "dense vectors / array<float>": ratio("dense vectors: shard", "array<float>: shard"),
        "split by key / repartition, s": ratio("split by key, s", "repartition, s"),
        "split by key and sort / repartition, s": ratio("split by key and sort, s", "repartition, s"),
    }
    ratios[CORES_THAT_DECODE] = float(np.median(cores))
    for name in samples:
        kind, _, way = name.partition(": ")
        if way and not way.startswith("shard") and f"{kind}: shard" in samples:
            ratios[f"{kind}: shard / {way}"] = ratio(f"{kind}: shard", name)
    ratios["array<float>: shard by idCol / bare mapInArrow"] = ratio(
        "array<float>: shard by idCol", "array<float>: bare mapInArrow"
    )
    report(
        "ingest",
        samples={_with_unit(name): values for name, values in samples.items()},
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "rows": rows,
            "petastorm": "measured" if loader else f"left out: there is no {options.petastorm}",
            **machine("pyspark", "pyarrow", "numpy"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
