"""Reports a fit on the driver: to the progress bar, and to listeners named by import path."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.ml import Model
from pyspark.ml.param import Params
from pyspark.sql import SparkSession
from tqdm.auto import tqdm

from sparktorch.ml.fit.values import Values

if TYPE_CHECKING:
    from sparktorch.data.columns import Columns
    from sparktorch.ml.fit.summary import TrainingSummary
    from sparktorch.train.callbacks import Callback

__all__ = ["LISTENERS", "AttemptLog", "Fit", "FitListener", "FitReport", "callers"]

_LOG = logging.getLogger(__name__)

# Each module has two functions: `listener_for(fit) -> FitListener | None` is called at the start of each fit, and
# `caller() -> Any` in the thread that copies an estimator. This layer must not import the layers above it, so that
# these are import paths.
LISTENERS = ["sparktorch.tracking.listener"]


@dataclass(kw_only=True)
class Fit:
    """A fit, as listeners see it.

    Attributes:
        estimator: The estimator, or the Params of `run`.
        spark: The session of the fit.
        callers: What `callers` returned when the estimator was copied.
        columns: The training columns, once the DataFrame has been checked; `None` also for a run without one.
        kind: What it is: the class of the estimator, or "run".
    """

    estimator: Params
    spark: SparkSession
    callers: dict[str, Any] = field(default_factory=dict)
    columns: Columns | None = None
    kind: str = "run"


class FitListener:
    """Receives the events of one fit. It is called in the thread of the fit, and must not block.

    If a listener raises, a warning is logged, it is not called again, and the fit continues.
    """

    def prepared(self) -> None:
        """Called when the Params and the DataFrame have passed all checks before the job."""

    def progress(self, record: dict[str, Any]) -> None:
        """Receives rank 0's position, a few times a second: epoch, epochs, step, steps, loss (`None` if unknown)."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Receives an epoch's record when the epoch ends."""

    def finished(self, model: Model, summary: TrainingSummary) -> None:
        """Receives the fitted model."""

    def ended(self) -> None:
        """Called in place of `finished` when a function of `run` has ended in all ranks."""

    def failed(self, error: BaseException) -> None:
        """Receives the error that ended the fit."""


class AttemptLog:
    """The attempts of a fit, as `TrainingSummary.attempts` describes them."""

    def __init__(self) -> None:
        """Starts without attempts."""
        self._started = 0.0
        self._records: list[dict[str, Any]] = []

    def begin(self, workers: int) -> None:
        """Notes that an attempt begins; the time starts with the first one."""
        if not self._records:
            self._started = time.monotonic()
        attempt: dict[str, Any] = {"workers": workers, "began": self._seconds(), "ended": None, "why": ""}
        self._records.append(attempt | {"first": None, "last": None, "first_step": 0, "last_step": 0})

    def note(self, record: dict[str, Any]) -> None:
        """Notes rank 0's position; ranks tell of the first step of an attempt at once."""
        if not self._records:
            return
        now, step = self._seconds(), (record["epoch"] - 1) * record["steps"] + record["step"]
        last = self._records[-1]
        if last["first"] is None:
            last |= {"first": now, "first_step": step}
        if last["last_step"] != step:
            last |= {"last": now, "last_step": step}

    def end(self, why: str) -> None:
        """Notes that the attempt has ended, and why: what was lost or has changed, or nothing if it is done."""
        self._records[-1] |= {"ended": self._seconds(), "why": why}

    @property
    def has_trained(self) -> bool:
        """Whether the last attempt has got further than all before."""
        before = max((attempt["last_step"] for attempt in self._records[:-1]), default=0)
        return bool(self._records[-1]["last_step"] > before)

    def records(self, steps: int) -> list[dict[str, Any]]:
        """Returns the attempts of a training that has taken so many steps."""
        first_steps = [attempt["first_step"] for attempt in self._records if attempt["first"] is not None]
        records: list[dict[str, Any]] = []
        trained = 0
        for attempt in self._records:
            record = {name: attempt[name] for name in ("workers", "began", "ended", "why")}
            record |= {"steps": 0, "redone": 0, "training": 0.0, "first_step_after": None}
            if attempt["first"] is not None:
                trained += 1
                # Steps count up to where the earliest of the later attempts begins, which repeats the rest.
                end = min(first_steps[trained:], default=max(steps, attempt["last_step"]) + 1) - 1
                done = max(attempt["last_step"], end) - attempt["first_step"] + 1
                counted = max(0, end - attempt["first_step"] + 1)
                record |= {"steps": counted, "redone": done - counted}
                record["training"] = (attempt["last"] - attempt["first"]) * counted / done
                record["first_step_after"] = attempt["first"] - attempt["began"]
            records.append(record)
        return records

    def _seconds(self) -> float:
        return time.monotonic() - self._started


