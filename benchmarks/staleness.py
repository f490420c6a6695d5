"""What staleness costs and what it saves: digits trained in step, within bounds, and without.

Each rank sleeps before each step for a random time, as if its host were busy with other things: `--delay`
milliseconds on average, exponentially distributed. Everything runs on this machine, and what sleeps needs no core.
Draws a figure, too.
"""

from __future__ import annotations

import argparse
import operator
import random
import statistics
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.common import arguments, machine, printed, report
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.data.columns import KEY, LABEL, VALIDATION, Columns, TensorSpec, input_name
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.data.sampling.plan import rank_of_key
from sparktorch.distributed.client import Client
from sparktorch.distributed.server import ControlServer
from sparktorch.distributed.store import Rendezvous, connect
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob, train_partition

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "SSP, s = 1": ("parameterServer", {"staleness": 1}),
    "SSP, s = 4": ("parameterServer", {"staleness": 4}),
    "SSP, s = 16": ("parameterServer", {"staleness": 16}),
    "ASP": ("parameterServer", {}),
}


@dataclass(frozen=True)
class Setting:
    """One row of the figure.

    Attributes:
        title: What is said of it.
        ranks: Number of ranks.
        slow: How much longer than the others the last rank sleeps.
        learning_rate: Of SGD.
        momentum: Of SGD.
    """

    title: str
    ranks: int
    slow: float = 1.0
    learning_rate: float = 0.5
    momentum: float = 0.0


SETTINGS = (
    Setting("2 ranks", 2),
    Setting("4 ranks", 4),
    Setting("4 ranks, one 3 times as slow", 4, slow=3.0),
    Setting("4 ranks, learning rate 0.2, momentum 0.9", 4, learning_rate=0.2, momentum=0.9),
)
BATCH = 32
Runs = dict[str, list[list[dict[str, Any]]]]  # A mode has the history of each of its runs.

COLUMNS = Columns(
    inputs=(TensorSpec(name=input_name(0), column="pixels", dtype="float32", shape=(64,)),),
    label=TensorSpec(name=LABEL, column="digit", dtype="float64"),
    classes=10,
    validation="held_out",
)


