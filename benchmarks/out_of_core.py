"""Seconds an epoch with the rows on disk, beside the same rows in memory; the memory that the disk side takes.

Two spawned Gloo ranks without Spark, one torch thread each, MLP 100-256-1, batches of 1,024 rows. Each rank has rows of
8 times its memory budget, which arrive in the order of their keys, batch by batch, as from Spark. The sides run turn
about, each in processes of its own; the first epoch of a turn warms up, whole epochs after it are measured. So the
files are in the page cache: what is compared is the work of reading them, not the disk. Both shuffle the same blocks of
rows, and must end with the same loss.

Memory is that of ranks of their own, new ones each time: a process that has trained before has memory left over to
train in again. A thread of each rank looks every 10 ms, while it reads its rows and while it trains: at all that is
resident (VmRSS), and at what of it belongs to no file (RssAnon). Growth is from the moment before the rows arrive; a
training of four batches before it has loaded all code. A window is what is read at a time: 32 steps.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common import Goal, arguments, interleave, machine, report, workspace
from benchmarks.nets import Mlp
from benchmarks.ranks import RankContext, Ranks, Stopwatch, columns
from sparktorch.base.config import StorageConfig, TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import KEY, LABEL, input_name
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob, train_partition

RANKS = 2
BATCH, BLOCK = 1024, 32
TIMES = 8  # The rows take so many times the budget.
ROW_BYTES = 4 * (Mlp.inputs + 1)
ARROW_ROWS = 10_000
GOALS = {
    "epoch from disk / from memory": Goal(1.1),
    "growth of resident memory / (budget + window)": Goal(1.0),
}


@dataclass(frozen=True)
class Turn:
    """How a rank's training went.

    Attributes:
        seconds: Of a measured epoch.
        waited: The share of its training that it waited for rows.
        resident: The most bytes that the process has grown by.
        anonymous: The same of memory that belongs to no file.
        held: Bytes of rows.
        loss: Of the last epoch; NaN but on rank 0.
    """

    seconds: float
    waited: float
    resident: int
    anonymous: int
    held: int
    loss: float


def streamed(world: World, rows: int) -> Iterator[pa.RecordBatch]:
    """Yields a rank's rows as they come from Spark, in the order of their keys."""
    part = (1 << 64) // world.world_size
    for start in range(0, rows, ARROW_ROWS):
        count = min(ARROW_ROWS, rows - start)
        random = np.random.default_rng((world.rank, start))
        features = random.standard_normal((count, Mlp.inputs), np.float32)
        label = np.sin(features[:, 0]) + features[:, 1] * features[:, 2]
        keys = np.uint64(part * world.rank) + np.arange(start, start + count, dtype=np.uint64) * np.uint64(part // rows)
        arrays = {input_name(0): features, LABEL: label, KEY: keys.view(np.int64)}
        yield pa.RecordBatch.from_arrays([to_arrow(array) for array in arrays.values()], names=list(arrays))


def memory() -> dict[str, int]:
    """Returns what this process has in memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon")}


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Looks at the memory of this process every 10 ms; the most that it grows by is known afterwards."""
    before, most, over = memory(), {"VmRSS": 0, "RssAnon": 0}, threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for name, value in memory().items():
                most[name] = max(most[name], value - before[name])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def train(context: RankContext, rows: int, epochs: int, storage: StorageConfig) -> Turn:
    """Trains as one rank, on rows shuffled in blocks."""
    client = Stopwatch(context.store, context.world)
    config = TrainConfig(
        task="regression",
        batch_size=BATCH,
        epochs=epochs,
        shuffle_block=BLOCK,
    )
    recipe = Recipe(module=Mlp, module_params={"width": 256, "layers": 1})
    job = TrainJob(columns=columns(Mlp.inputs), recipe=recipe, config=config, storage=storage)
    with client.beating(), watched() as most:
        result = train_partition(streamed(context.world, rows), world=context.world, job=job, client=client)
    history = result.meta.get("history", [])
    return Turn(
        seconds=statistics.fmean(np.diff(client.marks).tolist()[1:] or [math.nan]),
        waited=result.meta["data_wait_share"],
        resident=most["VmRSS"],
        anonymous=most["RssAnon"],
        held=result.meta["bytes"],
        loss=history[-1]["loss"] if history else math.nan,
    )


def storage_of(name: str, budget: int) -> StorageConfig:
    """Returns how a side keeps its rows."""
    return StorageConfig(kind="disk", budget=budget) if name == "disk" else StorageConfig()


class Sides:
    """The sides, each with ranks of its own; each returns its seconds an epoch."""

    def __init__(self, pools: dict[str, Ranks], rows: int, epochs: int, budget: int) -> None:
        self._pools, self._rows, self._epochs, self._budget = pools, rows, epochs, budget
        self.turns: dict[str, list[Turn]] = {name: [] for name in pools}

    def sides(self) -> dict[str, Callable[[], float]]:
        """Returns the sides by name."""
        return {name: partial(self._take, name) for name in self._pools}

    def check(self) -> None:
        """Compares what the sides have learned.

        Raises:
            RuntimeError: They have not done the same training: their losses differ.
        """
        losses = {turn.loss for turns in self.turns.values() for turn in turns if not math.isnan(turn.loss)}
        if len(losses) > 1:
            raise RuntimeError(f"the sides differ in their losses: {losses}")

    def _take(self, name: str) -> float:
        turns = self._pools[name](train, self._rows, self._epochs, storage_of(name, self._budget))
        self.turns[name] += turns
        return statistics.fmean(turn.seconds for turn in turns)


def grown(rows: int, budget: int, times: int) -> list[Turn]:
    """Trains from disk in new ranks, each of which trains once; for their memory."""
    turns, storage = [], storage_of("disk", budget)
    for _ in range(times):
        with Ranks(RANKS) as ranks:
            ranks(train, 4 * BATCH, 1, storage)
            turns += ranks(train, rows, 1, storage)
    return turns


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    budget = 32 if options.quick else 64
    rows = -(-TIMES * budget * 10**6 // ROW_BYTES)
    with workspace():
        new = grown(rows, budget, 1 if options.quick else 5)
        with Ranks(RANKS) as in_memory, Ranks(RANKS) as on_disk:
            sides = Sides({"memory": in_memory, "disk": on_disk}, rows, 2 if options.quick else 3, budget)
            interleave(sides.sides(), 1)  # These turns warm up.
            sides.check()
            sides.turns = {name: [] for name in sides.turns}
            samples = interleave(sides.sides(), 2 if options.quick else 5)
    window = BLOCK * BATCH / RANKS * ROW_BYTES
    figures: dict[str, list[float]] = {f"epoch, {name}, s": values for name, values in samples.items()}
    figures["growth, disk: resident, MB"] = [turn.resident / 1e6 for turn in new]
    figures["growth, disk: anonymous, MB"] = [turn.anonymous / 1e6 for turn in new]
    for name, turns in sides.turns.items():
        figures[f"share of the time waited for rows, {name}"] = [turn.waited for turn in turns]
    report(
        "out_of_core",
        samples=figures,
        ratios={
            "epoch from disk / from memory": statistics.median(samples["disk"]) / statistics.median(samples["memory"]),
            "growth of resident memory / (budget + window)": max(turn.resident for turn in new)
            / (budget * 1e6 + window),
        },
        goals=GOALS,
        facts={
            "budget_mb": budget,
            "window_mb": round(window / 1e6, 1),
            "rows_mb": round(min(turn.held for turn in new) / 1e6),
            **machine("torch", "numpy", "pyarrow"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
