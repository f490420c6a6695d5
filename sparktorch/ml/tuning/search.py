"""Runs the trials of a search, each on one of the groups of ranks that hold the rows."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession
from tqdm.auto import tqdm

from sparktorch.base.config import TrainConfig
from sparktorch.base.optional import optuna
from sparktorch.errors import ConfigError, SparkTorchError, nearest
from sparktorch.ml.fit.prepared_data import PreparedData
from sparktorch.ml.fit.translate import config_of
from sparktorch.ml.tuning.discard import discard
from sparktorch.ml.tuning.space import Space, applied
from sparktorch.spark.compat import inheriting
from sparktorch.train.validation import improvements

__all__ = ["CAUSE", "EPOCHS", "Found", "Goal", "Search", "better", "value_of"]

CAUSE, EPOCHS = "sparktorch.cause", "sparktorch.epochs"  # user attributes of trials

_LOG = logging.getLogger(__name__)
_HOPELESS = 5  # failures without a success, or two for each group if there are many
_LONGEST_CAUSE = 2000
_WAIT_SECONDS = 0.1
_END_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a search is for.

    Attributes:
        metric: Name in the records of epochs.
        minimize: Whether smaller is better.
        trials: Number of trials of the study, those of earlier runs included.
        timeout: Seconds after which no trial begins.
    """

    metric: str
    minimize: bool
    trials: int
    timeout: float | None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A completed trial.

    Attributes:
        number: Its number in the study.
        value: Its value of the metric.
        values: What it set, by name.
        model: Its model.
    """

    number: int
    value: float
    values: dict[str, Any]
    model: Any


class _Verdicts:
    """Reports each epoch of a trial, and says whether the training ends there.

    Attributes:
        epochs: Number of epochs so far.
        pruned: Whether the pruner has ended the training.
        unknown: The names in a record that lacks the metric.
    """

    def __init__(self, trial: Any, metric: str, epochs: int, lock: Any, *, varies: bool) -> None:
        self.epochs, self.pruned = 0, False
        self._lock, self._reported, self._varies = lock, False, varies
        self._trial, self._metric, self._last = trial, metric, epochs
        self.unknown: list[str] | None = None

    def __call__(self, record: dict[str, Any]) -> bool:
        if record["epoch"] <= self.epochs:  # a restarted training repeats some
            return False
        self.epochs = record["epoch"]
        value = record.get(self._metric)
        if not isinstance(value, int | float):
            unvalidated = self._metric.startswith("val_") and "val_loss" not in record
            if unvalidated or self._reported or (self._varies and self.epochs < self._last):
                return False  # a later record may have it
            self.unknown = [name for name, number in record.items() if isinstance(number, int | float)]
            return True
        self._reported = True
        with self._lock:  # pruners are not made for several threads
            self._trial.report(value, self.epochs)
            self.pruned = self.epochs < self._last and self._trial.should_prune()
        return self.pruned


class Search:
    """The trials of one search.

    Attributes:
        best: The best trial that this search has completed.
    """

    def __init__(self, estimator: Any, space: Space, study: Any, goal: Goal, *, named: bool) -> None:
        """Begins nothing yet.

        Args:
            estimator: Is copied for each trial.
            space: What trials set.
            study: The study.
            goal: The metric and the budget.
            named: Whether each trial is logged in a run of its own, and gives it a name.
        """
        self.best: Found | None = None
        self._estimator, self._space, self._study, self._goal, self._named = estimator, space, study, goal, named
        earlier = study.get_trials(deepcopy=False)
        finished = sum(trial.state.is_finished() for trial in earlier)
        self._completed = any(trial.state.name == "COMPLETE" for trial in earlier)  # in an earlier run
        self.left = max(0, goal.trials - finished)
        self._lock = threading.RLock()
        self._stopped = False
        self._fatal: BaseException | None = None
        self._cause: Exception | None = None
        self._ended = self._failed = 0
        self._hopeless = _HOPELESS
        self._deadline = math.inf
        self._bar: tqdm[Any] | None = None

    def run(self, groups: list[PreparedData], spark: SparkSession, *, show: bool) -> None:
        """Runs trials until the budget is used up.

        Args:
            groups: The rows, one for each trial that runs at a time; all are closed in the end.
            spark: The session.
            show: Whether to show the progress.

        Raises:
            SparkTorchError: All trials have failed: the first cause; or no record of an epoch has the metric.
            KeyboardInterrupt: Raised again after all trials were cancelled.
        """
        self._begin(show=show)
        self._hopeless = max(_HOPELESS, 2 * len(groups))
        ends: list[threading.Event] = []
        try:
            for group in groups:
                ends.append(end := threading.Event())
                target = inheriting(spark, self._worker(group, end))
                threading.Thread(target=target, name="sparktorch-search", daemon=True).start()
            for end in ends:
                while not end.wait(_WAIT_SECONDS):  # unlike `join`, it survives an interrupt (bpo-45274)
                    pass
        except BaseException:  # an interrupt
            self._stopped = True
            for group in groups:
                threading.Thread(target=group.cancel, name="sparktorch-cancel", daemon=True).start()
            deadline = time.monotonic() + _END_SECONDS
            for end in ends:
                end.wait(max(0.0, deadline - time.monotonic()))
            raise
        finally:
            self._end()
        if self._fatal is not None:
            raise self._fatal
        if self._cause is not None and self._failed == self._ended and not self._completed:
            raise self._cause

    def _end(self) -> None:
        """Closes the bar, and deletes the best model if `run` raises; trials that end later do not become the best."""
        if self._bar is not None:
            self._bar.close()
        if not self._stopped:
            return
        with self._lock:
            best, self.best = self.best, None
        if best is not None:
            discard(best.model)

    def _begin(self, *, show: bool) -> None:
        total, timeout = self._goal.trials, self._goal.timeout
        if timeout is not None:
            self._deadline = time.monotonic() + timeout
        if show:
            self._bar = tqdm(
                total=total, initial=total - self.left, desc="search", unit="trial", dynamic_ncols=True, position=0
            )

    def _worker(self, group: PreparedData, end: threading.Event) -> Callable[[], None]:
        def work() -> None:
            try:
                group.bar_stays = group.gives_way = False
                with group:
                    while (trial := self._next()) is not None:
                        self._run(trial, group)
            except BaseException as error:  # handed to the thread that waits
                self._stop(error)
            finally:
                end.set()

        return work

    def _next(self) -> Any:
        """Returns the next trial, `None` if there is none."""
        with self._lock:
            if self._stopped or not self.left or time.monotonic() >= self._deadline:
                return None
            self.left -= 1
            before = len(self._study.get_trials(deepcopy=False))
            try:
                return self._space.ask(self._study)
            except Exception as error:
                for trial in self._study.get_trials(deepcopy=False)[before:]:  # Optuna has noted the trial already
                    self._study.tell(trial.number, state=optuna().trial.TrialState.FAIL)
                hint = "does it suit the space?"
                raise ConfigError(f"the sampler failed: {error}", hint=hint, param="sampler") from error

    def _run(self, trial: Any, group: PreparedData) -> None:
        module, goal = optuna(), self._goal
        group.title = f"trial {trial.number}"
        verdicts = unneeded = None  # a model that nothing returns
        try:
            with self._lock:  # samplers and the functions of users are not made for several threads
                values = self._space.values(trial)
            estimator = self._for_trial(values, trial.number)
            varies = bool(estimator.getOrDefault("callbacks"))  # which may add numbers to some records only
            verdicts = _Verdicts(trial, goal.metric, estimator.getEpochs(), self._lock, varies=varies)
            model = unneeded = estimator._fit_on(group, verdicts)
            if verdicts.unknown is not None:
                raise _unknown_metric(goal.metric, verdicts.unknown)
            value = value_of(model.summary.history, goal.metric, config_of(estimator))
            if not verdicts.pruned and (value is None or math.isnan(value)):
                raise ConfigError(f"{goal.metric} is {'in no record of an epoch' if value is None else value}")
        except module.TrialPruned:
            self._tell(trial, "PRUNED", verdicts)
        except Exception as error:
            self._fail(trial, error, verdicts)
        else:
            if verdicts.pruned:
                self._tell(trial, "PRUNED", verdicts)
            else:
                assert value is not None
                found = Found(number=trial.number, value=value, values=values, model=model)
                unneeded = self._tell(trial, "COMPLETE", verdicts, found)
        finally:
            if unneeded is not None:
                discard(unneeded)

    def _for_trial(self, values: dict[str, Any], number: int) -> Any:
        estimator = applied(self._estimator, values)
        if self._named:
            name = estimator.getOrDefault("mlflowRunName") if estimator.isDefined("mlflowRunName") else None
            estimator.setParams(mlflowRunName=f"{name}, trial {number}" if name else f"trial {number}")
        return estimator

    def _fail(self, trial: Any, error: Exception, verdicts: _Verdicts | None) -> None:
        with self._lock:
            if self._stopped and self._fatal is None:
                trial.set_user_attr(CAUSE, "the search was interrupted")
            else:
                trial.set_user_attr(CAUSE, _described(error)[:_LONGEST_CAUSE])
                _LOG.warning("trial %d failed: %s", trial.number, _described(error))
            self._failed += 1
            self._cause = self._cause or error
            self._tell(trial, "FAIL", verdicts)
            if verdicts is not None and verdicts.unknown is not None:
                self._stop(error)
            elif self._failed == self._ended >= self._hopeless and not self._stopped:
                _LOG.error("the first %d trials have all failed: the search ends", self._ended)
                self._stop(self._cause)

    def _tell(self, trial: Any, state: str, verdicts: _Verdicts | None, found: Found | None = None) -> Any:
        """Tells the study how a trial ended; returns the model to be deleted: its own, or the best before it."""
        lost = None
        with self._lock:
            trial.set_user_attr(EPOCHS, 0 if verdicts is None else verdicts.epochs)
            value = None if found is None else found.value
            self._told(trial.number, lambda: self._study.tell(trial, value, state=optuna().trial.TrialState[state]))
            self._ended += 1
            if found is not None:
                ahead = self.best is None or better(found, self.best, minimize=self._goal.minimize)
                lost, self.best = (self.best, found) if ahead and not self._stopped else (found, self.best)
            if self._bar is not None:
                if self.best is not None:
                    self._bar.set_postfix_str(f"best {self._goal.metric} {self.best.value:.4g}", refresh=False)
                self._bar.update()
        return None if lost is None else lost.model  # files are not deleted under the lock

    def _told(self, number: int, tell: Callable[[], Any]) -> None:
        """Tells the study; a sampler that has tried everything stops it, which Optuna allows in its own loop only."""
        try:
            tell()
        except RuntimeError:
            if not self._study.get_trials(deepcopy=False)[number].state.is_finished():
                raise
            self.left = 0

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._stopped = True
            self._fatal = self._fatal or error


def better(one: Any, other: Any, *, minimize: bool) -> bool:
    """Whether a trial is better than another; of two equal ones, the first is."""
    if one.value == other.value:
        return bool(one.number < other.number)
    return bool((one.value < other.value) == minimize)


def value_of(history: list[dict[str, Any]], metric: str, config: TrainConfig) -> float | None:
    """Returns the metric of a model; `None` if no record has it.

    Args:
        history: The records of the epochs.
        metric: Its name.
        config: How it was trained: with patience, the model has the weights of the best validation, not the last ones.
    """
    known = [record for record in history if metric in record]
    if config.patience is not None:
        known = [{**record, **found} for found, record in improvements(history, config) if metric in record] or known
    return float(known[-1][metric]) if known else None


def _described(error: Exception) -> str:
    """Returns an error in a line or two, without traces."""
    if not isinstance(error, SparkTorchError):
        return f"{type(error).__name__}: {error}"
    place = ", ".join(f"{name}={value}" for name, value in error.where.items())
    return f"{type(error).__name__}: {error.what}{f' [{place}]' if place else ''}"


def _unknown_metric(metric: str, names: list[str]) -> ConfigError:
    return ConfigError(f"the records of epochs have no metric {metric!r}", hint=nearest(metric, names), param="metric")