class Delayed(nn.Sequential):
    """64-64-10, whose ranks are held up in training: for exponentially distributed times."""

    def __init__(self, delay: float, slow: float) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self._mean = delay * (slow if dist.get_rank() == dist.get_world_size() - 1 else 1)
        self._random = random.Random(dist.get_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Waits, where it trains, and computes."""
        if self.training and self._mean:
            time.sleep(self._random.expovariate(1 / self._mean))
        out: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out


def partitions(ranks: int) -> list[list[pa.RecordBatch]]:
    """Returns the digits, a quarter of them for validation, split over the ranks."""
    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    keys = generator.integers(-(2**63), 2**63 - 1, len(y), dtype=np.int64)
    arrays = {
        input_name(0): (x / 16).astype(np.float32),
        LABEL: y.astype(np.float64),
        VALIDATION: generator.random(len(y)) < 0.25,
        KEY: keys,
    }
    whole = pa.RecordBatch.from_arrays([to_arrow(values) for values in arrays.values()], names=list(arrays))
    return [[whole.filter(pa.array(rank_of_key(keys, ranks) == rank))] for rank in range(ranks)]


def run_rank(pipe: Connection, rendezvous: Rendezvous, world: World, job: TrainJob, batches: Any) -> None:
    """Runs the body of a rank's process; sends the history."""
    client = Client(partial(connect, rendezvous.host, rendezvous.port, rendezvous.prefix), world)
    with client.beating():
        pipe.send(train_partition(batches, world=world, job=job, client=client).meta.get("history"))


def train(mode: str, setting: Setting, seed: int, *, epochs: int, delay: float) -> list[dict[str, Any]]:
    """Trains once, with a process per rank; returns the history."""
    strategy, params = MODES[mode]
    recipe = Recipe(
        module=Delayed,
        module_params={"delay": delay / 1000, "slow": setting.slow},
        loss="CrossEntropyLoss",
        optimizer="SGD",
        optimizer_params={"momentum": setting.momentum},
        learning_rate=setting.learning_rate,
    )
    config = TrainConfig(
        task="classification",
        batch_size=BATCH,
        epochs=epochs,
        seed=seed,
        strategy=strategy,
        strategy_params=params,
    )
    job = TrainJob(columns=COLUMNS, recipe=recipe, config=config, max_imbalance=None)
    context = get_context("forkserver")
    context.set_forkserver_preload(["sparktorch.worker", "sklearn.datasets", "matplotlib.figure", "torch._dynamo"])
    server = ControlServer("127.0.0.1", "127.0.0.1")
    processes, pipes = [], []
    for rank, batches in enumerate(partitions(setting.ranks)):
        ours, theirs = context.Pipe(duplex=False)
        world = World(rank=rank, world_size=setting.ranks, local_rank=rank, address="127.0.0.1")
        process = context.Process(target=run_rank, args=(theirs, server.rendezvous, world, job, batches))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        history: list[dict[str, Any]]
        history, *_ = [pipe.recv() for pipe in pipes]
        return history
    finally:
        for process in processes:
            process.join()
        server.close()


def draw(runs_by_setting: dict[Setting, Runs], path: Path) -> None:
    """Draws validation loss over epochs and over seconds, one row of panels per setting."""
    figure = Figure(figsize=(11, 3 * len(runs_by_setting)), layout="constrained")
    panels = figure.subplots(len(runs_by_setting), 2, squeeze=False, sharey=True)
    for (left, right), (setting, modes) in zip(panels, runs_by_setting.items(), strict=True):
        for index, (mode, runs) in enumerate(modes.items()):
            losses = np.median([[record["val_loss"] for record in run] for run in runs], axis=0)
            seconds = np.median([np.cumsum([record["seconds"] for record in run]) for run in runs], axis=0)
            style = {"color": "black" if mode == "ddp" else f"C{index - 1}", "linewidth": 1.5}
            left.plot(np.arange(1, len(losses) + 1), losses, label=mode, **style)
            right.plot(seconds, losses, label=legend(mode, runs), **style)
        left.set(xlabel="epoch", ylabel="validation loss", title=setting.title)
        right.set(xlabel="seconds of training", title=setting.title)
        right.legend(title="staleness: mean, most", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for panel in (left, right):
            panel.set_yscale("log")
            panel.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
            panel.yaxis.set_minor_formatter("")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.set_xlim(left=0)
            panel.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def staleness(runs: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Returns mean and greatest staleness over all epochs of all runs."""
    records = [record for run in runs for record in run]
    return (
        statistics.mean(record.get("staleness_mean", 0.0) for record in records),
        max(record.get("staleness_max", 0.0) for record in records),
    )


def legend(mode: str, runs: list[list[dict[str, Any]]]) -> str:
    mean, most = staleness(runs)
    return f"{mode}: {mean:.1f}, {most:.0f}"


def show(runs_by_setting: dict[Setting, Runs]) -> None:
    """Prints medians over the runs, those of losses and accuracies after the last epoch."""
    print(f"{'':<12} {'staleness':>9} {'most':>5} {'seconds':>8} {'val_loss':>9} {'val_accuracy':>13}")
    for setting, modes in runs_by_setting.items():
        print(setting.title)
        for mode, runs in modes.items():
            mean, most = staleness(runs)
            loss, accuracy = (statistics.median(run[-1][name] for run in runs) for name in ("val_loss", "val_accuracy"))
            took = statistics.median(map(seconds, runs))
            print(f"{mode:<12} {mean:>9.1f} {most:>5.0f} {took:>8.2f} {loss:>9.4f} {accuracy:>13.4f}")


def seconds(run: list[dict[str, Any]]) -> float:
    """Returns how long the epochs of a run took."""
    took: float = sum(record["seconds"] for record in run)
    return took


def main() -> None:
    """Trains, draws, prints and writes the result."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--delay", type=float, default=10, help="mean milliseconds that a step is held up")
        parser.add_argument("--figure", type=Path, default=Path("docs/images/staleness.png"))

    options = arguments(__doc__ or "", add)
    epochs, seeds = (2, 2) if options.quick else (12, 5)
    runs_by_setting: dict[Setting, Runs] = {setting: {mode: [] for mode in MODES} for setting in SETTINGS}
    for setting, modes in runs_by_setting.items():
        for seed in range(seeds):
            for mode, runs in modes.items():
                runs.append(train(mode, setting, seed, epochs=epochs, delay=options.delay))
    draw(runs_by_setting, options.figure)
    _, table = printed(partial(show, runs_by_setting))
    samples = {
        f"{setting.title}: {mode}, s": [seconds(run) for run in runs]
        for setting, modes in runs_by_setting.items()
        for mode, runs in modes.items()
    }
    report(
        "staleness",
        samples=samples,
        ratios={
            f"{setting.title}: {mode} / ddp": statistics.median(
                map(operator.truediv, samples[f"{setting.title}: {mode}, s"], samples[f"{setting.title}: ddp, s"])
            )
            for setting in SETTINGS
            for mode in MODES
            if mode != "ddp"
        },
        goals={},
        facts=machine("torch") | {"printed": {"shown": table}},
        path=options.json,
    )


if __name__ == "__main__":
    main()
