"""What it costs to save a checkpoint after each epoch: seconds of an epoch with saving, beside those without.

Two spawned Gloo ranks without Spark, one torch thread each, DDP, an MLP of four layers of 1024 with AdamW: 13 MB of
weights, 39 MB a checkpoint with the optimizer's two moments. An epoch is 120 steps of 256 rows a rank, several seconds:
shorter ones are saved every few epochs, or by `checkpointUnit="step"`. Both sides run in the same two processes, turn
about; the first epoch of a turn warms up, whole epochs after it are measured, from the end of one to the end of the
next. So the copy to host memory is in, and the writing of the epoch before, which goes on meanwhile on the same cores.

The parts are measured in the turns with saving: the copy, for which the loop waits, and a rank's writing in the
background with its checksums and fsync. Checkpoints go to the temporary directory's file system.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.common import Goal, arguments, interleave, machine, report, workspace
from benchmarks.nets import Mlp
from benchmarks.ranks import RankContext, Ranks, fit
from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.train.recipe.recipe import Recipe

RANKS = 2
WIDTH, LAYERS, BATCH, STEPS = 1024, 4, 256, 120
GOALS = {"epoch with saving / without": Goal(1.03)}


@dataclass(frozen=True)
class Turn:
    """Seconds of each measured epoch, and of a copy to host memory and of a rank's write, each a mean."""

    epochs: list[float]
    copy: float
    write: float


def train(context: RankContext, epochs: int, steps: int, folder: str | None) -> Turn:
    """Takes a turn in one rank; saves each epoch if there is a folder."""
    recipe = Recipe(module=Mlp, module_params={"width": WIDTH, "layers": LAYERS})
    config = TrainConfig(task="regression", batch_size=BATCH * context.world.world_size, epochs=epochs)
    checkpoint = CheckpointConfig(directory=folder, owner=folder) if folder else None
    course = fit(context, BATCH * steps, Mlp.inputs, recipe, config, checkpoint=checkpoint)
    copy, write = (course.seconds.get(f"checkpoint_{name}", 0.0) / epochs for name in ("copy", "write"))
    return Turn(course.epochs[1:], copy, write)


class Turns:
    """The two sides; each returns the seconds of an epoch."""

    def __init__(self, ranks: Ranks, work: Path, *, quick: bool) -> None:
        self._ranks, self._work = ranks, work
        self._epochs, self._steps = (3, 30) if quick else (4, STEPS)
        self.copies: list[float] = []
        self.writes: list[float] = []
        self.megabytes = 0.0

    def take(self, *, saving: bool) -> float:
        """Takes a turn in all ranks."""
        folder = mkdtemp(dir=self._work) if saving else None
        turns = self._ranks(train, self._epochs, self._steps, folder)
        if folder:
            self.copies.append(1000 * max(turn.copy for turn in turns))
            self.writes.append(1000 * max(turn.write for turn in turns))
            latest = max(Path(folder).glob("step-*"))
            self.megabytes = sum(file.stat().st_size for file in latest.iterdir()) / 1e6
        return statistics.fmean(statistics.fmean(turn.epochs) for turn in turns)


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "")
    with workspace() as work, Ranks(RANKS) as ranks:
        turns = Turns(ranks, work, quick=options.quick)
        sides = {"saving": partial(turns.take, saving=True), "not saving": partial(turns.take, saving=False)}
        interleave(sides, 1)  # The first turns warm up.
        turns.copies, turns.writes = [], []
        samples = interleave(sides, 2 if options.quick else 5)
    median = {name: statistics.median(values) for name, values in samples.items()}
    copy = statistics.median(turns.copies) / 1000
    report(
        "checkpoint",
        samples={
            "epoch with saving, s": samples["saving"],
            "epoch without, s": samples["not saving"],
            "copy to host memory, ms": turns.copies,
            "a rank's write in the background, ms": turns.writes,
        },
        ratios={
            "epoch with saving / without": median["saving"] / median["not saving"],
            "copy / epoch": copy / median["not saving"],
        },
        goals=GOALS,
        facts={"checkpoint_megabytes": round(turns.megabytes, 1), **machine("torch")},
        path=options.json,
    )


if __name__ == "__main__":
    main()
