"""The settings that "auto" stands for: plain numbers, chosen by the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["AutomaticSettings", "TaskSettings", "automatic_settings", "fixed_settings"]

_MOST_STEPS_BETWEEN = 500  # Validations are at most this number of steps apart: an epoch of many rows has thousands.
_FEWEST_STEPS_BETWEEN = 20


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The constants of one kind of task.

    Attributes:
        learning_rate: The learning rate.
        usual_rate: The learning rate of a training whose epochs the user has set.
        scheduler: The schedule of the learning rate, which changes the rate after each step; `None` for a constant
            rate.
        warmup: The share of the steps over which the learning rate rises.
        smallest_batch: The fewest rows of a batch, a power of two.
        largest_batch: The most rows of a batch, a power of two.
        steps_per_epoch: The number of steps in an epoch, as far as both bounds of the batch allow it.
        least_patience: The fewest validations without a better one after which a training ends.
        most_patience: The most validations without a better one, unless `least_steps` take more.
        patience_steps: The steps without a better validation after which a training ends, within these bounds.
        least_steps: The fewest steps of a training.
        most_steps: The steps after which a training ends in any case, with the end of an epoch.
        most_epochs: The most epochs, unless `least_steps` take more.
        least_epochs: The fewest epochs of a training that `rows_in_all` limits.
        rows_in_all: The rows that all epochs together train, counted in each epoch; `None` for any number.
        unwatched_epochs: The fewest epochs of a training without validation, which has `least_steps` or more.
        rows_per_epoch: If samples are few, a training without validation has one epoch for this number of samples, and
            need not have `least_steps`; `None` if it must have them.
        least_trained: The fewest samples that train if some are held out.
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
    """The values of the Params with these names that are "auto"."""

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
        """The values, by the names of the Params."""
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
    """Returns the settings of a training whose epochs the user has set, which are the defaults of other estimators."""
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
    """Returns the settings for a number of training samples.

    A training that validates ends by patience, and a training that does not after a fixed number of steps.

    Args:
        rows: The number of training samples.
        task: The constants of the task.
        validates: Whether the training validates.
        batch_size: The batch size that the user has set; `None` if it is "auto".
        least_batch: The fewest samples that all workers can share.
        workers: The number of workers that train alone on their share of the samples, as under strategy "independent".
    """
    rows = max(1, rows // workers)
    batch = batch_size or max(_batch(rows, task), _power(least_batch))
    steps = -(-rows // batch)
    epochs = _epochs_with_validation(rows, steps, task) if validates else _fixed_epochs(rows, steps, task)
    patience: int | None = None
    validation_unit = "epoch"
    validation_interval = 1
    if validates:
        validation_interval = -(-_FEWEST_STEPS_BETWEEN // steps)
        steps_between = validation_interval * steps
        if steps > 2 * _MOST_STEPS_BETWEEN:
            validation_unit = "step"
            validation_interval = _MOST_STEPS_BETWEEN
            steps_between = _MOST_STEPS_BETWEEN
        patience = _patience(steps_between, task)
    return AutomaticSettings(
        epochs=epochs,
        batch_size=batch,
        learning_rate=task.learning_rate,
        scheduler=task.scheduler,
        warmup_steps=round(task.warmup * steps * epochs) or None,
        patience=patience,
        validation_interval=validation_interval,
        validation_unit=validation_unit,
    )


def _fixed_epochs(rows: int, steps: int, task: TaskSettings) -> int:
    """Returns the epochs of a training without validation, for a number of samples and of steps in an epoch."""
    epochs = max(-(-task.least_steps // steps), task.unwatched_epochs)
    if task.rows_per_epoch is not None:
        epochs = max(task.unwatched_epochs, min(epochs, rows // task.rows_per_epoch))
    return epochs


def _epochs_with_validation(rows: int, steps: int, task: TaskSettings) -> int:
    """Returns the most epochs of a training that may end earlier by patience."""
    epochs = min(task.most_epochs, -(-task.most_steps // steps))
    if task.rows_in_all is not None:
        epochs = min(epochs, max(task.least_epochs, task.rows_in_all // rows))
    return max(1, epochs, -(-task.least_steps // steps))


def _patience(steps_between: int, task: TaskSettings) -> int:
    """Returns the validations without a better one that end a training, which are some steps apart."""
    patience = min(task.most_patience, max(task.least_patience, -(-task.patience_steps // steps_between)))
    return max(patience, -(-task.least_steps // steps_between))


def _batch(rows: int, task: TaskSettings) -> int:
    """Returns the power of two nearest to the batch that gives an epoch its steps, within the task's bounds."""
    wanted: int = 2 ** round(math.log2(max(1.0, rows / task.steps_per_epoch)))
    return min(max(wanted, task.smallest_batch), task.largest_batch)


def _power(rows: int) -> int:
    """Returns the smallest power of two that is not less than `rows`."""
    return 1 << max(0, rows - 1).bit_length()
