"""`TorchTuner` searches for the best Params; `TorchTunerModel` is what it found."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from sparktorch.errors import ConfigError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.listeners import callers
from sparktorch.ml.fit.translate import config_of
from sparktorch.ml.tuning.checks import check_numbers, direction_of, groups_of, open_study, valid_one
from sparktorch.ml.tuning.search import Search, value_of
from sparktorch.ml.tuning.space import Space, applied
from sparktorch.ml.tuning.tuned_model import TorchTunerModel, discard

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

__all__ = ["TorchTuner"]

_LOG = logging.getLogger(__name__)


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
            that do not count, to check the names.
        trials: Number of trials, those included that a study from `storage` has finished before.
        metric: A name in the records of `summary.history`. By default "val_loss" if the estimator has a
            `validationIndicatorCol`, else "loss". With `earlyStoppingPatience`, a trial counts with the epoch whose
            weights it has.
        direction: "minimize" or "maximize". By default, names that end in loss, error, mae, mse, rmse or mape are
            minimized, and all others maximized.
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
        space: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]],
        trials: int,
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
        that: TorchTuner = super().copy()
        that.estimator = self.estimator.copy(extra)
        return that

    def _fit(self, dataset: DataFrame) -> TorchTunerModel:
        if not isinstance(self.estimator, TorchEstimatorBase):
            raise ConfigError(
                f"the estimator is a {type(self.estimator).__name__}",
                hint="pass a TorchClassifier, TorchRegressor or TorchEstimator; a tuner may be a stage of a Pipeline",
                param="estimator",
            )
        workers = self.estimator.getNumWorkers() if self.workersPerTrial is None else self.workersPerTrial
        check_numbers(self.trials, self.timeout, workers, self.parallelism)
        base = self.estimator.copy().setParams(numWorkers=workers)
        metric = self.metric or ("val_loss" if base.isSet("validationIndicatorCol") else "loss")
        direction = direction_of(metric, self.direction)
        space = Space(self.space, base)
        reference, request = valid_one(base, space, metric)
        first = reference.prepare(dataset)
        dataset = first.dataset  # that of an RDD
        spark = dataset.sparkSession
        groups = groups_of(spark, request, workers, self.parallelism, self.trials)
        study = open_study(self, base, space, metric, direction)
        named = bool(callers()) or base.isSet("mlflowExperiment")
        search = Search(base, space, study, metric=metric, trials=self.trials, named=named)
        if search.left:
            prepared = [first, *(reference.prepare(dataset) for _ in range(min(groups, search.left) - 1))]
            _LOG.info("%s %s: %d trials, %d at a time", direction, metric, search.left, len(prepared))
            search.run(prepared, spark, timeout=self.timeout, show=base.getProgress())
        return self._result(dataset, base, space, study, search)

    def _result(self, dataset: DataFrame, base: Any, space: Space, study: Any, search: Search) -> TorchTunerModel:
        """Returns the best trial's model; fits it again if an earlier run of the study has found it.

        Raises:
            ConfigError: No trial was completed.
        """
        if all(trial.state.name != "COMPLETE" for trial in study.get_trials(deepcopy=False)):
            raise ConfigError(
                f"none of the {len(study.trials)} trials was completed",
                hint="give a larger timeout, or a pruner that lets some trials end",
            )
        best = study.best_trial
        if best.number in search.models:
            return search.models[best.number]
        _LOG.info("trial %d of an earlier run is the best: its Params are fitted again", best.number)
        values = space.values(best)
        estimator = applied(base, values)
        model = estimator.fit(dataset)
        for other in search.models.values():  # only now: should the fit fail, they are the best that there is
            discard(other.bestModel)
        value = value_of(model.summary.history, search.metric, config_of(estimator))
        if value != best.value:
            _LOG.warning(
                "trial %d had %s %s, and now has %s: the estimator has other Params than then, or other rows",
                *(best.number, search.metric, best.value, value),
            )
        return TorchTunerModel(model, values, study)
