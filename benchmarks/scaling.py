"""Weak scaling from one rank to N, and where a step's time goes, by bucket size.

Spawned Gloo ranks without Spark, each on a core of its own, with one torch thread and a batch of its own, through
sparktorch's training loop. Efficiency is the step time of one rank, with the other cores idle, over that of N ranks.
A first epoch warms up; whole epochs after it are measured.

The split of a step, after figure 6 of the DDP paper (Li et al. 2020, https://arxiv.org/abs/2006.15704):

- data: what the loop waited for batches, which it counts itself;
- optimizer: the time between torch's own hooks before and after each optimizer's step;
- compute: forward and backward, from a run in which all N ranks train at once, each alone, so that nothing is sent but
  the cores contend as they do otherwise: its step, less data and optimizer;
- exposed: the rest of the step, communication that no computation hides. The wait for the slowest rank is in it, and
  what the ranks send for other things: buffers, and sums at the end of an epoch.

Without overlap all gradients are in one bucket, which is sent when the last of them is there: one flat all-reduce after
the whole backward. With a core a rank, sending takes that core too: overlap can hide waiting, but not this work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.common import Goal, arguments, interleave, machine, printed, report, workspace
from benchmarks.nets import Mlp
from benchmarks.ranks import RankContext, Ranks, fit
from benchmarks.score import ResNet
from sparktorch.base.config import TrainConfig
from sparktorch.train.recipe.recipe import Recipe

BUCKETS_MB = (0, 1, 5, 25)
ONE_BUCKET_MB = 100_000  # This is larger than any model here.


@dataclass(frozen=True)
class Case:
    """What is trained: a module over rows of `inputs` numbers, rows of a rank in a step, steps of an epoch."""

    recipe: Recipe
    inputs: int
    batch: int
    steps: int
    goal: Goal | None = None


GOAL = Goal(0.9, at_least=True)
CASES = {
    "ResNet-20, batch 32": Case(Recipe(module=ResNet), ResNet.width, 32, 6, GOAL),
    "MLP 1024 x 4, batch 1024": Case(
        Recipe(module=Mlp, module_params={"width": 1024, "layers": 4}), Mlp.inputs, 1024, 4, GOAL
    ),
    "MLP 64 x 1, batch 64": Case(Recipe(module=Mlp, module_params={"width": 64, "layers": 1}), Mlp.inputs, 64, 200),
}


@dataclass(frozen=True)
class Way:
    """How a case is trained: on how many ranks, with buckets of another size than usual, or `alone` in each rank."""

    ranks: int
    bucket_mb: float | None = None
    alone: bool = False

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        how = f", buckets of {self.bucket_mb} MB"
        if self.alone:
            how = ", nothing sent"
        elif self.bucket_mb is None:
            how = ""
        elif self.bucket_mb == ONE_BUCKET_MB:
            how = ", no overlap"
        return f"{self.ranks} ranks{how}"


def ways(ranks: int) -> list[Way]:
    """Returns the ways to train on one rank to `ranks`, and all the ways on that many."""
    sizes = [1, *(size for size in (2, 4, 8, 16, 32, 64) if size < ranks)]
    many = [Way(ranks, alone=True), Way(ranks), *(Way(ranks, mb) for mb in (*BUCKETS_MB, ONE_BUCKET_MB))]
    return [Way(size) for size in sizes] + (many if ranks > 1 else [])


@dataclass(frozen=True)
class Step:
    """Mean milliseconds of a step, and of its parts."""

    whole: float
    data: float
    optimizer: float

    @property
    def rest(self) -> float:
        """Everything else: forward, backward, communication."""
        return self.whole - self.data - self.optimizer


def train(context: RankContext, case: Case, way: Way) -> tuple[Step, bool]:
    """Trains two epochs as one rank; returns the steps of the second, and whether it knows the time for data."""
    if way.alone:
        context = context.alone()
    config = TrainConfig(
        task="regression",
        batch_size=case.batch * context.world.world_size,
        epochs=2,
        strategy_params={} if way.bucket_mb is None else {"bucket_cap_mb": way.bucket_mb},
    )
    with optimizer_seconds() as stepping:
        course = fit(context, case.batch * case.steps, case.inputs, case.recipe, config)
    # Rank 0 says how long all ranks waited for data.
    waited = course.history[1]["data_wait_share"] * course.history[1]["seconds"] if course.history else 0.0
    parts = course.epochs[1], waited, sum(stepping[case.steps :])
    return Step(*(1000 * part / case.steps for part in parts)), bool(course.history)


@contextmanager
def optimizer_seconds() -> Iterator[list[float]]:
    """Times every optimizer's step inside the block."""
    took: list[float] = []
    started = 0.0

    def before(*_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def after(*_: Any) -> None:
        took.append(time.perf_counter() - started)

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield took
    finally:
        for handle in handles:
            handle.remove()


class Turns:
    """The turns of all cases and ways; each gives its milliseconds a step and notes the parts."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._noted: dict[tuple[str, Way], list[Step]] = {}

    def sides(self, ways: Iterable[Way]) -> dict[str, Callable[[], float]]:
        """Returns the turns by name."""
        return {f"{name}: {way}": partial(self._take, name, way) for name, way in product(CASES, ways)}

    def _take(self, name: str, way: Way) -> float:
        results = self._ranks.first(way.ranks, train, CASES[name], way)
        mean = Step(
            statistics.fmean(step.whole for step, _ in results),
            statistics.fmean(step.data for step, knows in results if knows),
            statistics.fmean(step.optimizer for step, _ in results),
        )
        self._noted.setdefault((name, way), []).append(mean)
        return mean.whole

    def forget(self) -> None:
        """Forgets what was noted while warming up."""
        self._noted.clear()

    def median(self, name: str, way: Way) -> Step:
        """Returns the median of each part of a case's steps."""
        steps = self._noted[name, way]
        return Step(
            *(statistics.median(getattr(step, part) for step in steps) for part in ("whole", "data", "optimizer"))
        )

    def split(self, name: str, way: Way) -> dict[str, float]:
        """Returns the parts of a case's steps, in milliseconds."""
        step = self.median(name, way)
        silent = way.alone or way.ranks == 1
        compute = step.rest if silent else self.median(name, Way(way.ranks, alone=True)).rest
        exposed = step.rest - compute
        return {
            "step": step.whole,
            "compute": compute,
            "exposed": exposed,
            "data": step.data,
            "optimizer": step.optimizer,
        }


def show(splits: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Prints the splits of the steps of all cases."""
    for name, split in splits.items():
        print(f"\n{name + ', ms':34}" + "".join(f"{part:>11}" for part in next(iter(split.values()))))
        for way, parts in split.items():
            print(f"{way:34}" + "".join(f"{value:11.2f}" for value in parts.values()))


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds `--ranks`."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to scale to, with a core each")


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", add_ranks)
    size, cores = options.ranks, len(os.sched_getaffinity(0))
    if not 2 <= size <= cores:
        raise SystemExit(f"--ranks must be between 2 and the number of cores, {cores}")
    with workspace(), Ranks(size, pinned=True) as ranks:
        turns = Turns(ranks)
        interleave(turns.sides([Way(1), Way(size)]), 1)
        turns.forget()
        samples = interleave(turns.sides(ways(size)), 2 if options.quick else 5)
    last = (Way(1), *(way for way in ways(size) if way.ranks == size))
    splits = {name: {str(way): turns.split(name, way) for way in last} for name in CASES}
    _, table = printed(lambda: show(splits))
    ratios, goals = {}, {}
    for name, case in CASES.items():
        alone = turns.median(name, Way(1)).whole
        for way in ways(size):
            if way.ranks > 1 and way == Way(way.ranks):
                efficiency = f"{name}: efficiency on {way.ranks} ranks"
                ratios[efficiency] = alone / turns.median(name, way).whole
                if case.goal:
                    goals[efficiency] = case.goal
        for mb in BUCKETS_MB:
            saved = 1 - turns.median(name, Way(size, mb)).whole / turns.median(name, Way(size, ONE_BUCKET_MB)).whole
            ratios[f"{name}: saved by overlap, buckets of {mb} MB"] = saved
    report(
        "scaling",
        samples={f"{name}, ms a step": values for name, values in samples.items()},
        ratios=ratios,
        goals=goals,
        facts={"ranks": size, "printed": {"splits": table}, **machine("torch")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
