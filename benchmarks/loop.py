"""Seconds a step of the training loop, beside a DDP loop written by hand; the shard, beside a DataLoader.

Two spawned Gloo ranks without Spark, one torch thread each. Both sides run in the same two processes, turn about: each
opens a process group, builds the module and trains; the first epoch of a turn warms up, whole epochs after it are
measured, from the end of one to the end of the next: order of the rows, sums over the ranks and reports included. The
same module, batch, fused AdamW and `gradient_as_bucket_view`; the loop by hand draws its batches from tensors in memory
with `randperm` and `index_select`, and sums its loss.

The loop by hand runs in a group from a plain `init_process_group`, and in one that sparktorch opens, which has Gloo's
event loop as a batch thread: in the same group, what is left is what the loop itself costs. A module has one goal for
both.

The shard and the DataLoader only hand out their batches, in one process.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Goal, arguments, interleave, machine, report, seconds, workspace
from benchmarks.nets import Mlp
from benchmarks.ranks import RankContext, Ranks, arrays_of, columns, fit, rows_of
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import LABEL, input_name
from sparktorch.data.dataset.reader import read_shard
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.distributed.process_group import process_group
from sparktorch.train.recipe.recipe import Recipe

RANKS = 2
LEARNING_RATE = 1e-3
TIMEOUT = timedelta(minutes=5)
SHARD_ROWS, SHARD_WIDTH, SHARD_BATCH = 200_000, 32, 256


@dataclass(frozen=True)
class Case:
    """What is trained: module, rows of a rank in a step, steps of an epoch."""

    layers: int
    width: int
    batch: int
    steps: int


# The strategies beside "ddp", on the deep MLP: what a step of each may cost, times that of "ddp".
STRATEGIES = {"zero1": Goal(1.15)}
DEEP, SMALL = "MLP 1024 x 4", "MLP 100-256-1"
CASES = {DEEP: Case(4, 1024, 256, 12), SMALL: Case(1, 256, 512, 200)}
BY_HAND = ("by hand", "by hand, our group")
MOST = {DEEP: Goal(1.02), SMALL: Goal(1.03)}
GOALS = {f"{name}: loop / {other}": MOST[name] for name in CASES for other in BY_HAND} | {
    f"{DEEP}: {strategy} / ddp": goal for strategy, goal in STRATEGIES.items()
}
GOALS["DataLoader / shard"] = Goal(40, at_least=True)


@dataclass(frozen=True)
class Turn:
    """Mean seconds of a step in the measured epochs, and the loss of the last one."""

    step: float
    loss: float


def ours(context: RankContext, case: Case, epochs: int, strategy: str) -> Turn:
    """Takes a turn of the training loop."""
    recipe = Recipe(module=Mlp, module_params={"width": case.width, "layers": case.layers}, learning_rate=LEARNING_RATE)
    config = TrainConfig(
        task="regression", batch_size=case.batch * context.world.world_size, epochs=epochs, strategy=strategy
    )
    course = fit(context, case.batch * case.steps, Mlp.inputs, recipe, config)
    loss = course.history[-1]["loss"] if course.history else float("nan")
    return Turn(statistics.fmean(course.epochs[1:]) / case.steps, loss)


def by_hand(context: RankContext, case: Case, epochs: int, *, calm: bool) -> Turn:
    """Takes a turn of the loop by hand, and in a group that sparktorch opens if `calm`."""
    with process_group(context.world, context.store(), timeout=TIMEOUT) if calm else context.plain_group():
        return loop_by_hand(context.world, case, epochs)


def loop_by_hand(world: World, case: Case, epochs: int) -> Turn:
    """Runs the loop by hand; the module is gone before the group is, or torch may wait for it for ever."""
    arrays = arrays_of(world, case.batch * case.steps, Mlp.inputs)
    features, label = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
    torch.manual_seed(0)
    module = DistributedDataParallel(Mlp(case.width, case.layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    criterion = nn.MSELoss()
    torch.manual_seed(world.rank)
    took = []
    for _ in range(epochs):
        started = time.perf_counter()
        loss_sum = torch.zeros(())
        for index in torch.randperm(len(label)).split(case.batch):
            optimizer.zero_grad()
            output = module(features.index_select(0, index))
            loss = criterion(output, label.index_select(0, index))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        took.append(time.perf_counter() - started)
    return Turn(statistics.fmean(took[1:]) / case.steps, float(loss_sum) / case.steps)


class Turns:
    """The sides of the comparison of loops; each returns its milliseconds a step."""

    def __init__(self, ranks: Ranks, *, quick: bool) -> None:
        self._ranks = ranks
        self._epochs = 2 if quick else 3
        self.losses: dict[str, dict[str, float]] = {}

    def sides(self) -> dict[str, Callable[[], float]]:
        """Returns the sides by name."""
        sides: dict[str, Callable[[], float]] = {}
        for name, case in CASES.items():
            sides[f"{name}: loop"] = partial(self._take, name, "loop", ours, case, strategy="ddp")
            sides[f"{name}: by hand"] = partial(self._take, name, "by hand", by_hand, case, calm=False)
            sides[f"{name}: by hand, our group"] = partial(self._take, name, "our group", by_hand, case, calm=True)
        for strategy in STRATEGIES:
            sides[f"{DEEP}: {strategy}"] = partial(self._take, DEEP, strategy, ours, CASES[DEEP], strategy=strategy)
        return sides

    def _take(self, name: str, side: str, body: Callable[..., Turn], case: Case, **options: Any) -> float:
        turns = self._ranks(body, case, self._epochs, **options)
        losses = [turn.loss for turn in turns if not math.isnan(turn.loss)]
        self.losses.setdefault(name, {})[side] = statistics.fmean(losses)
        return 1000 * statistics.fmean(turn.step for turn in turns)

    def check(self) -> None:
        """Compares what the sides have learned.

        Raises:
            RuntimeError: One has learned something else.
        """
        for name, losses in self.losses.items():
            if max(losses.values()) > 1.5 * min(losses.values()):  # Another order of the rows makes up to 1.4.
                raise RuntimeError(f"{name}: the sides do not train alike: {losses}")


class Feeds:
    """The sides of the comparison of feeds, in this process; each returns its milliseconds an epoch."""

    def __init__(self) -> None:
        self._epoch = 0
        world = World()
        arrays = arrays_of(world, SHARD_ROWS, SHARD_WIDTH)
        self._tensors = torch.tensor(arrays[input_name(0)]), torch.tensor(arrays[LABEL])
        self._shard = read_shard(rows_of(world, SHARD_ROWS, SHARD_WIDTH), columns(SHARD_WIDTH))
        self._shard.schedule(0, SamplingPlan(rows=SHARD_ROWS, batch_size=SHARD_BATCH), epochs=1_000)
        self._loader = DataLoader(TensorDataset(*self._tensors), batch_size=SHARD_BATCH, shuffle=True)

    def shard(self) -> float:
        """Takes a new epoch of the shard: its order, the weight of each of its steps, and its batches."""

        def epoch() -> None:
            self._epoch += 1
            self._shard.step_weights(self._epoch)
            assert sum(batch.rows for batch in self._shard.epoch(self._epoch)) == SHARD_ROWS

        return 1000 * seconds(epoch)

    def loader(self) -> float:
        """Takes an epoch of `DataLoader(TensorDataset)`, which puts its batches together row by row."""

        def epoch() -> None:
            assert sum(len(label) for _, label in self._loader) == SHARD_ROWS

        return 1000 * seconds(epoch)

    def index(self) -> float:
        """Takes an epoch by `randperm` and `index_select`, as by hand."""

        def epoch() -> None:
            for index in torch.randperm(SHARD_ROWS).split(SHARD_BATCH):
                for tensor in self._tensors:
                    tensor.index_select(0, index)

        return 1000 * seconds(epoch)

    def sides(self) -> dict[str, Callable[[], float]]:
        """Returns the sides by name."""
        return {"shard": self.shard, "DataLoader": self.loader, "randperm and index_select": self.index}


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    rounds = 2 if options.quick else 5
    torch.set_num_threads(1)
    with workspace():
        feeds = Feeds()
        interleave(feeds.sides(), 1)  # These turns warm up.
        fed = interleave(feeds.sides(), rounds)
        with Ranks(RANKS) as ranks:
            turns = Turns(ranks, quick=options.quick)
            interleave(turns.sides(), 1)
            stepped = interleave(turns.sides(), rounds)
        turns.check()
    median = {name: statistics.median(values) for name, values in (fed | stepped).items()}
    ratios = {}
    for name in CASES:
        for other in BY_HAND:
            ratios[f"{name}: loop / {other}"] = median[f"{name}: loop"] / median[f"{name}: {other}"]
    for strategy in STRATEGIES:
        ratios[f"{DEEP}: {strategy} / ddp"] = median[f"{DEEP}: {strategy}"] / median[f"{DEEP}: loop"]
    ratios["DataLoader / shard"] = median["DataLoader"] / median["shard"]
    report(
        "loop",
        samples={f"{name}, ms a step": values for name, values in stepped.items()}
        | {f"{name}, ms an epoch": values for name, values in fed.items()},
        ratios=ratios,
        goals=GOALS,
        facts=machine("torch"),
        path=options.json,
    )


if __name__ == "__main__":
    main()
