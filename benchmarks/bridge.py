"""Loops of one's own in Spark: a function in ranks, all-reduce, and RDDs of tensors, beside what there is without.

- `run` of a function that does nothing, beside `TorchDistributor`'s.
- The DDP script of `benchmarks.by_hand` on 400,000 rows of 100 float32 in Parquet, called by `run` on two ranks, beside
  the same under `torchrun`: its steps, and from the call to the end.
- 10 MB of float32 in each of two tasks, added up: `all_reduce` in a run, in every rank, beside `treeAggregate` of a
  cached RDD, on the driver.
- The script's rows, read from Parquet: by `tensor_rdd`, whose batches are summed up in Python, beside `mapInArrow` that
  only takes its record batches, and beside `DataFrame.rdd`, whose rows are only counted.

`local[2]`, CPU and Gloo, one torch thread a rank. All sides are warm: each has just run, untimed, because they push
each other's Python workers out.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

import sparktorch
from benchmarks import by_hand
from benchmarks.common import Goal, arguments, interleave, machine, report, run_process, seconds, session, workspace
from benchmarks.fit_wall import BATCH, EPOCHS, FILES, RANKS, write_rows
from sparktorch import tensor_rdd

FLOATS = 2_500_000  # 10 MB
CALLS = 10
GOALS = {
    "treeAggregate / all_reduce, 10 MB": Goal(5, at_least=True),
    "no-op TorchDistributor / no-op run": Goal(20, at_least=True),
    "loop per step, run / torchrun": Goal(1.03),
    "whole script, run / torchrun": Goal(0.6),
    "mapInArrow / tensor_rdd": Goal(0.8, at_least=True),
    "RDD of rows / tensor_rdd": Goal(8, at_least=True),
}


def reduced(context: sparktorch.RunContext) -> float:
    """Adds up 10 MB of every rank, some times; returns the mean seconds."""
    value = torch.ones(FLOATS)
    context.all_reduce(value)
    context.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        context.all_reduce(value)
    return (time.perf_counter() - started) / CALLS


def script(context: sparktorch.RunContext, *details: Any) -> dict[str, float]:
    """Runs the body of the script by hand."""
    return by_hand.train_in_group(*details)


def summed(batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[float]:
    """Looks at every number of a partition's batches."""
    yield sum(float(batch["features"].sum()) for batch in batches)


def taken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Takes the record batches of a partition."""
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"rows": pa.array([0])})


class Sides:
    """The sides of the comparison; each returns its seconds, and notes the milliseconds of a step."""

    def __init__(self, spark: SparkSession, work: Path) -> None:
        self.noted: dict[str, list[float]] = {}
        self._details = str(work / "data"), str(work / "state.pt"), EPOCHS, BATCH // RANKS
        parts = spark.sparkContext.parallelize(range(RANKS), RANKS)
        self._parts = parts.map(lambda _: np.ones(FLOATS, np.float32)).cache()
        self._parts.count()
        self._rows = spark.read.parquet(str(work / "data"))

    def run(self) -> float:
        """Runs the script's body, called by `run`."""
        results: list[dict[str, float]] = []
        wall = seconds(lambda: results.extend(sparktorch.run(script, args=self._details, **QUIET)))
        self._note("loop per step in run, ms", results[0])
        return wall

    def torchrun(self) -> float:
        """Runs the script under `torchrun`."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        wall, out = run_process([*launch, by_hand.__file__, *map(str, self._details)])
        self._note("loop per step under torchrun, ms", json.loads(out.splitlines()[-1]))
        return wall

    def tree_aggregate(self) -> float:
        """Sums 10 MB once by `treeAggregate`."""
        zero = np.zeros(FLOATS, np.float32)
        total: list[Any] = []
        took = seconds(lambda: total.append(self._parts.treeAggregate(zero, np.add, np.add)))
        if total[0][0] != RANKS:
            raise RuntimeError("treeAggregate gives another sum")
        return took

    def warm(self, side: Callable[[], float]) -> float:
        """Runs a side twice, and returns the second run's seconds."""
        noted = {name: list(values) for name, values in self.noted.items()}
        side()
        self.noted = noted
        return side()

    def tensors(self) -> float:
        """Reads the rows as an RDD of tensors."""
        return seconds(lambda: tensor_rdd(self._rows).mapPartitions(summed).sum())

    def arrow(self) -> float:
        """Reads the rows in `mapInArrow`."""
        return seconds(lambda: self._rows.mapInArrow(taken, "rows bigint").collect())

    def rows(self) -> float:
        """Reads the rows as an RDD of rows."""
        return seconds(lambda: self._rows.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).sum())

    def _note(self, name: str, result: dict[str, float]) -> None:
        self.noted.setdefault(name, []).append(1000 * result["loop"] / result["steps"])


QUIET: dict[str, Any] = {"numWorkers": RANKS, "device": "cpu", "progress": False}


def nothing(context: sparktorch.RunContext) -> None:
    """Does nothing."""


def distributor() -> float:
    """Runs `TorchDistributor` with nothing to do."""
    launch = TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)
    return seconds(lambda: launch.run(by_hand.nothing))


def measured(work: Path, rows: int, rounds: int) -> dict[str, list[float]]:
    """Returns the samples of all sides."""
    write_rows(work / "data", rows, FILES)
    with session(work, cores=RANKS) as spark:
        sides = Sides(spark, work)
        pairs: list[dict[str, Callable[[], float]]] = [
            {
                "no-op run, s": lambda: seconds(lambda: sparktorch.run(nothing, **QUIET)),
                "no-op TorchDistributor, s": distributor,
            },
            {"script in run, s": sides.run, "script under torchrun, s": sides.torchrun},
            {
                "all_reduce of 10 MB, s": lambda: sparktorch.run(reduced, **QUIET)[0],
                "treeAggregate of 10 MB, s": sides.tree_aggregate,
            },
            {
                "rows by tensor_rdd, s": sides.tensors,
                "rows by mapInArrow, s": sides.arrow,
                "rows by DataFrame.rdd, s": sides.rows,
            },
        ]
        samples: dict[str, list[float]] = {}
        for pair in pairs:
            interleave(pair, 1)
            sides.noted.clear()
            samples |= interleave({name: partial(sides.warm, side) for name, side in pair.items()}, rounds)
            samples |= sides.noted
    return samples


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rows, rounds = (40_000, 2) if options.quick else (400_000, 5)
    with workspace() as work:
        samples = measured(work, rows, rounds)
    median = {name: statistics.median(values) for name, values in samples.items()}
    report(
        "bridge",
        samples=samples,
        ratios={
            "treeAggregate / all_reduce, 10 MB": median["treeAggregate of 10 MB, s"] / median["all_reduce of 10 MB, s"],
            "no-op TorchDistributor / no-op run": median["no-op TorchDistributor, s"] / median["no-op run, s"],
            "loop per step, run / torchrun": median["loop per step in run, ms"]
            / median["loop per step under torchrun, ms"],
            "whole script, run / torchrun": median["script in run, s"] / median["script under torchrun, s"],
            "mapInArrow / tensor_rdd": median["rows by mapInArrow, s"] / median["rows by tensor_rdd, s"],
            "RDD of rows / tensor_rdd": median["rows by DataFrame.rdd, s"] / median["rows by tensor_rdd, s"],
        },
        goals=GOALS,
        facts={"rows": rows, **machine("torch", "pyspark", "pyarrow", "numpy")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
