"""Translates the Params that say how columns become tensors."""

from __future__ import annotations

from typing import Any

from pyspark import cloudpickle

from sparktorch.config import one_of
from sparktorch.data.columns import InputOptions
from sparktorch.data.preprocess import check_signature
from sparktorch.errors import ConfigError
from sparktorch.ml.params import InputParams
from sparktorch.train.recipe import load_object

__all__ = ["input_options", "preprocess_of"]


def preprocess_of(params: InputParams) -> Any:
    """Returns the callable, `None` where none is set.

    Raises:
        ConfigError: It is none that can be called as it should be, or cannot be shipped to the ranks.
        ModuleError: There is nothing under its import path.
    """
    if not params.isSet("preprocess"):
        return None
    function = params.getPreprocess()
    if isinstance(function, str):
        function = load_object(function)
    check_signature(function)
    try:
        cloudpickle.dumps(function)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(
            f"preprocess cannot be shipped to the ranks: {error}",
            hint="make what it holds inside it",
            param="preprocess",
        ) from error
    return function


def input_options(params: InputParams) -> InputOptions:
    """Translates the Params.

    Raises:
        ConfigError: One of them is out of range.
    """
    policy = params.getNullPolicy()
    one_of("nullPolicy", policy, ("error", "drop", "fill"))
    if params.isSet("fillValue") and policy != "fill":
        raise ConfigError(
            f"fillValue is set, and nullPolicy is {policy!r}", hint="set nullPolicy='fill'", param="fillValue"
        )
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
