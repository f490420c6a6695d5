"""Checks of a search before any job, and the study that it goes on with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pyspark.ml import Pipeline
from pyspark.ml.tuning import CrossValidator
from pyspark.ml.util import MetaAlgorithmReadWrite
from pyspark.sql import SparkSession

from sparktorch.base.config import above, at_least, one_of, smaller_is_better
from sparktorch.base.imports import optuna
from sparktorch.errors import ConfigError, SparkTorchError, nearest
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.holdable import rows_of
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.tuning.space import Space, applied, quiet
from sparktorch.spark.checks.findings import refuse
from sparktorch.spark.checks.preflight import enough_slots
from sparktorch.spark.launch.gpus import gpu_profile

__all__ = ["check_folds", "check_numbers", "direction_of", "groups_of", "open_study", "valid_one"]

_METRIC = "sparktorch.metric"


def check_folds(search: CrossValidator) -> None:
    """Refuses a cross-validation that cannot work.

    Raises:
        ConfigError: It has no estimator, evaluator or param maps, too few folds, a Param of no stage, or checkpoints.
    """
    for name in ("estimator", "evaluator", "estimatorParamMaps"):
        if not search.isDefined(name) or search.getOrDefault(name) is None:
            raise ConfigError(f"{name} is not set", hint=f"set {name}", param=name)
    estimator: Any = search.getEstimator()
    maps, folds = search.getEstimatorParamMaps(), search.getNumFolds()
    if not maps:
        raise ConfigError("estimatorParamMaps is empty", hint="[{}] fits it as it is", param="estimatorParamMaps")
    if folds < 2:
        hint = "set 2 or more"
        raise ConfigError(f"numFolds is {folds}, which leaves no rows to train on", hint=hint, param="numFolds")
    nested = MetaAlgorithmReadWrite.getAllNestedStages(estimator)
    known, names = {stage.uid for stage in nested}, [param.name for stage in nested for param in stage.params]
    for param in (param for params in maps for param in params):
        name, parent = getattr(param, "name", str(param)), getattr(param, "parent", "a str")
        if parent not in known:
            raise ConfigError(
                f"a param map sets {name!r} of {parent}, which is no stage of the estimator",
                hint=f"build the grid with the Params of this estimator; {nearest(name, names)}",
                param=name,
            )
    stages: list[Any] = estimator.getStages() if isinstance(estimator, Pipeline) else [estimator]
    for stage in stages:
        for params in maps if isinstance(stage, TorchEstimatorBase) else ():
            if translate(stage.copy(params), stage._task).checkpoint is not None:
                _refuse_checkpoints()


def check_numbers(trials: int, timeout: float | None, workers: int, parallelism: int | None) -> None:
    """Checks the budget and the sizes of a search.

    Raises:
        ConfigError: One of them is out of range.
    """
    sizes = {"trials": trials, "workersPerTrial": workers, "parallelism": 1 if parallelism is None else parallelism}
    for name, value in sizes.items():
        if not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number, got {value!r}", param=name)
        at_least(name, value, 1)
    if timeout is not None:
        above("timeout", timeout, 0)


def direction_of(metric: str, given: str | None) -> str:
    """Returns whether a search minimizes or maximizes its metric.

    Raises:
        ConfigError: The direction is unknown.
    """
    if given is not None:
        one_of("direction", given, ("minimize", "maximize"))
        return given
    return "minimize" if smaller_is_better(metric) else "maximize"


def valid_one(base: Any, space: Space, metric: str) -> tuple[Any, Request]:
    """Returns an estimator out of the space that passes the checks of its Params, and its configuration.

    Raises:
        ConfigError: None passes; trials would need other rows, or share a checkpointDir; or the metric is of validation
            rows, and there are none.
    """
    if base.isDefined("checkpointDir") and base.getOrDefault("checkpointDir") is not None:
        _refuse_checkpoints()
    found: list[tuple[Any, Request]] = []
    drawn: list[dict[str, Any]] = []
    for values in ({}, *space.samples()):
        if "checkpointDir" in values:
            _refuse_checkpoints()
        with suppress(SparkTorchError, TypeError):  # a trial that draws it fails, with this cause
            found.append((estimator := applied(base, values), translate(estimator, base._task)))
            drawn.append(values)
    for values, (_, request) in zip(drawn, found, strict=True):
        _check_rows(found[0][1], request, values)
    estimator, request = found[0] if found else (base, translate(base, base._task))  # raises what is wrong with it
    if metric.startswith("val_") and request.columns["validation"] is None:
        raise ConfigError(
            f"the metric {metric!r} is one of validation rows, and there are none",
            hint="mark some with validationIndicatorCol, or search for another metric, such as 'loss'",
            param="metric",
        )
    return estimator, request


def groups_of(spark: SparkSession, request: Request, workers: int, parallelism: int | None, left: int) -> int:
    """Returns how many groups of ranks train side by side: as many as there are slots for, if it is not given.

    Raises:
        ConfigError: There are too few slots.
    """
    launch, needed = request.launch, workers * (parallelism or 1)
    profile = gpu_profile(spark, launch.device, workers)
    finding, found = enough_slots(
        spark, needed, profile, all_of_them=parallelism is None, longest=launch.patience.start
    )
    if found is not None and found <= 0:
        refuse([finding])
    if found is not None and found < needed:
        name, fit = ("workersPerTrial", found) if found < workers else ("parallelism", found // workers)
        asked = f"{workers}" if found < workers else f"{parallelism} with {workers} workers a trial"
        raise ConfigError(
            f"{name} is {asked}, and the cluster has {found} slots", hint=f"set it to {fit} or less", param=name
        )
    return min(parallelism or (found or workers) // workers, left)


def open_study(tuner: Any, estimator: Any, space: Space, metric: str, direction: str) -> Any:
    """Returns the study of a search, the one that its storage holds if there is one of that name.

    Raises:
        ConfigError: The sampler or pruner is none, the storage is given without a name, or its study is of another
            metric, direction or space.
    """
    module, storage = optuna(), tuner.storage
    if storage is not None and not tuner.studyName:
        raise ConfigError(
            "storage is given without studyName", hint="a search goes on with the study of that name", param="studyName"
        )
    known = space.distributions and "epochs" not in space.distributions
    pruners = {
        None: module.pruners.NopPruner,
        "asha": module.pruners.SuccessiveHalvingPruner,
        "hyperband": lambda: module.pruners.HyperbandPruner(max_resource=estimator.getEpochs() if known else "auto"),
    }
    pruner = pruners[tuner.pruner]() if tuner.pruner in pruners else tuner.pruner
    sampler = module.samplers.TPESampler(seed=estimator.getSeed()) if tuner.sampler is None else tuner.sampler
    if not isinstance(pruner, module.pruners.BasePruner):
        hint = "it is 'asha', 'hyperband', one of optuna.pruners, or None"
        raise ConfigError(f"pruner is {tuner.pruner!r}", hint=hint, param="pruner")
    if not isinstance(sampler, module.samplers.BaseSampler):
        raise ConfigError(f"sampler is {sampler!r}", hint="it is one of optuna.samplers, or None", param="sampler")
    given = {"study_name": tuner.studyName, "direction": direction}
    with quiet():
        try:
            study = module.create_study(storage=storage, sampler=sampler, pruner=pruner, load_if_exists=True, **given)
        except Exception as error:
            what, hint = f"the storage {storage!r} cannot be opened: {error}", "a file is sqlite:///name.db"
            raise ConfigError(what, hint=hint, param="storage") from error
    _check_study(study, space, metric, direction)
    study.set_user_attr(_METRIC, metric)
    return study


def _check_study(study: Any, space: Space, metric: str, direction: str) -> None:
    """Refuses to go on with a study of another metric, direction or space."""
    known, directions = study.user_attrs.get(_METRIC, metric), [one.name.lower() for one in study.directions]
    given = f"the study {study.study_name!r} in the storage"
    if known != metric or directions != [direction]:
        raise ConfigError(
            f"{given} is to {' and '.join(directions)} {known!r}, and this search to {direction} {metric!r}",
            hint="give another studyName",
            param="studyName",
        )
    compatible = optuna().distributions.check_distribution_compatibility
    for trial in study.get_trials(deepcopy=False) if space.distributions else ():
        before, now = trial.distributions, space.distributions
        try:
            if trial.state.name == "COMPLETE" and before.keys() != now.keys():
                raise ValueError(f"it had {sorted(before)}")
            for name in before.keys() & now.keys():
                compatible(before[name], now[name])
        except ValueError as error:
            raise ConfigError(
                f"{given} chose from another space: {error}",
                hint="give the same space, or another studyName",
                param="studyName",
            ) from error


def _check_rows(first: Request, other: Request, values: dict[str, Any]) -> None:
    """Refuses a space whose trials need other rows than the first one."""
    needs, others = rows_of(first), rows_of(other)
    differing = next((name for name in needs if needs[name] != others[name]), None)
    if differing is not None:
        name = next((name for name in values if name in differing), differing)
        raise ConfigError(
            f"{name!r} in the space gives trials other rows: they differ in {differing}",
            hint="workersPerTrial says how many workers a trial has"
            if name == "numWorkers"
            else "ranks read their rows once for all trials; search in two, one for each",
            param=name,
        )


def _refuse_checkpoints() -> None:
    raise ConfigError(
        "checkpointDir is set, and each training of a search is one of its own",
        hint="leave it unset; the search of a TorchTuner goes on from its storage",
        param="checkpointDir",
    )
