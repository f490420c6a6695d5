"""Rows a second of a fit, beside gradients summed by Spark's `treeAggregate` in every step.

MLP 100-256-1 over an `array<float>` column, AdamW, batches of 1,024 rows, `local[2]`, one torch thread a task. Both
sides train the same module on the same rows. By RDD, the rows are tensors, cached once in two partitions; each step
broadcasts the weights, takes the gradient of a part of the batch in every partition, adds the parts up by
`treeAggregate`, and steps the optimizer on the driver.

By RDD, only the steps are timed, not reading and caching the rows; of the fit, everything from the DataFrame to the
model. Spark hands a task the whole of its cached partition, so drawing a batch from it costs more the larger it is. "A
cached RDD a batch" is what RDDs can do at best: batches are cut once and never drawn anew, and every step reads its own
only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pyspark import RDD, Broadcast
from pyspark.sql import DataFrame
from torch import nn

from benchmarks.by_hand import LEARNING_RATE, MLP
from benchmarks.common import arguments, interleave, machine, report, seconds, session, workspace
from benchmarks.fit_wall import estimator, write_rows

TASKS = 2
BATCH = 1024
EPOCHS = 3
BATCHES = 8  # Each batch has an RDD.

Tensors = tuple[torch.Tensor, torch.Tensor]
Sums = tuple[npt.NDArray[np.float32], float, int]  # These are the sums of gradients and losses, and the number of rows.


def to_tensors(rows: Iterable[Any]) -> Iterator[Tensors]:
    """Turns the rows of a partition into one pair of tensors."""
    features, label = zip(*((row.features, row.label) for row in rows), strict=True)
    yield torch.tensor(features), torch.tensor(label)


def draw(pairs: Iterable[Tensors], rows: int, step: int) -> Iterator[Tensors]:
    """Draws the rows of a step from a partition."""
    for features, label in pairs:
        index = torch.randint(len(label), (rows,), generator=torch.Generator().manual_seed(step))
        yield features.index_select(0, index), label.index_select(0, index)


def gradient(pairs: Iterable[Tensors], weights: Broadcast[npt.NDArray[np.float32]]) -> Iterator[Sums]:
    """Returns the sum of the gradients over the rows of a partition."""
    torch.set_num_threads(1)
    module = MLP()
    nn.utils.vector_to_parameters(torch.tensor(weights.value), module.parameters())
    for features, label in pairs:
        loss = nn.functional.mse_loss(module(features).squeeze(-1), label, reduction="sum")
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        yield nn.utils.parameters_to_vector(gradients).numpy(), loss.item(), len(label)


def add(left: Sums, right: Sums) -> Sums:
    """Adds two sums."""
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


class ByRDD:
    """Training on the driver, with gradients from an RDD."""

    def __init__(self, next_batch: Callable[[int], RDD[Tensors]]) -> None:
        """Takes what gives the rows of a step, by its number."""
        self._next_batch = next_batch
        self._steps = itertools.count()
        torch.manual_seed(0)
        self._module = MLP()
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=LEARNING_RATE, fused=True)
        self.loss = float("nan")

    def gradients(self, batch: RDD[Tensors]) -> Sums:
        """Returns the sums over the rows of a batch."""
        flat = nn.utils.parameters_to_vector(self._module.parameters()).detach().numpy()
        weights = batch.context.broadcast(flat)
        zero: Sums = np.zeros_like(flat), 0.0, 0
        sums = batch.mapPartitions(lambda pairs: gradient(pairs, weights)).treeAggregate(zero, add, add)
        weights.destroy()
        return sums

    def step(self) -> int:
        """Takes a step; returns its number of rows."""
        total, loss, rows = self.gradients(self._next_batch(next(self._steps)))
        parameters = list(self._module.parameters())
        parts = torch.from_numpy(total / rows).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()
        self.loss = loss / rows
        return rows

    def rate(self, steps: int) -> float:
        """Takes so many steps; returns rows a second."""
        rows: list[int] = []
        took = seconds(lambda: rows.extend(self.step() for _ in range(steps)))
        return sum(rows) / took

    def check(self) -> None:
        """Compares the gradient of the first batch with one taken in this process, before any step.

        Raises:
            RuntimeError: They differ.
        """
        batch = self._next_batch(0)
        total, _, rows = self.gradients(batch)
        features, label = (torch.cat(tensors) for tensors in zip(*batch.collect(), strict=True))
        loss = nn.functional.mse_loss(self._module(features).squeeze(-1), label)
        expected = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(self._module.parameters())))
        if rows != BATCH or not np.allclose(total / rows, expected.numpy(), atol=1e-5):
            raise RuntimeError("treeAggregate gives another gradient than one process")


def fit(frame: DataFrame, rows: int) -> float:
    """Fits; returns rows a second, over all epochs."""
    return rows * EPOCHS / seconds(lambda: estimator(batch=BATCH, epochs=EPOCHS).fit(frame))


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rows, rounds, steps = (20_000, 2, 10) if options.quick else (100_000, 5, 40)
    with workspace() as work:
        write_rows(work / "data", rows, TASKS)
        with session(work, cores=TASKS) as spark:
            frame = spark.read.parquet(str(work / "data"))
            tensors = frame.coalesce(TASKS).rdd.mapPartitions(to_tensors).cache()
            if tensors.count() != TASKS:
                raise RuntimeError("the rows are not one pair of tensors a task")

            def drawn(step: int) -> RDD[Tensors]:
                return tensors.mapPartitions(partial(draw, rows=BATCH // TASKS, step=step))

            batches = [drawn(step).cache() for step in range(BATCHES)]
            for batch in batches:
                batch.count()
            redrawn = ByRDD(drawn)
            cut = ByRDD(lambda step: batches[step % BATCHES])
            redrawn.check()
            cut.check()
            sides: dict[str, Callable[[], float]] = {
                "fit": partial(fit, frame, rows),
                "treeAggregate": partial(redrawn.rate, steps),
                "treeAggregate, a cached RDD a batch": partial(cut.rate, steps),
            }
            interleave(sides, 1)  # These turns warm up.
            samples = interleave(sides, rounds)
    median = {name: statistics.median(values) for name, values in samples.items()}
    report(
        "allreduce_vs_treeaggregate",
        samples={f"{name}, rows/s": values for name, values in samples.items()},
        ratios={f"fit / {name}": median["fit"] / rate for name, rate in median.items() if name != "fit"}
        | {f"{name}, ms a step": 1000 * BATCH / rate for name, rate in median.items() if name != "fit"},
        goals={},
        facts={"rows": rows, "losses": [redrawn.loss, cut.loss], **machine("torch", "pyspark", "pyarrow")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
