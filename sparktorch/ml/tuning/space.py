"""The space of a search: names of Params, and where their values come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from sparktorch.base.imports import optuna
from sparktorch.base.quiet import quiet
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.checks import check_param_names
from sparktorch.ml.fit.values import Values
from sparktorch.ml.params.mixins import EstimatorParams

__all__ = ["Space", "applied", "check_no_checkpoints", "optuna_quiet"]

_SIMPLE = (bool, int, float, str, type(None))  # what Optuna keeps in a storage
_PROBES = 20

optuna_quiet = partial(quiet, "optuna", logging.ERROR)  # it logs every study and trial


class Space:
    """What trials choose from: a dict by name of Param, or a function that asks the trial itself.

    A name is that of a Param, or of an entry in a dict Param: "moduleParams.hidden".

    Attributes:
        distributions: Optuna's distributions by name; empty if a function makes the values.
    """

    def __init__(
        self,
        given: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]],
        estimator: EstimatorParams,
        *,
        of_estimator: bool = False,
    ) -> None:
        """Takes distributions of Optuna's or lists of choices by name, or a function (trial) -> values by name.

        With `of_estimator`, the estimator has made it: the first choice of each list is `None`, which sets nothing.
        A `ConfigError` says that it is empty, a name is no Param, or a value is neither a distribution nor a list.
        """
        self._estimator, self._of_estimator = estimator, of_estimator
        self._function = given if callable(given) else self._choose
        self._choices: dict[str, dict[str, Any]] = {}  # by name and label, those that Optuna cannot keep
        self.distributions: dict[str, Any] = {}
        if callable(given):
            return
        _check_names(estimator, given)
        self.distributions = {name: self._distribution(name, value) for name, value in given.items()}

    def values(self, trial: Any) -> dict[str, Any]:
        """Returns what a trial sets, by name: a running one, or a finished one whose values are wanted again.

        A `ConfigError` says that the function returned no dict, or a name that is no Param.
        """
        trials = optuna().trial
        if isinstance(trial, trials.FrozenTrial) and not self.distributions:
            trial = trials.FixedTrial(trial.params, number=trial.number)
        values = self._function(trial)
        if self._of_estimator:
            return {name: value for name, value in values.items() if value is not None}
        _check_names(self._estimator, values)
        return dict(values)

    @property
    def defaults(self) -> dict[str, Any]:
        """What Optuna calls the trial of a space of the estimator's that sets nothing; empty for other spaces."""
        return {name: one.choices[0] for name, one in self.distributions.items()} if self._of_estimator else {}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yields the values of some trials that no study keeps, to be checked before any that counts."""
        module = optuna()
        with optuna_quiet():
            study = module.create_study(sampler=module.samplers.RandomSampler(seed=0))
        for _ in range(_PROBES):
            with suppress(module.TrialPruned):
                yield self.values(study.ask())

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yields each choice of a list, alone; of numbers, the least and the most."""
        for name, one in self.distributions.items():
            labels = getattr(one, "choices", ())
            if all(isinstance(label, int | float) for label in labels):
                labels = sorted(labels)[:: max(1, len(labels) - 1)]
            for label in labels:
                value = self._choices.get(name, {}).get(label, label)
                if not (self._of_estimator and value is None):
                    yield {name: value}

    def _choose(self, trial: Any) -> dict[str, Any]:
        known = trial.params  # of a finished one, whose values may be out of this space
        chosen = {
            name: known[name] if name in known else _suggested(trial, name, one)
            for name, one in self.distributions.items()
        }
        return {name: self._choices.get(name, {}).get(value, value) for name, value in chosen.items()}

    def _distribution(self, name: str, value: Any) -> Any:
        distributions = optuna().distributions
        if isinstance(value, distributions.BaseDistribution):
            return value
        if not isinstance(value, list) or not value:  # a pair may be meant as a range
            raise ConfigError(
                f"the space of {name!r} is {value!r}",
                hint="give a list of choices, at least one, or a distribution: optuna.distributions.FloatDistribution, "
                "IntDistribution or CategoricalDistribution",
                param=name,
                code="ST-SEARCH",
            )
        if all(isinstance(choice, _SIMPLE) for choice in value):
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
    that = estimator.copy()
    that.setParams(**{name: value for name, value in values.items() if "." not in name})
    for name, value in values.items():
        param, dot, entry = name.partition(".")
        if dot:
            that.setParams(**{param: {**_value(that, param), entry: value}})
    return that


def check_no_checkpoints(p: Values) -> None:
    """Refuses checkpoints of an estimator that a search trains many times."""
    if p["checkpointDir"] is not None:
        raise ConfigError(
            "checkpointDir is set, and each training of a search is one of its own",
            hint="leave it unset; the search of a TorchTuner goes on from its storage",
            param="checkpointDir",
            code="ST-CLASH",
        )


def _check_names(estimator: EstimatorParams, given: Any) -> None:
    """Refuses what is no dict, and names in it that are neither Params nor entries in dict Params."""
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"the space is {given!r}",
            hint="give a dict such as {'learningRate': optuna.distributions.FloatDistribution(1e-4, 0.1), "
            "'batchSize': [32, 64]}, or a function (trial) that returns the values by name of Param",
            param="space",
            code="ST-SEARCH",
        )
    for name in given:
        param, dot, _ = str(name).partition(".")
        check_param_names(estimator, [param])
        if dot and not isinstance(_value(estimator, param), dict):
            raise ConfigError(
                f"{name!r} in the space: {param} is no dict",
                hint=f"call it {param!r}",
                param=param,
                code="ST-SEARCH",
            )


def _value(estimator: EstimatorParams, param: str) -> Any:
    return estimator.getOrDefault(param) if estimator.isDefined(param) else None


def _suggested(trial: Any, name: str, one: Any) -> Any:
    if hasattr(one, "choices"):
        return trial.suggest_categorical(name, one.choices)
    suggest = trial.suggest_int if isinstance(one, optuna().distributions.IntDistribution) else trial.suggest_float
    return suggest(name, one.low, one.high, step=one.step, log=one.log)


def _label(choice: Any) -> str:
    named = getattr(choice, "__qualname__", None)
    return f"{choice.__module__}.{named}" if named else repr(choice)