class FitReport:
    """Passes the events of one fit to the progress bar and the listeners.

    `judge` is called with the record of each epoch, and returns whether training ends there; `None` trains all epochs.
    Only ranks that hold their rows ask it.
    """

    def __init__(
        self, fit: Fit, *, title: str = "fit", stays: bool = True, judge: Callable[[dict[str, Any]], bool] | None = None
    ) -> None:
        """Creates the report; entering its block creates the listeners.

        `title` is what the bar says before the figures; `stays` keeps the bar on the screen after the fit.
        """
        self._title, self._stays, self.judge = title, stays, judge
        self.attempts = AttemptLog()
        self._fit, self._params = fit, Values(fit.estimator)
        self._bar: tqdm[Any] | None = None
        self._listeners: list[FitListener] = []
        self._bar_began = (time.monotonic(), 0)
        self._position = self._furthest = (0, 0)
        self._epochs_reported = 0

    def __enter__(self) -> FitReport:
        for module in LISTENERS:
            listener = _ask(module, "listener_for", self._fit)
            if listener is not None:
                self._listeners.append(listener)
        return self

    def prepared(self, columns: Columns | None) -> None:
        """Reports that all checks before the job have passed; from now on, callbacks receive events too."""
        self._fit.columns = columns
        self._tell("prepared")
        self._listeners += [_CallbackListener(callback) for callback in self._params["callbacks"] or ()]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is not None and not getattr(error, "expected", False):
            self._tell("failed", error)

    def progress(self, record: dict[str, Any]) -> None:
        """Moves the bar to rank 0's position, and reports each position to the listeners once."""
        self.attempts.note(record)
        position = (record["epoch"], record["step"])
        if position == self._position:
            return
        self._position = position
        if position > self._furthest:  # A resumed training repeats some steps.
            self._furthest = position
            self._tell("progress", record)
        if not self._params["progress"]:
            return
        done = (record["epoch"] - 1) * record["steps"] + record["step"]
        if self._bar is None:
            total = record["epochs"] * record["steps"]
            self._bar = tqdm(total=total, unit="step", desc=self._title, leave=self._stays, dynamic_ncols=True)
            self._bar_began = (time.monotonic(), done)
        began, done_before = self._bar_began
        per_second = (done - done_before) / max(time.monotonic() - began, 1e-9)
        self._move(done, record["epoch"], record["epochs"], record["loss"], per_second * self._params["batchSize"])

    def epoch(self, record: dict[str, Any]) -> None:
        """Reports a finished epoch to the listeners once; a resumed training repeats some."""
        if record["epoch"] <= self._epochs_reported:
            return
        self._epochs_reported = record["epoch"]
        self._tell("epoch", record)

    def finished(self, model: Model, summary: TrainingSummary) -> None:
        """Completes the bar, and passes the fitted model to the listeners."""
        if self._bar is not None:
            last, epochs = summary.history[-1], len(summary.history)
            self._bar.total = summary.totalIterations  # They are fewer where the training has ended early.
            self._move(summary.totalIterations, epochs, epochs, last["loss"], last["rows_per_second"])
        # Where rank 0 hosts the store, the driver has seen no epoch before, and reports all of them here.
        for record in summary.history[self._epochs_reported :]:
            self.epoch(record)
        self._tell("finished", model, summary)

    def ended(self) -> None:
        """Completes the bar, and reports the end of a run without a model."""
        if self._bar is not None:
            self._bar.update((self._bar.total or 0) - self._bar.n)
        self._tell("ended")

    def _move(self, done: int, epoch: int, epochs: int, loss: float | None, rate: float) -> None:
        assert self._bar is not None
        loss_text = f", loss {loss:.4g}" if loss is not None else ""
        self._bar.set_postfix_str(f"epoch {epoch}/{epochs}{loss_text}, {rate:,.0f} samples/s", refresh=False)
        self._bar.update(done - self._bar.n)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of each listener, and drops those that raise."""
        self._listeners = [listener for listener in self._listeners if _heard(listener, method, arguments)]


class _CallbackListener(FitListener):
    """Adapts a callback to the listener interface."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __repr__(self) -> str:
        return repr(self._callback)

    def progress(self, record: dict[str, Any]) -> None:
        self._callback.on_driver_progress(record)

    def epoch(self, record: dict[str, Any]) -> None:
        self._callback.on_driver_epoch(record)


def callers() -> dict[str, Any]:
    """Returns each listener module's `caller()` of the current thread, by module."""
    by_module = {module: _ask(module, "caller") for module in LISTENERS}
    return {module: caller for module, caller in by_module.items() if caller is not None}


def _ask(module: str, function: str, *arguments: Any) -> Any:
    """Returns what a function of a listener's module returns; `None`, with a warning, if it raises."""
    try:
        return getattr(importlib.import_module(module), function)(*arguments)
    except Exception:
        _LOG.warning("listener %s could not start; the fit goes on without it", module, exc_info=True)
        return None


def _heard(listener: FitListener, method: str, arguments: tuple[Any, ...]) -> bool:
    """Calls a method of a listener; returns whether it did without raising."""
    try:
        getattr(listener, method)(*arguments)
    except Exception:
        _LOG.warning("%r failed and hears no more of this fit", listener, exc_info=True)
        return False
    return True
