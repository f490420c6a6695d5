"""Translates the Params that say how columns become tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import cloudpickle

from sparktorch.base.imports import load_object
from sparktorch.data.columns import InputOptions
from sparktorch.data.preprocess import check_signature
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.ml.params.mixins import EstimatorParams

__all__ = ["check_ships", "input_names", "input_options", "naming_params", "preprocess_of"]

_INPUTS = ("featuresCol", "inputCols", "textCol", "imageCol")
_COLUMNS = (*_INPUTS, "labelCol", "labelCols", "weightCol", "validationIndicatorCol", "idCol")
_INSTEAD = {"featuresCol": "inputCols", "labelCol": "labelCols"}  # the Param that takes the place of another


def preprocess_of(params: EstimatorParams) -> Any:
    """Returns the `preprocess` callable, or `None` if it is not set; refuses one that cannot be called or shipped."""
    if not params.isSet("preprocess"):
        return None
    function = params.getPreprocess()
    if isinstance(function, str):
        function = load_object(function)
    check_signature(function)
    check_ships(function, "preprocess", param="preprocess", hint="make what it holds inside it")
    return function


def check_ships(value: Any, name: str, *, param: str, hint: str) -> None:
    """Checks that a value can be sent to the ranks, with Spark's cloudpickle; the message gives `param` and `hint`."""
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]  # pyspark's is untyped
    except Exception as error:
        raise ConfigError(f"{name} cannot be shipped to the ranks: {error}", hint=hint, param=param) from error


def input_options(params: EstimatorParams) -> InputOptions:
    """Translates the Params of input columns."""
    policy = params.getNullPolicy()
    return InputOptions(
        shapes={name: tuple(shape) for name, shape in params.getInputShapes().items()},
        layouts=params.getInputLayouts(),
        dtypes=params.getInputDtypes(),
        limits=params.getMaxLengths(),
        pads=params.getPadValues(),
        assemble=params.getAssembleInputs(),
        fill=params.getFillValue() if policy == "fill" else None,
        drop=policy == "drop",
        as_they_are=params.isSet("preprocess"),
    )


def input_names(instance: Any) -> list[str]:
    """Returns the input columns: `inputCols` where it is set, else `featuresCol`."""
    return list(instance.getInputCols()) if instance.isSet("inputCols") else [instance.getFeaturesCol()]


@contextmanager
def naming_params(instance: Any, *, fits: bool = True) -> Iterator[None]:
    """Context that adds, to an error about a column, the Param that names the column, if it is only one.

    With `fits`, columns besides the inputs are read, too.
    """
    try:
        yield
    except ColumnError as error:
        given = {name: instance.getOrDefault(name) for name in _COLUMNS if _has(instance, name)}
        read = [name for name in given if (fits or name in _INPUTS) and _INSTEAD.get(name) not in given]
        naming = [
            name
            for name in read
            if error.where.get("column") in ([given[name]] if isinstance(given[name], str) else given[name])
        ]
        if len(naming) != 1:
            raise
        raise error.at(param=naming[0]).with_traceback(error.__traceback__) from error.__cause__


def _has(instance: Any, name: str) -> bool:
    """Whether a Param has a value; `None` is none."""
    return instance.hasParam(name) and instance.isDefined(name) and instance.getOrDefault(name) is not None
