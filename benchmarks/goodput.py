"""Goodput of a training whose workers are killed at random, beside torchrun's elastic agent with the same kills.

Two ranks on two executors of a local-cluster train an MLP on 20,000 rows of 100 float32 in steps of 50 ms, of which
most is sleep: it stands for a device that computes, and leaves the cores to whatever a recovery does. A checkpoint
follows every 20 steps. About every 30 s (20 to 40, by the same random numbers on both sides) a rank's process gets
SIGKILL. Goodput is the share of the wall time, from the start of the job to its end, in which steps were trained that
count: the number of steps times the median seconds of one. Recovery is the time from a kill to the end of the first
step that had not been trained before. The weights are compared with those of a training that nobody disturbs.

torchrun starts its processes again, and a hand-written script reads its last checkpoint. Our session is open before the
time begins; the agent starts with it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession

from benchmarks import by_hand
from benchmarks.common import ROOT, Goal, arguments, machine, report, session, workspace
from benchmarks.fit_wall import write_rows
from benchmarks.goodput_by_hand import BATCH, INTERVAL, ROWS, STEP_SECONDS, Log
from sparktorch import Callback, TorchRegressionModel, TorchRegressor
from sparktorch.train.callbacks import FitContext

RANKS = 2
Weights = dict[str, torch.Tensor]
# Two executors of one core, which may die often, with the setting that docs/reliability.md advises.
CLUSTER: dict[str, Any] = {
    "master": "local-cluster[2,1,1024]",
    "spark__deploy__maxExecutorRetries": "-1",
    "spark__executorEnv__PYTHONPATH": str(ROOT),
    "spark__python__daemon__module": "sparktorch.spark.daemon",
}
GOALS = {
    "goodput": Goal(0.85, at_least=True),
    "goodput / torchrun's": Goal(1.0, at_least=True),
    "largest difference of weights": Goal(1e-5),
}


class Paced(Callback):
    """Makes steps last so many seconds, and logs them as the hand-written script does."""

    ranks = "all"

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._log: Log | None = None

    def on_fit_start(self, context: FitContext) -> None:
        """Starts the log."""
        self._log = Log(self._folder, context.world.rank, self._seconds)

    def on_step_end(self, context: FitContext) -> None:
        """Logs a step."""
        assert self._log is not None
        self._log.step(context.step)


class Kills:
    """Kills a random rank's process from time to time, and knows what became of it."""

    def __init__(self, folder: Path, least: float, most: float, longest: float) -> None:
        self._folder, self._least, self._most, self._longest = folder, least, most, longest
        self._random, self._over = random.Random(5), threading.Event()
        self.times: list[float] = []
        folder.mkdir()

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Kills ranks until the block ends."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _run(self) -> None:
        until = time.monotonic() + self._longest  # A training that takes longer may end without further kills.
        while not self._over.wait(self._random.uniform(self._least, self._most)) and time.monotonic() < until:
            rank = self._random.randrange(RANKS)
            with contextlib.suppress(OSError):  # The process may not have begun, or not have begun again.
                pid = int((self._folder / f"pid-{rank}").read_text())
                if "python" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
                    self.times.append(time.time())

    def recoveries(self) -> list[float]:
        """Returns the seconds from each kill to the end of the first step that had not been trained before."""
        steps, recoveries = logged(self._folder), []
        for kill in self.times:
            done = max((step for at, step in steps if at <= kill), default=0)
            after = [at for at, step in steps if at > kill and step > done]
            if after:
                recoveries.append(min(after) - kill)
        return recoveries


def logged(folder: Path) -> list[tuple[float, int]]:
    """Returns when rank 0 had done which step."""
    lines = (folder / "steps").read_text().splitlines()
    return [(float(at), int(step)) for at, step in (line.split() for line in lines)]


def step_seconds(folder: Path) -> float:
    """Returns the median seconds of a step."""
    pairs = itertools.pairwise(logged(folder))
    return statistics.median(end - start for (start, step), (end, following) in pairs if following == step + 1)


