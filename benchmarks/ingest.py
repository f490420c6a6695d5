"""MB/s from a DataFrame to tensors, by kind of column, beside the other ways there are.

`local[2]`, both cores, one Python worker a task. MB are those of the float32 tensors that come out, of sparse vectors
those of the dense ones. A side reads its rows, sends them to Python and makes tensors of them. All sides but the
split and the images leave the rows where they are: "shard" is that of a rank under `split="keep"`, which checks every
row and makes a digest of it. "Shard with a key" is what a rank does under `split="key"`, but for the shuffle: every row
has a key made of its contents or, "by idCol", of one column, and they are put into its order. "Spark alone" ends in the
noop sink: the rows never leave the JVM.

Spark has written all files but the images, as it has those of its users; another writer may make a dictionary of random
numbers, which Spark then reads more slowly. The scalars are 100 columns with the label, which is as many as
Spark reads from Parquet column by column (`spark.sql.codegen.maxFields`); beyond, both sides read them row by row.

A shard keeps sparse vectors sparse, and makes dense ones of a micro-batch at a time. So both of their sides go on until
each row has been handed over once, in dense micro-batches.

Images are JPEG files of 224 x 224 pixels: read, split over two ranks and decoded once by their shards, beside a torch
`DataLoader` with two workers over the same files, which reads, decodes and collates. Both end in float32. Spark is told
that a small file is soon opened, as docs/data.md advises.

Arrays and dense vectors are measured twice: read from Parquet and, "cached", from rows that Spark holds in memory,
where less is in the way that all sides have in common.

Each kind of column has a JVM of its own, as in an application that reads that kind: the compiler makes faster code of
what has only ever met one. Those that are compared with each other take turns.

Petastorm's side runs in its own environment (`make test-petastorm` makes it): its converter writes the rows to Parquet
once more ("materialise") and its loader reads them in two threads: the one that it makes of itself, and
`BatchedDataLoader`, which is faster. Without the environment the side is left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import Goal, arguments, machine, report, run_process, taking_turns, touch_memory, workspace
from benchmarks.ingest_sides import CACHED, CORES_THAT_DECODE, WIDTH

ARRAYS, DENSE = "array<float>", "dense vectors"
FROM = ("", CACHED)  # Parquet, or memory
# Kinds of column whose processes are there at the same time, and take turns.
GROUPS = (
    *((ARRAYS + source, DENSE + source) for source in FROM),
    *(("100 scalars",), ("sparse vectors",), ("images",), ("split",)),
)
GOALS = {
    "100 scalars: shard / stacked in Python": Goal(4, at_least=True),
    "sparse vectors: shard / densified first": Goal(5, at_least=True),
    "images: shard / DataLoader": Goal(1, at_least=True),
    CORES_THAT_DECODE: Goal(1.8, at_least=True),
    "split by key / repartition, s": Goal(1.1),
    **{
        name: Goal(ratio, at_least=True)
        for source in FROM
        for name, ratio in (
            # What Spark hands to Python, "bare mapInArrow", is the most that anything behind it can reach.
            (f"{ARRAYS}{source}: shard by idCol / bare mapInArrow", 0.9),
            (f"{ARRAYS}{source}: shard with a key / bare mapInArrow", 0.8),
            (f"{DENSE}{source}: shard / bare mapInArrow", 0.9),
            (f"{ARRAYS}{source}: shard / Petastorm, materialising", 3),
        )
    },
}


def petastorm(turn: Callable[[], dict[str, float]], kind: str, rows: int) -> dict[str, float]:
    """Has Petastorm take a turn; returns MB/s."""
    touch_memory()
    took, size = turn(), rows * WIDTH * 4e-6
    return {
        f"{kind}: Petastorm's loader": size / took["load"],
        f"{kind}: Petastorm's BatchedDataLoader": size / took["load_batched"],
        f"{kind}: Petastorm, materialising": size / (took["materialise"] + took["load"]),
    }


def measure(work: Path, rows: int, rounds: int, python: Path) -> dict[str, list[float]]:
    """Returns what each side has measured in every round, by name.

    Args:
        work: An empty directory.
        rows: Number of rows.
        rounds: Number of rounds, after three to warm up.
        python: That of Petastorm's environment, if there is one.
    """
    script = [sys.executable, "-m", "benchmarks.ingest_sides"]
    run_process([*script, "inputs", str(work), str(rows)])
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for group in GROUPS:
        with ExitStack() as stack:
            turns = [
                stack.enter_context(taking_turns([*script, kind, str(work), str(rows)], work / f"{kind}.log"))
                for kind in group
            ]
            if group[0].startswith(ARRAYS) and python.exists():
                source = "cached" if group[0].endswith(CACHED) else "parquet"
                folder = work / f"petastorm-{source}"
                loader = Path(__file__).with_name("petastorm_loader.py")
                settings = {**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
                command = [str(python), "-W", "ignore", str(loader), source, str(work / "arrays"), str(folder)]
                turn = stack.enter_context(taking_turns(command, work / f"{folder.name}.log", settings))
                turns.append(partial(petastorm, turn, group[0], rows))
            for number in range(-3, rounds):
                for turn_of_kind in turns[:: -1 if number % 2 else 1]:
                    for name, value in turn_of_kind().items():
                        samples[name] += [value] * (number >= 0)
    return dict(samples)


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
        samples = measure(work, rows, 2 if options.quick else 5, options.petastorm)
    cores = samples.pop(CORES_THAT_DECODE)

    def ratio(side: str, other: str) -> float:
        """Returns the median over the rounds: the machine may be slower in one round than in another."""
        return float(np.median(np.divide(samples[side], samples[other])))

    ratios = {
        "split by key / repartition, s": ratio("split by key, s", "repartition, s"),
        "split by key and sort / repartition, s": ratio("split by key and sort, s", "repartition, s"),
    }
    ratios[CORES_THAT_DECODE] = float(np.median(cores))
    for name in samples:
        kind, _, way = name.partition(": ")
        if way and not way.startswith("shard") and f"{kind}: shard" in samples:
            ratios[f"{kind}: shard / {way}"] = ratio(f"{kind}: shard", name)
    for source in FROM:
        arrays, dense = ARRAYS + source, DENSE + source
        ratios[f"{dense} / {arrays}"] = ratio(f"{dense}: shard", f"{arrays}: shard")
        for side in ("shard with a key", "shard by idCol"):
            ratios[f"{arrays}: {side} / bare mapInArrow"] = ratio(f"{arrays}: {side}", f"{arrays}: bare mapInArrow")
    report(
        "ingest",
        samples={_with_unit(name): values for name, values in samples.items()},
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "rows": rows,
            "petastorm": "measured" if options.petastorm.exists() else f"left out: there is no {options.petastorm}",
            **machine("pyspark", "pyarrow", "numpy"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
