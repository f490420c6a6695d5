"""The space of a search: names of Params, and where their values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from sparktorch.base.imports import optuna
from sparktorch.base.quiet import quiet
from sparktorch.errors import ConfigError, ConflictError
from sparktorch.ml.fit.checks import check_param_names
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams

__all__ = ["Space", "applied", "check_no_checkpoints", "optuna_quiet"]

_STORABLE = (bool, int, float, str, type(None))  # Optuna stores choices of these types only.
_PROBES = 20

optuna_quiet = partial(quiet, "optuna", logging.ERROR)  # Optuna would log every study and trial.


class Space:
    """What trials choose from: a dict by name of Param, or a function that asks the trial itself.

    A name is that of a Param, or of an entry in a dict Param: "moduleParams.hidden".

    Attributes:
        distributions: Optuna's distributions by name; empty if a function makes the values.
    """

    def __init__(
        self,
        source: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]],
        estimator: EstimatorParams,
        *,
        of_estimator: bool = False,
    ) -> None:
        """Checks the space.

        Args:
            source: Optuna's distributions or lists of choices by name, or a function (trial) -> values by name.
            estimator: The estimator whose Params the trials set.
            of_estimator: Whether the estimator has made the space: then the first choice of each list is `None`, which
                sets nothing.

        Raises:
            ConfigError: `source` is empty, a name is no Param, or a value is neither a distribution nor a list.
        """
        self._estimator, self._of_estimator = estimator, of_estimator
        self._function = source if callable(source) else self._choose
        # Optuna stores labels in place of choices that it cannot store; here are these choices, by name and label.
        self._choices: dict[str, dict[str, Any]] = {}
        self.distributions: dict[str, Any] = {}
        if callable(source):
            return
        _check_names(estimator, source)
        self.distributions = {name: self._distribution(name, value) for name, value in source.items()}

    def values(self, trial: Any) -> dict[str, Any]:
        """Returns what a trial sets, by name; the trial may run, or be finished.

        A `ConfigError` says that the function returned no dict, or a name that is no Param.
        """
        trials = optuna().trial
        # A user's function asks the trial itself, and a finished trial answers only as a `FixedTrial`.
        if isinstance(trial, trials.FrozenTrial) and not self.distributions:
            trial = trials.FixedTrial(trial.params, number=trial.number)
        values = self._function(trial)
        if self._of_estimator:
            return {name: value for name, value in values.items() if value is not None}
        _check_names(self._estimator, values)
        return dict(values)

    @property
    def defaults(self) -> dict[str, Any]:
        """The choices of the trial that sets nothing, in a space that the estimator has made; else empty."""
        if not self._of_estimator:
            return {}
        return {name: distribution.choices[0] for name, distribution in self.distributions.items()}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yields the values of some trials that are in no stored study, for checks before the search."""
        module = optuna()
        with optuna_quiet():
            study = module.create_study(sampler=module.samplers.RandomSampler(seed=0))
        for _ in range(_PROBES):
            with suppress(module.TrialPruned):
                yield self.values(study.ask())

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yields each choice of a list as the only value that is set; of numbers, the least and the greatest."""
        for name, distribution in self.distributions.items():
            labels = getattr(distribution, "choices", ())
            if all(isinstance(label, int | float) for label in labels):
                labels = sorted(labels)[:: max(1, len(labels) - 1)]
            for label in labels:
                value = self._choices.get(name, {}).get(label, label)
                if not (self._of_estimator and value is None):
                    yield {name: value}

    def _choose(self, trial: Any) -> dict[str, Any]:
        # A finished trial is not asked again: its values may be out of this space.
        finished = trial.params
        chosen = {
            name: finished[name] if name in finished else _suggested(trial, name, distribution)
            for name, distribution in self.distributions.items()
        }
        return {name: self._choices.get(name, {}).get(value, value) for name, value in chosen.items()}

    def _distribution(self, name: str, value: Any) -> Any:
        distributions = optuna().distributions
        if isinstance(value, distributions.BaseDistribution):
            return value
        # A tuple is refused, because a pair may be meant as a range.
        if not isinstance(value, list) or not value:
            raise ConfigError(
                f"the space of {name!r} is {value!r}",
                hint="give a list of choices, at least one, or a distribution: optuna.distributions.FloatDistribution, "
                "IntDistribution or CategoricalDistribution",
                param=name,
                code="ST-SEARCH",
            )
        if all(isinstance(choice, _STORABLE) for choice in value):
            return distributions.CategoricalDistribution(value)
        labels = [_label(choice) for choice in value]
        if len(set(labels)) < len(labels):
            raise ConfigError(
                f"two choices of {name!r} read the same: {', '.join(labels)}", param=name, code="ST-SEARCH"
            )
        self._choices[name] = dict(zip(labels, value, strict=True))
        return distributions.CategoricalDistribution(labels)


def applied(estimator: Any, values: Mapping[str, Any]) -> Any:
    """Returns a copy of an estimator with values by name; a `TypeError` says that one has the wrong type."""
    configured = estimator.copy()
    configured.setParams(**{name: value for name, value in values.items() if "." not in name})
    # Entries come last: the dict that they belong to may be a value of its own.
    for name, value in values.items():
        param, dot, entry = name.partition(".")
        if dot:
            configured.setParams(**{param: {**_value(configured, param), entry: value}})
    return configured


def check_no_checkpoints(p: Values) -> None:
    """Refuses checkpoints of an estimator that a search trains many times."""
    if p["checkpointDir"] is not None:
        raise ConflictError(
            "checkpointDir is set, and each training of a search is one of its own",
            hint="leave it unset; the search of a TorchTuner goes on from its storage",
            param="checkpointDir",
        )


def _check_names(estimator: EstimatorParams, space: Any) -> None:
    """Refuses what is no dict, and names in it that are neither Params nor entries in dict Params."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            f"the space is {space!r}",
            hint="give a dict such as {'learningRate': optuna.distributions.FloatDistribution(1e-4, 0.1), "
            "'batchSize': [32, 64]}, or a function (trial) that returns the values by name of Param",
            param="space",
            code="ST-SEARCH",
        )
    for name in space:
        param, dot, _ = str(name).partition(".")
        check_param_names(estimator, [param])
        if dot and not isinstance(_value(estimator, param), dict):
            raise ConfigError(
                f"{name!r} in the space: {param} is no dict", hint=f"call it {param!r}", param=param, code="ST-SEARCH"
            )


def _value(estimator: EstimatorParams, param: str) -> Any:
    return estimator.getOrDefault(param) if estimator.isDefined(param) else None


def _suggested(trial: Any, name: str, distribution: Any) -> Any:
    if hasattr(distribution, "choices"):
        return trial.suggest_categorical(name, distribution.choices)
    is_int = isinstance(distribution, optuna().distributions.IntDistribution)
    suggest = trial.suggest_int if is_int else trial.suggest_float
    return suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _label(choice: Any) -> str:
    """Returns the text by which Optuna stores a choice: a class or function by its name, all else by its `repr`."""
    qualified_name = getattr(choice, "__qualname__", None)
    return f"{choice.__module__}.{qualified_name}" if qualified_name else repr(choice)
