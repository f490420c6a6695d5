"""Ranks for the benchmarks: spawned processes that stay and are called together, without Spark.

A rank trains by `fit`, which is `sparktorch.worker.train_partition` with a stopwatch on its client.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.distributed as dist

from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import KEY, LABEL, Columns, TensorSpec, input_name
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.distributed.client import Client
from sparktorch.distributed.store import OpenStore, SealedStore, connect, host_store
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob, train_partition

__all__ = ["Course", "RankContext", "Ranks", "Stopwatch", "arrays_of", "columns", "fit", "rows_of"]

HOST = "127.0.0.1"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a rank knows of a call: its number, and the store in which it meets the others."""

    world: World
    port: int
    prefix: str

    def store(self) -> SealedStore:
        """Connects to the store of this call."""
        return connect(HOST, self.port, self.prefix)

    def alone(self) -> RankContext:
        """Returns the context of a rank that is the only one, whatever the others do."""
        return replace(self, world=World(address=HOST), prefix=f"{self.prefix}/{self.world.rank}")

    @contextmanager
    def plain_group(self) -> Iterator[None]:
        """Opens the process group as one does by hand."""
        dist.init_process_group("gloo", store=self.store(), rank=self.world.rank, world_size=self.world.world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Ranks:
    """Processes with one torch thread each; calling this calls a function in all of them at once."""

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        """Starts the processes; `pinned` gives each a core to stay on."""
        self._server, self._port = host_store(HOST)
        self._calls = itertools.count()
        cores = sorted(os.sched_getaffinity(0))
        self._pools = [
            ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _begin, (cores[rank % len(cores)] if pinned else None,)
            )
            for rank in range(size)
        ]
        self._pids = [pool.submit(os.getpid) for pool in self._pools]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # A rank may wait for one that has failed.
            for pid in self._pids:
                os.kill(pid.result(), signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown()

    def __call__(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **options: P.kwargs
    ) -> list[R]:
        """Calls `function(context, ...)` in every rank; returns the results by rank."""
        return self.first(len(self._pools), function, *args, **options)

    def first(
        self, size: int, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **options: P.kwargs
    ) -> list[R]:
        """Calls it in the first `size` ranks, as a world of that size; the others idle."""
        prefix = f"call{next(self._calls)}"
        machine = World(world_size=size, local_size=size, address=HOST)
        worlds = [replace(machine, rank=rank, local_rank=rank) for rank in range(size)]
        contexts = [RankContext(world=world, port=self._port, prefix=prefix) for world in worlds]
        running = [
            pool.submit(function, context, *args, **options)
            for pool, context in zip(self._pools[:size], contexts, strict=True)
        ]
        for future in wait(running, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in running]


def _begin(core: int | None) -> None:
    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})


@dataclass(frozen=True)
class Course:
    """How a rank's training went.

    Attributes:
        epochs: Seconds of each epoch, from the end of the one before to its own end.
        history: The loop's record of each epoch; it is empty but on rank 0.
        seconds: Seconds of the rank's phases.
    """

    epochs: list[float]
    history: list[dict[str, Any]]
    seconds: dict[str, float]


def fit(
    context: RankContext,
    rows: int,
    width: int,
    recipe: Recipe,
    config: TrainConfig,
    *,
    checkpoint: CheckpointConfig | None = None,
) -> Course:
    """Trains as one rank on `rows` random rows of its own."""
    client = Stopwatch(context.store, context.world)
    job = TrainJob(columns=columns(width), recipe=recipe, config=config, checkpoint=checkpoint)
    with client.beating():
        result = train_partition(rows_of(context.world, rows, width), world=context.world, job=job, client=client)
    return Course(np.diff(client.marks).tolist(), result.meta.get("history", []), result.meta["seconds"])


def columns(width: int) -> Columns:
    """Returns the columns of `rows_of`."""
    features = TensorSpec(name=input_name(0), column="features", dtype="float32", shape=(width,))
    return Columns(inputs=(features,), label=TensorSpec(name=LABEL, column="label", dtype="float32"))


@lru_cache(maxsize=2)
def arrays_of(world: World, rows: int, width: int) -> dict[str, npt.NDArray[Any]]:
    """Returns a rank's rows by wire name: equally many on every rank, random keys in the rank's part of all keys."""
    random = np.random.default_rng(world.rank)
    features = random.standard_normal((rows, width), np.float32)
    label = np.sin(features[:, 0]) + features[:, 1] * features[:, 2]
    part = (1 << 64) // world.world_size
    keys = random.integers(part * world.rank, part * (world.rank + 1) - 1, rows, np.uint64)
    return {input_name(0): features, LABEL: label, KEY: keys.view(np.int64)}


def rows_of(world: World, rows: int, width: int) -> list[pa.RecordBatch]:
    """Returns the rows of `arrays_of` as they come from Spark."""
    arrays = arrays_of(world, rows, width)
    return [pa.RecordBatch.from_arrays([to_arrow(array) for array in arrays.values()], names=list(arrays))]


class Stopwatch(Client):
    """A link that notes when each epoch begins and when the last one has ended."""

    def __init__(self, open_store: OpenStore, world: World) -> None:
        super().__init__(open_store, world)
        self.marks: list[float] = []

    def enter(self, phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
        """Notes the time of phases that end an epoch."""
        if phase in {"training", "finishing"}:
            self.marks.append(time.perf_counter())
        super().enter(phase, epoch=epoch, step=step)
