"""The settings that "auto" stands for: plain numbers, chosen by the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["AutomaticSettings", "TaskSettings", "automatic_settings", "fixed_settings"]

_LONGEST_BETWEEN = 500  # So many steps at most lie between validations: an epoch of many rows has thousands.
_SHORTEST_BETWEEN = 20


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The constants of one kind of task.

    Attributes:
        learning_rate: The learning rate.
        usual_rate: The learning rate of a training whose epochs the user has set.
        scheduler: The schedule of the learning rate, which steps after each step; `None` for a constant one.
        warmup: The share of the steps over which the learning rate rises.
        smallest_batch: The fewest rows of a batch, a power of two.
        largest_batch: The most rows of a batch, a power of two.
        steps_per_epoch: The steps that an epoch has, as far as both bounds of the batch allow it.
        least_patience: The fewest validations without a better one that end a training.
        most_patience: The most of them, where these take `least_steps`.
        patience_steps: The steps without a better validation that end a training, within these bounds.
        least_steps: The fewest steps of a training.
        most_steps: The steps after which a training ends in any case, with the end of an epoch.
        most_epochs: The most epochs, but for what `least_steps` take.
        least_epochs: The fewest epochs of a training that `rows_in_all` limits.
        rows_in_all: The rows that all epochs together train, each as often as it is trained; `None` for any number.
        unwatched_epochs: The fewest epochs of a training that holds nothing out, which has `least_steps` or more.
        rows_per_epoch: The samples for which such a training has one epoch, if they are few; `None` where it has its
            steps, however few they are.
        least_trained: The fewest samples that train where some are held out.
        least_held_out: The fewest samples that are held out, if any are.
    """

    learning_rate: float = 1e-3
    usual_rate: float = 1e-3
    scheduler: Any = None
    warmup: float = 0.0
    smallest_batch: int = 32
    largest_batch: int = 1024
    steps_per_epoch: int = 64
    least_patience: int = 4
    most_patience: int = 16
    patience_steps: int = 4_000
    least_steps: int = 400
    most_steps: int = 20_000
    most_epochs: int = 10_000
    least_epochs: int = 1
    rows_in_all: int | None = None
    unwatched_epochs: int = 1
    rows_per_epoch: int | None = None
    least_trained: int = 50
    least_held_out: int = 5


@dataclass(frozen=True, kw_only=True)
class AutomaticSettings:
    """What the Params of like names are while they are "auto"."""

    epochs: int
    batch_size: int
    learning_rate: float
    scheduler: Any
    warmup_steps: int | None = None
    patience: int | None
    validation_interval: int
    validation_unit: str

    @property
    def params(self) -> dict[str, Any]:
        """The values by the names of the Params."""
        return {
            "epochs": self.epochs,
            "batchSize": self.batch_size,
            "learningRate": self.learning_rate,
            "scheduler": self.scheduler,
            "earlyStoppingPatience": self.patience,
            "validationInterval": self.validation_interval,
            "validationUnit": self.validation_unit,
        }


def fixed_settings(task: TaskSettings) -> AutomaticSettings:
    """Returns the settings of a training whose epochs the user has set: those of other estimators."""
    return AutomaticSettings(
        epochs=1,
        batch_size=256,
        learning_rate=task.usual_rate,
        scheduler=None,
        patience=None,
        validation_interval=1,
        validation_unit="epoch",
    )


def automatic_settings(
    rows: int,
    task: TaskSettings,
    *,
    validates: bool,
    batch_size: int | None = None,
    least_batch: int = 1,
    workers: int = 1,
) -> AutomaticSettings:
    """Returns the settings for a number of samples that train.

    A training that validates ends by patience, another one after a fixed number of steps. Of the samples, each of
    `workers` trains its share alone, as under strategy "independent". `batch_size` is that of the user, if it is
    set, and `least_batch` the fewest rows that all workers can share.
    """
    rows = max(1, rows // workers)
    least_power = 1 << max(0, least_batch - 1).bit_length()  # It is the smallest power of two that is no less.
    batch = batch_size or max(_batch(rows, task), least_power)
    steps = -(-rows // batch)
    least_epochs = -(-task.least_steps // steps)
    unit, interval = "epoch", -(-_SHORTEST_BETWEEN // steps)
    steps_between = interval * steps
    if steps > 2 * _LONGEST_BETWEEN:
        unit, interval, steps_between = "step", _LONGEST_BETWEEN, _LONGEST_BETWEEN
    patience = min(task.most_patience, max(task.least_patience, -(-task.patience_steps // steps_between)))
    patience = max(patience, -(-task.least_steps // steps_between))
    epochs = min(task.most_epochs, -(-task.most_steps // steps))
    if task.rows_in_all is not None:
        epochs = min(epochs, max(task.least_epochs, task.rows_in_all // rows))
    epochs = max(1, epochs, least_epochs)
    if not validates:
        epochs = max(least_epochs, task.unwatched_epochs)
        if task.rows_per_epoch is not None:
            epochs = max(task.unwatched_epochs, min(epochs, rows // task.rows_per_epoch))
    return AutomaticSettings(
        epochs=epochs,
        batch_size=batch,
        learning_rate=task.learning_rate,
        scheduler=task.scheduler,
        warmup_steps=round(task.warmup * steps * epochs) or None,
        patience=patience if validates else None,
        validation_interval=interval if validates else 1,
        validation_unit=unit if validates else "epoch",
    )


def _batch(rows: int, task: TaskSettings) -> int:
    """Returns the power of two nearest to the rows of a step, within the task's bounds."""
    nearest: int = 2 ** round(math.log2(max(1.0, rows / task.steps_per_epoch)))
    return min(max(nearest, task.smallest_batch), task.largest_batch)
