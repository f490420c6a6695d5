"""A look at a space before the first trial: an estimator out of it, and refusals of what no trial can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparktorch.errors import ConfigError, SparkTorchError
from sparktorch.ml.fit.translate import Request, translate
from sparktorch.ml.fit.values import Values
from sparktorch.ml.tuning.space import Space, applied, check_no_checkpoints
from sparktorch.worker import TrainJob

__all__ = ["no_validation", "valid_example"]

# Errors with these codes are about a value itself, whatever else is set.
_VALUE_CODES = ("ST-UNKNOWN-NAME", "ST-VALUE")

Example = tuple[Any, Request[TrainJob]]  # It is an estimator with values of the space, and its configuration.


def valid_example(base: Any, space: Space, metric: str) -> Example:
    """Returns an estimator out of the space that passes the checks of its Params, and its configuration."""
    check_no_checkpoints(Values(base))
    # This refuses wrong values. A right one may still not go together with the rest of `base`, which is no error.
    for choice in space.choices():
        _tried(base, choice)
    first: Example | None = None
    for values in ({}, *space.samples()):
        valid = _tried(base, values)
        if valid is not None:
            first = first or valid
            _check_rows(first, valid, values)
    # Without any valid example, `translate` raises what is wrong with the estimator itself.
    estimator, request = first or (base, translate(base, base._task))
    if metric.startswith("val_") and request.columns["validation"] is None:
        raise no_validation(metric, "there are none")
    return estimator, request


def _tried(base: Any, values: dict[str, Any]) -> Example | None:
    """Returns the estimator with values, and its configuration; refuses a value that no trial can have.

    It returns `None` for values that do not go together: a trial that draws them fails, with that cause.
    """
    try:
        estimator = applied(base, values)
    except TypeError as error:
        raise ConfigError(str(error), hint="correct the space", param="space", code="ST-SEARCH") from error
    try:
        request = translate(estimator, base._task)
    except Exception as error:
        value = values.get(error.where.get("param", "")) if isinstance(error, SparkTorchError) else None
        # Which entries of a dict are unknown depends on other Params, so another trial may have it.
        if getattr(error, "code", None) in _VALUE_CODES and value is not None and not isinstance(value, Mapping):
            raise
        return None
    check_no_checkpoints(Values(estimator))
    return estimator, request


def _check_rows(first: Example, other: Example, values: dict[str, Any]) -> None:
    """Refuses a space whose trials need other rows than the first one, or learn other statistics of them."""
    estimator, request = first
    other_estimator, other_request = other
    differing = next((name for name in request.rows if request.rows[name] != other_request.rows[name]), None)
    differing = differing or next(iter(other_estimator._differing(estimator)), None)
    if differing is None:
        return
    name = next((name for name in values if name in differing), differing)
    hint = "ranks read their rows once for all trials; search in two, one for each"
    if name == "numWorkers":
        hint = "workersPerTrial says how many workers a trial has"
    if name == "numNegatives":
        hint = "set numNegatives of the estimator as well: then all trials draw items, and need the same rows"
    raise ConfigError(
        f"{name!r} in the space gives trials other rows: they differ in {differing}",
        hint=hint,
        param=name,
        code="ST-SEARCH",
    )


def no_validation(metric: str, why: str) -> ConfigError:
    """Returns the refusal of a metric that no trial will have."""
    return ConfigError(
        f"the metric {metric!r} is one of validation rows, and {why}",
        hint="mark some with validationIndicatorCol, or search for another metric, such as 'loss'",
        param="metric",
        code="ST-NO-VALIDATION",
    )
