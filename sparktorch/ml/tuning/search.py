"""Runs the trials of a search, each on one of the groups of ranks that hold the rows."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from copy import copy
from functools import partial
from typing import Any, TypeVar

from tqdm.auto import tqdm

from sparktorch.base.config import TrainConfig
from sparktorch.base.imports import optuna
from sparktorch.errors import ConfigError, nearest
from sparktorch.ml.fit.prepared_data import PreparedData
from sparktorch.ml.fit.translate import config_of
from sparktorch.ml.tuning.space import Space, applied, optuna_quiet
from sparktorch.ml.tuning.tuned_model import CAUSE, EPOCHS, TorchTunerModel, discard
from sparktorch.spark.compat import inheriting
from sparktorch.train.loop.validation import improvements

__all__ = ["DEFAULT", "Search", "side_by_side", "value_of"]

DEFAULT = "sparktorch.default"  # The trial that sets nothing has this user attribute.

_LOG = logging.getLogger(__name__)
_HOPELESS = 5  # A search ends after so many failures without a success; with many groups, after two for each.
_LONGEST_CAUSE = 2000
_LOOK_SECONDS = 0.1  # Within this time, the search notices an interrupt that sends no signal.
_END_SECONDS = 20.0
_pruner_lock = threading.Lock()

G = TypeVar("G", bound=PreparedData)


class _Judge:
    """Reports every epoch of a trial to its study, and says whether the training ends there.

    A training ends in two cases:

    - The pruner says so, and the trial does not have the default settings.
    - A record has numbers, but not the metric.

    Attributes:
        epochs: The last epoch that was reported.
        pruned: Whether the pruner has ended the trial.
        unknown: The names in a record without the metric; empty if it was in all of them.
    """

    def __init__(self, trial: Any, metric: str, estimator: Any) -> None:
        self.epochs = 0
        self.pruned = False
        self.unknown = list[str]()
        self._trial = trial
        self._metric = metric
        self._last = config_of(estimator).epochs
        self._reported = False
        self._is_default = bool(trial.user_attrs.get(DEFAULT))
        # Callbacks may add a number to some records only.
        self._varies = bool(estimator.getOrDefault("callbacks"))

    def __call__(self, record: dict[str, Any]) -> bool:
        if record["epoch"] <= self.epochs:  # A training that was restarted repeats some epochs.
            return False
        self.epochs = record["epoch"]
        value = record.get(self._metric)
        if isinstance(value, int | float):
            self._reported = True
            with _pruner_lock:  # Some pruners fill lists that all trials share when they are first asked.
                self._trial.report(value, self.epochs)
                self.pruned = self.epochs < self._last and not self._is_default and self._trial.should_prune()
            return self.pruned
        # Not every epoch is validated, so a later record may have the metric.
        unvalidated = self._metric.startswith("val_") and "val_loss" not in record
        may_come_later = self._varies and self.epochs < self._last
        if unvalidated or self._reported or may_come_later:
            return False
        self.unknown = [name for name, number in record.items() if isinstance(number, int | float)]
        return True


class Search:
    """The trials of one search.

    Attributes:
        remaining: The number of trials that may still begin.
        models: The model of the study's best trial, by the number of the trial; empty if an earlier run trained it.
    """

    _bar: tqdm[Any]

    def __init__(self, estimator: Any, space: Space, study: Any, *, metric: str, trials: int, named: bool) -> None:
        """Takes how many `trials` the study is to have; if `named`, MLflow gets a run for each, named by its number."""
        self._estimator = estimator
        self._space = space
        self._study = study
        self.metric = metric
        self._trials = trials
        self._named = named
        earlier = study.get_trials(deepcopy=False)
        self.remaining = max(0, trials - sum(trial.state.is_finished() for trial in earlier))
        self._had_success = any(trial.state.name == "COMPLETE" for trial in earlier)
        self.models: dict[int, TorchTunerModel] = {}
        self._best: int | None = None
        self._lock = threading.Lock()
        self._hopeless = _HOPELESS
        self._causes: list[Exception] = []  # These errors made trials fail.
        self._fatal: Exception | None = None  # This error ends the search.
        self._succeeded = self._stopped = False

    def run(self, groups: list[PreparedData], *, timeout: float | None, show: bool) -> None:
        """Runs trials, one at a time on each group, until none is left or the time is over, and closes the groups.

        If all trials have failed, it raises the first cause. An interrupt cancels all trials.
        """
        self._hopeless = max(_HOPELESS, 2 * len(groups))
        progress: dict[str, Any] = {
            "total": self._trials,
            "initial": self._trials - self.remaining,
            "disable": not show,
        }
        self._bar = tqdm(**progress, desc="search", unit="trial", dynamic_ncols=True, position=0)
        with optuna_quiet(), self._bar:
            self.remaining -= len(groups)  # Every group begins with a trial.
            try:
                side_by_side(groups, partial(self._work, timeout=timeout), self._stop)
            except BaseException:  # This is an interrupt, or the error that ends the search.
                for model in self.models.values():
                    discard(model.bestModel)
                self.models.clear()
                raise
        if self._causes and not self._succeeded and not self._had_success:
            raise self._causes[0]

    def _stop(self) -> None:
        self._stopped = True

    def _work(self, group: PreparedData, timeout: float | None) -> None:
        """Lets Optuna run trials on a group; its loop ends when no trial is left, or the sampler knows no other."""
        group.bar_stays = False
        group.gives_way = False
        study = copy(self._study)  # `stop` ends the loop of this copy only, and other groups go on.
        with group:
            study.optimize(
                partial(self._trial, group), timeout=timeout, catch=(Exception,), callbacks=[self._after_trial]
            )

    def _trial(self, group: PreparedData, trial: Any) -> float:
        """Trains a trial; returns its value of the metric."""
        group.title = f"trial {trial.number}"
        judge = None
        unneeded = None  # This model is discarded, unless the trial ends with a value.
        try:
            with self._lock:  # A user's function, as the space, may not be safe in several threads.
                values = self._space.values(trial)
            estimator = self._for_trial(values, trial.number)._knowing(group.estimator)
            judge = _Judge(trial, self.metric, estimator)
            model = estimator._fit_on(group, judge)
            unneeded = model
            if judge.unknown:
                what = f"the records of epochs have no metric {self.metric!r}"
                self._fatal = ConfigError(what, hint=nearest(self.metric, judge.unknown), param="metric")
                raise self._fatal
            if judge.pruned:
                raise optuna().TrialPruned
            value = value_of(model.summary.history, self.metric, config_of(estimator))
            if value is None or math.isnan(value):
                raise ConfigError(f"{self.metric} is {'in no record of an epoch' if value is None else value}")
            self.models[trial.number] = TorchTunerModel(model, values, self._study)
            unneeded = None
            return value
        except optuna().TrialPruned:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {getattr(error, 'what', error)}"[:_LONGEST_CAUSE]
            if not self._stopped:
                _LOG.warning("trial %d failed: %s", trial.number, cause)
            trial.set_user_attr(CAUSE, "the search was interrupted" if self._stopped else cause)
            self._causes.append(error)
            raise
        finally:
            trial.set_user_attr(EPOCHS, 0 if judge is None else judge.epochs)
            if unneeded is not None:
                discard(unneeded)

    def _for_trial(self, values: dict[str, Any], number: int) -> Any:
        estimator = applied(self._estimator, values)
        if self._named:
            name = estimator.getOrDefault("mlflowRunName") if estimator.isDefined("mlflowRunName") else None
            estimator.setParams(mlflowRunName=f"{name}, trial {number}" if name else f"trial {number}")
        return estimator

    def _after_trial(self, study: Any, trial: Any) -> None:
        """Keeps the model if it is the best so far, and stops the group's loop if no trial is left."""
        with self._lock:
            unneeded_number: int | None = trial.number
            if trial.number in self.models and not self._stopped and study.best_trial.number == trial.number:
                unneeded_number = self._best
                self._best = trial.number
                self._bar.set_postfix_str(f"best {self.metric} {trial.value:.4g}", refresh=False)
            model = None if unneeded_number is None else self.models.pop(unneeded_number, None)
            self._bar.update()
            if trial.state.name != "FAIL":
                self._succeeded = True
            if not self._succeeded and len(self._causes) >= self._hopeless:
                self._fatal = self._causes[0]
            if self.remaining and not self._stopped:
                self.remaining -= 1
            else:
                study.stop()
        # Deleting files takes time, and the other groups need the lock.
        if model is not None:
            discard(model.bestModel)
        if self._fatal is not None and not self._stopped:
            raise self._fatal