def fitted(spark: SparkSession, data: Path, folder: Path, epochs: int, seconds: float) -> TorchRegressionModel:
    """Returns what a fit has come to, with steps of so many seconds."""
    estimator = TorchRegressor(
        module=by_hand.MLP,
        learningRate=by_hand.LEARNING_RATE,
        batchSize=BATCH,
        epochs=epochs,
        numWorkers=RANKS,
        device="cpu",
        progress=False,
        logLevel="ERROR",
        checkpointDir=str(folder / "checkpoints"),
        checkpointUnit="step",
        checkpointInterval=INTERVAL,
        maxRestarts=1000,
        callbacks=[Paced(folder, seconds)],
    )
    return estimator.fit(spark.read.parquet(str(data)))


def by_torchrun(data: Path, folder: Path, epochs: int, seconds: float) -> Weights:
    """Trains under torchrun's agent, which starts all ranks again whenever one is lost; returns the weights.

    By default, the agent of torch 2.13 gives ranks that are started again the store of those before, where they find
    addresses at which nobody listens, and hang. So each start gets a store of its own here.
    """
    script = Path(__file__).with_name("goodput_by_hand.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=1000", str(script)]
    with (folder / "torchrun.log").open("w") as log:
        subprocess.run(
            [*command, str(data), str(folder), str(epochs), str(seconds)],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )
    weights: Weights = torch.load(folder / "weights.pt")
    return weights


def apart(weights: Weights, others: Weights) -> float:
    """Returns the largest difference of two modules' weights."""
    return max(float((weights[name] - value).abs().max()) for name, value in others.items())


def measured(kills: Kills, folder: Path, train: Callable[[], Weights], steps: int) -> tuple[float, Weights]:
    """Trains while ranks are killed; returns the goodput and the weights."""
    begun = time.monotonic()
    with kills.going_on():
        weights = train()
    return steps * step_seconds(folder) / (time.monotonic() - begun), weights


def duration(parser: argparse.ArgumentParser) -> None:
    """Adds how long a side would train without kills."""
    parser.add_argument("--seconds", type=int, default=600, help="that a side would train without kills")


def main() -> None:
    """Runs the benchmark."""
    options = arguments(__doc__ or "", duration)
    seconds, least, most = (90, 15, 25) if options.quick else (options.seconds, 20, 40)
    per_epoch = -(-ROWS // BATCH)
    epochs = round(seconds / STEP_SECONDS / per_epoch)
    with workspace() as work:
        data = work / "rows"
        write_rows(data, ROWS, 8)
        ours, theirs, calm, other = (work / name for name in ("ours", "theirs", "calm", "calm-theirs"))
        kills, their_kills = (Kills(folder, least, most, 3 * seconds) for folder in (ours, theirs))
        for folder in (calm, other):
            folder.mkdir()
        with session(work, **CLUSTER) as spark:
            spark.sparkContext.setLogLevel("OFF")
            expected = fitted(spark, data, calm, epochs, 0).module.state_dict()
            models: list[TorchRegressionModel] = []

            def train() -> Weights:
                models.append(fitted(spark, data, ours, epochs, STEP_SECONDS))
                return models[0].module.state_dict()

            goodput, weights = measured(kills, ours, train, epochs * per_epoch)
        their_expected = by_torchrun(data, other, epochs, 0)
        their_train = partial(by_torchrun, data, theirs, epochs, STEP_SECONDS)
        their_goodput, their_weights = measured(their_kills, theirs, their_train, epochs * per_epoch)
        recoveries = {"recovery, s": kills.recoveries(), "recovery of torchrun, s": their_kills.recoveries()}
    summary = models[0].summary
    report(
        "goodput",
        samples={name: values for name, values in recoveries.items() if values},
        ratios={
            "goodput": goodput,
            "torchrun's goodput": their_goodput,
            "goodput / torchrun's": goodput / their_goodput,
            "goodput as summary has it": summary.goodput,
            "largest difference of weights": apart(weights, expected),
            "largest difference of torchrun's weights": apart(their_weights, their_expected),
        },
        goals=GOALS,
        facts={
            "steps": epochs * per_epoch,
            "kills": [len(kills.times), len(their_kills.times)],
            "redone": sum(attempt["redone"] for attempt in summary.attempts),
            **machine("torch", "pyspark"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()
