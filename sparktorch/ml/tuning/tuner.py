"""`TorchTuner` searches for the best Params; `TorchTunerModel` is the result."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.config import above, at_least, one_of
from sparktorch.base.imports import optuna
from sparktorch.base.metric_names import best_by_name
from sparktorch.errors import ConfigError, ConflictError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.listeners import callers
from sparktorch.ml.fit.translate import Request, config_of
from sparktorch.ml.fit.values import Values
from sparktorch.ml.tuning.example import no_validation, valid_example
from sparktorch.ml.tuning.search import DEFAULT, Search, value_of
from sparktorch.ml.tuning.space import Space, applied, optuna_quiet
from sparktorch.ml.tuning.tuned_model import TorchTunerModel, discard
from sparktorch.spark.checks import findings
from sparktorch.spark.checks.preflight import enough_slots
from sparktorch.spark.launch.gpus import gpu_profile
from sparktorch.worker import TrainJob

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

__all__ = ["TorchTuner", "direction_of"]

_LOG = logging.getLogger(__name__)
_METRIC = "sparktorch.metric"  # This user attribute of a study names its metric.
_PRUNERS = (None, "asha", "hyperband")  # The pruners have these names.
_DIRECTIONS = {"min": "minimize", "max": "maximize"}


class TorchTuner(Estimator[TorchTunerModel]):
    """Searches for the Params with which an estimator trains the best model.

    Optuna, an extra ("search"), chooses on the driver what the next trial sets. Groups of `workersPerTrial` ranks read
    the rows once and train the trials side by side, report after every epoch, and go on with the next trial when one
    ends or is pruned. The best model is, bit for bit, what a fit with its Params alone gives on as many workers.

    A trial that raises, or loses a worker, has failed; the search goes on. It ends with the first cause if the first
    five trials fail, or all. An interrupt cancels all trials.

    The tuner has arguments instead of Params of its own, and is not saved itself. `fit(dataset, params)` sets Params of
    its estimator. The model's `save` saves `bestModel`.

    Args:
        estimator: The estimator. Its own values hold for what is not in the space.
        space: What trials choose from: a dict from the name of a Param, or of an entry in a dict Param such as
            "moduleParams.hidden", to a distribution of `optuna.distributions` or a list of choices. Or a function that
            takes an Optuna trial and returns the values by such names; it is also called before the search, on trials
            that do not count, to check the names. Estimators for one task, such as `TabularClassifier`, have one of
            their own, which holds if this is `None`: it leaves what you have set as it is, and its first trial is that
            of the default settings, which no pruner ends.
        trials: Number of trials, those included that a study from `storage` has finished before.
        metric: A name in the records of `summary.history`. By default the estimator's `earlyStoppingMetric`, "val_loss"
            if that is not set, where it has a `validationIndicatorCol` or holds rows out itself, else "loss". With
            `earlyStoppingPatience`, a trial counts with the epoch whose weights it has.
        direction: "minimize" or "maximize". By default the metric's name decides, as for `earlyStoppingMode`; one
            that does not say is refused.
        workersPerTrial: Number of workers that train a trial; by default the estimator's `numWorkers`.
        parallelism: Number of trials at a time; by default as many as there are slots for, and 1 if the session does
            not tell how many slots there are.
        sampler: One of `optuna.samplers`; by default TPE with the estimator's seed.
        pruner: "asha", "hyperband", one of `optuna.pruners`, or `None` to prune nothing. "asha" prunes once the first
            trial is complete.
        storage: URL of a database, or a storage of Optuna's, that keeps the study.
        studyName: Name of the study; with `storage`, a study of that name is resumed.
        timeout: Seconds after which no further trial begins.

    Example:
        >>> from optuna.distributions import FloatDistribution
        >>> rows = [([float(i)], float(3 * i)) for i in range(20)]
        >>> data = spark.createDataFrame(rows, "features array<float>, label float")
        >>> linear = {"in_features": 1, "out_features": 1}
        >>> tuner = TorchTuner(
        ...     estimator=TorchRegressor(module="torch.nn:Linear", moduleParams=linear, epochs=3, progress=False),
        ...     space={"learningRate": FloatDistribution(1e-3, 1.0, log=True), "batchSize": [5, 10]},
        ...     trials=4,
        ...     parallelism=1,
        ... )
        >>> model = tuner.fit(data)
        >>> sorted(model.bestParams), len(model.trials)
        (['batchSize', 'learningRate'], 4)
    """

    if not TYPE_CHECKING:
        # Undoes the patch of MLflow's autologging: our listener logs the trials already.
        fit = inspect.unwrap(Estimator.fit)

    def __init__(
        self,
        *,
        estimator: TorchEstimatorBase[Any],
        trials: int,
        space: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
        metric: str | None = None,
        direction: str | None = None,
        workersPerTrial: int | None = None,
        parallelism: int | None = None,
        sampler: Any = None,
        pruner: Any = "asha",
        storage: Any = None,
        studyName: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.estimator, self.space, self.trials = estimator, space, trials
        self.metric, self.direction = metric, direction
        self.workersPerTrial, self.parallelism = workersPerTrial, parallelism
        self.sampler, self.pruner = sampler, pruner
        self.storage, self.studyName, self.timeout = storage, studyName, timeout

    def copy(self, extra: ParamMap | None = None) -> TorchTuner:
        """Copies the tuner, with Params of its estimator set."""
        copied: TorchTuner = super().copy()
        copied.estimator = self.estimator.copy(extra)
        return copied

    def _fit(self, dataset: DataFrame) -> TorchTunerModel:
        self._check()
        workers = Values(self.estimator).workers[1] if self.workersPerTrial is None else self.workersPerTrial
        for name, value in (("trials", self.trials), ("workersPerTrial", workers), ("parallelism", self.parallelism)):
            if value is not None:
                at_least(name, value, 1)
        if self.timeout is not None:
            above("timeout", self.timeout, 0)
        base = self.estimator._holding_out().setParams(numWorkers=workers)
        validates = base.isSet("validationIndicatorCol") or base._holds_out
        stopping = Values(self.estimator)
        metric = self.metric or (stopping["earlyStoppingMetric"] if validates else "loss")
        mode = _DIRECTIONS.get(stopping["earlyStoppingMode"]) if metric == stopping["earlyStoppingMetric"] else None
        direction = direction_of(metric, self.direction or mode)
        space = Space(self.space, base) if self.space is not None else _space_of(base)
        reference, request = valid_example(base, space, metric)
        first = reference.prepare(dataset)
        # Preparing may have learned statistics of the rows, and rearranged them; all groups share both.
        learned, dataset = first.estimator, first.dataset
        if metric.startswith("val_") and not Values(learned).validated:
            first.close()
            raise no_validation(metric, "the rows are too few to hold some out")
        groups = _group_count(dataset.sparkSession, request, workers, self.parallelism)
        study = self._study(base, space, metric, direction)
        is_logged = bool(callers()) or base.isSet("mlflowExperiment")
        search = Search(base, space, study, metric=metric, trials=self.trials, named=is_logged)
        if search.remaining:
            prepared = [first, *(learned.prepare(dataset) for _ in range(min(groups, search.remaining) - 1))]
            _LOG.info("%s %s: %d trials, %d at a time", direction, metric, search.remaining, len(prepared))
            search.run(prepared, timeout=self.timeout, show=base.getProgress())
        return self._result(dataset, base, space, study, search, learned)

    def _check(self) -> None:
        """Refuses arguments of a wrong type, and a storage that the search could not go on from."""
        if not isinstance(self.estimator, TorchEstimatorBase):
            raise ConfigError(
                f"the estimator is a {type(self.estimator).__name__}",
                hint="pass a TorchClassifier, TorchRegressor or TorchEstimator; a tuner may be a stage of a Pipeline",
                param="estimator",
                code="ST-CLASH",
            )
        if self.pruner not in _PRUNERS and not isinstance(self.pruner, optuna().pruners.BasePruner):
            raise ConfigError(
                f"pruner is {self.pruner!r}",
                hint="it is 'asha', 'hyperband', an instance of one of optuna.pruners, or None",
                param="pruner",
                code="ST-CLASH",
            )
        if self.sampler is not None and not isinstance(self.sampler, optuna().samplers.BaseSampler):
            raise ConfigError(
                f"sampler is {self.sampler!r}",
                hint="it is an instance of one of optuna.samplers, or None",
                param="sampler",
                code="ST-CLASH",
            )
        if self.storage is not None and not self.studyName:
            raise ConflictError(
                "storage is given without studyName",
                hint="a search goes on with the study of that name",
                param="studyName",
            )
        if isinstance(self.storage, str) and "://" not in self.storage:
            raise ConfigError(
                f"storage is {self.storage!r}, which is no URL",
                hint="a file is sqlite:///name.db",
                param="storage",
                code="ST-CLASH",
            )
        for name in ("trials", "workersPerTrial", "parallelism"):
            value = getattr(self, name)
            if not isinstance(value, int | None):
                raise ConfigError(f"{name} must be a whole number, got {value!r}", param=name, code="ST-CLASH")

    def _study(self, estimator: Any, space: Space, metric: str, direction: str) -> Any:
        """Returns the study of the search, which its storage may hold already."""
        module = optuna()
        with optuna_quiet():
            study = module.create_study(
                storage=self.storage,
                sampler=self.sampler or module.samplers.TPESampler(seed=estimator.getSeed()),
                pruner=self._optuna_pruner(estimator, space),
                study_name=self.studyName,
                direction=direction,
                load_if_exists=True,
            )
        _check_study(study, space, metric, direction)
        study.set_user_attr(_METRIC, metric)
        if space.defaults:
            with optuna_quiet():
                study.enqueue_trial(space.defaults, user_attrs={DEFAULT: True}, skip_if_exists=True)
        return study

    def _optuna_pruner(self, estimator: Any, space: Space) -> Any:
        """Returns the pruner, which is told the last epoch of all trials unless they choose it."""
        pruners = optuna().pruners
        if self.pruner is None:
            return pruners.NopPruner()
        if self.pruner == "asha":
            return pruners.SuccessiveHalvingPruner()
        if self.pruner == "hyperband":
            fixed = space.distributions and "epochs" not in space.distributions
            return pruners.HyperbandPruner(max_resource=estimator.getEpochs() if fixed else "auto")
        return self.pruner

    def _result(
        self, dataset: DataFrame, base: Any, space: Space, study: Any, search: Search, learned: Any
    ) -> TorchTunerModel:
        """Returns the best trial's model; fits it again if the trial belongs to an earlier run of the study.

        `learned` is the estimator that has learned statistics of the rows; `dataset` has the rows as it arranged them.
        """
        if all(trial.state.name != "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise ConfigError(
                f"none of the {len(study.trials)} trials was completed",
                hint="give a larger timeout, or a pruner that lets some trials end",
                code="ST-SEARCH",
            )
        best = study.best_trial
        if best.number in search.models:
            return search.models[best.number]
        _LOG.info("trial %d of an earlier run is the best: its Params are fitted again", best.number)
        values = space.values(best)
        estimator = applied(base, values)._knowing(learned)
        model = estimator.fit(dataset)
        # Only now: should that fit fail, these models are the best that there is.
        for other in search.models.values():
            discard(other.bestModel)
        value = value_of(model.summary.history, search.metric, config_of(estimator))
        if value != best.value:
            _LOG.warning(
                "trial %d had %s %s, and now has %s: the estimator has other Params than then, or other rows",
                *(best.number, search.metric, best.value, value),
            )
        return TorchTunerModel(model, values, study)


def direction_of(metric: str, direction: str | None) -> str:
    """Returns whether a search minimizes or maximizes its metric: `direction`, or what the metric's name says.

    A `ConfigError` refuses a name that does not say, without a `direction`.
    """
    if direction is not None:
        one_of("direction", direction, ("minimize", "maximize"))
        return direction
    mode = best_by_name(metric)
    if mode is None:
        raise ConfigError(
            f"metric {metric!r} does not say whether smaller values are better",
            hint="set direction='minimize' or 'maximize'",
            param="direction",
            code="ST-METRIC",
        )
    return "minimize" if mode == "min" else "maximize"


def _space_of(estimator: Any) -> Space:
    """Returns the space that an estimator has of its own; refuses an estimator that has none."""
    choices = estimator._search_space()
    if not choices:
        raise ConfigError(
            f"{type(estimator).__name__} has no space of its own, or all of it is set",
            hint="give space={'learningRate': optuna.distributions.FloatDistribution(1e-4, 0.1, log=True), ...}",
            param="space",
            code="ST-SEARCH",
        )
    return Space(choices, estimator, of_estimator=True)


def _group_count(spark: SparkSession, request: Request[TrainJob], workers: int, parallelism: int | None) -> int:
    """Returns how many groups of ranks train side by side: `parallelism`, or as many as there are slots for."""
    launch, needed = request.launch, workers * (parallelism or 1)
    profile = gpu_profile(spark, launch.device, workers)
    finding, slots = enough_slots(
        spark, needed, profile, all_of_them=parallelism is None, longest=launch.patience.start
    )
    if slots is not None and slots <= 0:
        findings.refuse([finding])
    if slots is not None and slots < needed:
        if slots < workers:
            name, setting, most = "workersPerTrial", f"{workers}", slots
        else:
            name, setting, most = "parallelism", f"{parallelism} with {workers} workers a trial", slots // workers
        raise ConfigError(
            f"{name} is {setting}, and the cluster has {slots} slots",
            hint=f"set it to {most} or less",
            param=name,
            code="ST-SLOTS",
        )
    return parallelism or (slots or workers) // workers


def _check_study(study: Any, space: Space, metric: str, direction: str) -> None:
    """Refuses to go on with a study of another metric, direction or space."""
    stored_metric = study.user_attrs.get(_METRIC, metric)
    directions = [stored.name.lower() for stored in study.directions]
    what = ""
    if stored_metric != metric or directions != [direction]:
        what = f"is to {' and '.join(directions)} {stored_metric!r}, and this search to {direction} {metric!r}"
    distributions, check = space.distributions, optuna().distributions.check_distribution_compatibility
    for trial in study.get_trials(deepcopy=False) if distributions else ():
        before = trial.distributions
        if trial.state.name == "COMPLETE" and before.keys() != distributions.keys():
            what = what or f"chose from another space: it had {sorted(before)}"
        try:
            for name in before.keys() & distributions.keys():
                check(before[name], distributions[name])
        except ValueError as error:
            what = what or f"chose from another space: {error}"
    if what:
        hint = "give another studyName, or the metric, direction and space of then"
        raise ConfigError(f"the study {study.study_name!r} in the storage {what}", hint=hint, param="studyName")