def value_of(history: list[dict[str, Any]], metric: str, config: TrainConfig) -> float | None:
    """Returns the metric of a model; `None` if no record has the metric.

    With patience, the model has the weights of the best validation, so the metric is from there, not from the end.
    """
    records = [record for record in history if metric in record]
    if config.patience is not None:
        best = [{**record, **validation} for validation, record in improvements(history, config)]
        records = [record for record in best if metric in record] or records
    return float(records[-1][metric]) if records else None


def side_by_side(groups: Sequence[G], work: Callable[[G], None], stop: Callable[[], object]) -> None:
    """Calls `work` with each group, in a thread of its own that does not hold up the interpreter's exit.

    After the first error, or an interrupt, it calls `stop`, cancels all groups, and raises the error.
    """
    spark = groups[0].dataset.sparkSession
    running: set[Future[None]] = set()
    try:
        for group in groups:
            running.add(_start(inheriting(spark, partial(work, group))))
        while running:
            done, running = wait(running, _LOOK_SECONDS, FIRST_EXCEPTION)
            for ended in done:
                ended.result()
    except BaseException:
        stop()
        for group in groups:
            threading.Thread(target=group.cancel, name="sparktorch-cancel", daemon=True).start()
        wait(running, _END_SECONDS)
        raise


def _start(work: Callable[[], None]) -> Future[None]:
    """Starts a daemon thread; a `ThreadPoolExecutor` would hold up the interpreter's exit."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sparktorch-group", daemon=True).start()
    return future
