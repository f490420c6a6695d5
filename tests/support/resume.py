"""A small training that is killed and goes on, its checkpoints in a folder or anywhere else."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparktorch import Callback
from sparktorch.base.config import CheckpointConfig, TrainConfig
from sparktorch.train.callbacks import FitContext
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.nets import Noisy
from tests.support.ranks import control_server, run_ranks, train_job

TABLE = Table.random(331, weighted=True, validated=True)
STEPS, EPOCHS = 8, 3


class Counts(Callback):
    """Kills one rank after one step, the first time; counts steps, and says how many in the end."""

    ranks = "all"

    def __init__(self, folder: Path, *, rank: int = -1, step: int = -1) -> None:
        self._folder, self._rank, self._step = folder, rank, step
        self.steps = 0

    def on_step_end(self, context: FitContext) -> None:
        self.steps += 1
        flag = self._folder / "killed"
        if (context.world.rank, context.step) == (self._rank, self._step) and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, context: FitContext) -> None:
        (self._folder / f"steps-{context.world.rank}").write_text(str(self.steps))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class OwnSteps(Counts):
    """Counts the steps of its own process only: a training that goes on takes fewer than one that begins."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def job_for(
    folder: Path | str,
    callback: Callback | None = None,
    *,
    module: Any = Noisy,
    owner: str = "me",
    interval: int = 1,
    **config: Any,
) -> TrainJob:
    """Trains for three epochs of eight steps, and saves every few of them in the folder, or under the URL."""
    values: dict[str, Any] = {
        "batch_size": 32,
        "epochs": EPOCHS,
        "seed": 3,
        "schedule_interval": "step",
        "warmup_steps": 5,
        "ema_decay": 0.9,
        **config,
    }
    return train_job(
        TABLE,
        Recipe(
            module=module,
            optimizer_params={"weight_decay": 0.05},
            learning_rate=1e-2,
            scheduler="OneCycleLR",
            scheduler_params={"max_lr": 1e-2, "cycle_momentum": False},  # zero1 knows of no momentum
            callbacks=[callback] if callback else [],
        ),
        TrainConfig(task="regression", **values),
        checkpoint=CheckpointConfig(directory=f"{folder}/checkpoints", unit="step", interval=interval, owner=owner),
    )


def parts(ranks: int) -> list[Any]:
    """Returns the record batches of each rank."""
    return [part.batches() for part in TABLE.parts(ranks)]


def killed(job: TrainJob, ranks: int, **options: Any) -> None:
    """Trains until a rank is killed."""
    with control_server() as server:
        ended = run_ranks(server, parts(ranks), job, **options)
    assert any(rank.exitcode == -signal.SIGKILL for rank in ended)
    assert all(rank.result is None for rank in ended)


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what of a history does not depend on the clock."""
    times = ("seconds", "rows_per_second", "data_wait_share")
    return [{name: value for name, value in record.items() if name not in times} for record in history]
