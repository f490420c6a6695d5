"""Checks of a search before any job, and the study that it goes on with."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pyspark.sql import SparkSession

from sparktorch.base.config import above, at_least, one_of, smaller_is_better
from sparktorch.base.optional import optuna
from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.ml.fit.holdable import rows_of
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.tuning.space import Space, applied
from sparktorch.spark.checks.findings import refuse
from sparktorch.spark.checks.preflight import enough_slots
from sparktorch.spark.launch.gpus import gpu_profile

__all__ = ["check_numbers", "direction_of", "groups_of", "open_study", "valid_one"]

_METRIC = "sparktorch.metric"


def check_numbers(trials: int, timeout: float | None, workers: int, parallelism: int | None) -> None:
    """Checks the budget and the sizes of a search.

    Raises:
        ConfigError: One of them is out of range.
    """
    for name, value in (("trials", trials), ("workersPerTrial", workers), ("parallelism", parallelism)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
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
    _check_checkpoints(base, space)
    samples = list(space.samples())
    chosen, request = _first_valid(base, [{}, *samples, _joined(samples)])
    if metric.startswith("val_") and request.columns["validation"] is None:
        raise ConfigError(
            f"the metric {metric!r} is one of validation rows, and there are none",
            hint="mark some with validationIndicatorCol, or search for another metric, such as 'loss'",
            param="metric",
        )
    needs = rows_of(request)
    for values in samples:
        try:
            other = rows_of(translate(applied(base, {**chosen, **values}), base._task))
        except (SparkTorchError, TypeError):
            continue  # the trial that draws it fails, with this cause
        differing = [name for name, value in other.items() if value != needs[name]]
        if differing:
            name = next(iter(values)) if len(values) == 1 else differing[0]
            raise ConfigError(
                f"{name!r} in the space gives trials other rows: they differ in {', '.join(differing)}",
                hint="workersPerTrial says how many workers a trial has"
                if name == "numWorkers"
                else "ranks read their rows once for all trials; search in two, one for each",
                param=name,
            )
    return applied(base, chosen), request


def groups_of(spark: SparkSession, request: Request, workers: int, parallelism: int | None, left: int) -> int:
    """Returns how many groups of ranks train side by side: as many as there are slots for, if it is not given.

    Args:
        spark: The session.
        request: The configuration of a trial.
        workers: Number of ranks of a group.
        parallelism: The number of groups that is asked for.
        left: Number of trials to run.

    Raises:
        ConfigError: There are too few slots.
    """
    launch = request.launch
    needed = workers * (parallelism or 1)
    profile = gpu_profile(spark, launch.device, workers)
    finding, found = enough_slots(
        spark, needed, profile, all_of_them=parallelism is None, longest=launch.patience.start
    )
    if found is None:
        return min(parallelism or 1, left)
    if found <= 0:
        refuse([finding])
    if found < workers:
        raise ConfigError(
            f"workersPerTrial is {workers}, and the cluster has {found} slots",
            hint=f"set it to {found} or less",
            param="workersPerTrial",
        )
    if found < needed:
        raise ConfigError(
            f"parallelism is {parallelism} with {workers} workers a trial, and the cluster has {found} slots",
            hint=f"set it to {found // workers} or less",
            param="parallelism",
        )
    return min(parallelism or found // workers, left)


def open_study(
    estimator: Any,
    space: Space,
    metric: str,
    *,
    direction: str,
    sampler: Any,
    pruner: Any,
    storage: Any,
    name: str | None,
) -> Any:
    """Returns the study of a search, the one that its storage holds if there is one of that name.

    Raises:
        ConfigError: The sampler or pruner is none, the storage is given without a name, or its study is of another
            metric, direction or space.
    """
    module = optuna()
    if storage is not None and not name:
        raise ConfigError(
            "storage is given without studyName", hint="a search goes on with the study of that name", param="studyName"
        )
    if sampler is None:
        sampler = module.samplers.TPESampler(seed=estimator.getSeed())
    if not isinstance(sampler, module.samplers.BaseSampler):
        raise ConfigError(f"sampler is {sampler!r}", hint="it is one of optuna.samplers, or None", param="sampler")
    before = module.logging.get_verbosity()
    module.logging.set_verbosity(module.logging.WARNING)  # it tells of every study that it creates
    try:
        study = module.create_study(
            storage=storage,
            sampler=sampler,
            pruner=_pruner(estimator, space, pruner),
            study_name=name,
            direction=direction,
            load_if_exists=True,
        )
    except SparkTorchError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the storage {storage!r} cannot be opened: {error}", hint="a file is sqlite:///name.db", param="storage"
        ) from error
    finally:
        module.logging.set_verbosity(before)
    _check_study(study, space, metric, direction)
    study.set_user_attr(_METRIC, metric)
    return study


def _pruner(estimator: Any, space: Space, given: Any) -> Any:
    pruners = optuna().pruners
    if given is None:
        return pruners.NopPruner()
    if given == "asha":
        return pruners.SuccessiveHalvingPruner()
    if given == "hyperband":
        known = space.distributions and "epochs" not in space.distributions
        return pruners.HyperbandPruner(max_resource=estimator.getEpochs() if known else "auto")
    if isinstance(given, pruners.BasePruner):
        return given
    raise ConfigError(
        f"pruner is {given!r}", hint="it is 'asha', 'hyperband', one of optuna.pruners, or None", param="pruner"
    )


def _check_study(study: Any, space: Space, metric: str, direction: str) -> None:
    """Refuses to go on with a study of something else."""
    known, directions = study.user_attrs.get(_METRIC, metric), [one.name.lower() for one in study.directions]
    if known != metric or directions != [direction]:
        raise ConfigError(
            f"the study {study.study_name!r} in the storage is to {' and '.join(directions)} {known!r}, and this "
            f"search to {direction} {metric!r}",
            hint="give another studyName",
            param="studyName",
        )
    check = optuna().distributions.check_distribution_compatibility
    for trial in study.get_trials(deepcopy=False):
        complete = trial.state.name == "COMPLETE"
        if complete and space.distributions and space.distributions.keys() != trial.distributions.keys():
            raise ConfigError(
                f"the study {study.study_name!r} in the storage chose {sorted(trial.distributions)}, and this space "
                f"{sorted(space.distributions)}",
                hint="give the same space, or another studyName",
                param="studyName",
            )
        for name in space.distributions.keys() & trial.distributions.keys():
            _check_same(check, study.study_name, name, trial.distributions[name], space.distributions[name])


def _check_same(check: Any, study: str, name: str, before: Any, now: Any) -> None:
    try:
        check(before, now)
    except ValueError as error:
        raise ConfigError(
            f"the study {study!r} in the storage chose {name!r} from another space: {error}",
            hint="give the same choices, or another studyName",
            param=name,
        ) from error


def _check_checkpoints(base: Any, space: Space) -> None:
    if "checkpointDir" in space.distributions or (
        base.isDefined("checkpointDir") and base.getOrDefault("checkpointDir") is not None
    ):
        raise ConfigError(
            "checkpointDir is set, and each trial is a training of its own",
            hint="leave it out; a search goes on from its storage",
            param="checkpointDir",
        )


def _first_valid(base: Any, candidates: list[dict[str, Any]]) -> tuple[dict[str, Any], Request]:
    for values in candidates:
        with suppress(SparkTorchError, TypeError):
            return values, translate(applied(base, values), base._task)
    return {}, translate(base, base._task)  # raises what is wrong with the estimator


def _joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first value of every name."""
    return {name: value for values in reversed(samples) for name, value in values.items()}
