"""The Params that say how columns become tensors, and their translation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle
from pyspark.ml.param import Param, Params, TypeConverters

from sparktorch.config import one_of
from sparktorch.data.columns import InputOptions
from sparktorch.data.preprocess import check_signature
from sparktorch.errors import ConfigError
from sparktorch.train.recipe import load_object

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["INPUT_DEFAULTS", "InputParams", "LabelColumns", "check_ships", "input_options", "preprocess_of"]

# Defaults of every estimator.
INPUT_DEFAULTS: dict[str, Any] = {
    "inputShapes": {},
    "inputLayouts": {},
    "inputDtypes": {},
    "maxLengths": {},
    "padValues": {},
    "assembleInputs": False,
    "nullPolicy": "error",
    "fillValue": 0.0,
}


def _by_column(convert: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Returns a converter of mappings from column names to such values."""

    def converter(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected a dict by column name, got {type(value).__name__}")
        return {str(name): convert(item) for name, item in value.items()}

    return converter


class InputParams(Params):
    """How the input columns become tensors."""

    inputShapes: Param[dict[str, list[int]]] = Param(
        Params._dummy(),
        "inputShapes",
        "one row's shape by input column, such as {'image': [28, 28, 1]}; by default that of the first row",
        typeConverter=_by_column(TypeConverters.toListInt),
    )
    inputLayouts: Param[dict[str, str]] = Param(
        Params._dummy(),
        "inputLayouts",
        "what forward gets, by input column: 'dense' (the default), 'padded' or 'jagged' for arrays of unequal length, "
        "'sparse_csr' for ML vectors, 'raw' for bytes of a tensor, 'image' for JPEG and PNG files",
        typeConverter=_by_column(TypeConverters.toString),
    )
    inputDtypes: Param[dict[str, str]] = Param(
        Params._dummy(),
        "inputDtypes",
        "the tensor's dtype by input column; by default int64 for whole numbers and float32 for all others",
        typeConverter=_by_column(TypeConverters.toString),
    )
    maxLengths: Param[dict[str, int]] = Param(
        Params._dummy(),
        "maxLengths",
        "the number of elements after which rows are cut off, by padded or jagged input column (> 0)",
        typeConverter=_by_column(TypeConverters.toInt),
    )
    padValues: Param[dict[str, float]] = Param(
        Params._dummy(),
        "padValues",
        "what rows are padded with, by padded input column; 0 by default",
        typeConverter=_by_column(TypeConverters.toFloat),
    )
    assembleInputs: Param[bool] = Param(
        Params._dummy(),
        "assembleInputs",
        "whether all the scalar columns of inputCols become one tensor, (rows, columns), in place of the first of them",
        typeConverter=TypeConverters.toBoolean,
    )
    nullPolicy: Param[str] = Param(
        Params._dummy(),
        "nullPolicy",
        "what fit does with rows that hold a null or NaN: 'error', 'drop' the row, or 'fill' in fillValue",
        typeConverter=TypeConverters.toString,
    )
    preprocess: Param[str | Callable[..., Any]] = Param(
        Params._dummy(),
        "preprocess",
        "a callable (columns, *, epoch, generator), or its import path, that makes a dict of the arguments of forward "
        "of a dict of the input columns, in the ranks and in scoring",
    )
    fillValue: Param[float] = Param(
        Params._dummy(),
        "fillValue",
        "what stands for nulls and NaN in the inputs under nullPolicy 'fill', in scoring too",
        typeConverter=TypeConverters.toFloat,
    )

    def getInputShapes(self) -> dict[str, list[int]]:
        """Gets the value of `inputShapes` or its default."""
        return self.getOrDefault(self.inputShapes)

    def setInputShapes(self, value: dict[str, list[int]]) -> Self:
        """Sets the value of `inputShapes`."""
        return self._set(inputShapes=value)

    def getInputLayouts(self) -> dict[str, str]:
        """Gets the value of `inputLayouts` or its default."""
        return self.getOrDefault(self.inputLayouts)

    def setInputLayouts(self, value: dict[str, str]) -> Self:
        """Sets the value of `inputLayouts`."""
        return self._set(inputLayouts=value)

    def getInputDtypes(self) -> dict[str, str]:
        """Gets the value of `inputDtypes` or its default."""
        return self.getOrDefault(self.inputDtypes)

    def setInputDtypes(self, value: dict[str, str]) -> Self:
        """Sets the value of `inputDtypes`."""
        return self._set(inputDtypes=value)

    def getMaxLengths(self) -> dict[str, int]:
        """Gets the value of `maxLengths` or its default."""
        return self.getOrDefault(self.maxLengths)

    def setMaxLengths(self, value: dict[str, int]) -> Self:
        """Sets the value of `maxLengths`."""
        return self._set(maxLengths=value)

    def getPadValues(self) -> dict[str, float]:
        """Gets the value of `padValues` or its default."""
        return self.getOrDefault(self.padValues)

    def setPadValues(self, value: dict[str, float]) -> Self:
        """Sets the value of `padValues`."""
        return self._set(padValues=value)

    def getAssembleInputs(self) -> bool:
        """Gets the value of `assembleInputs` or its default."""
        return self.getOrDefault(self.assembleInputs)

    def setAssembleInputs(self, value: bool) -> Self:
        """Sets the value of `assembleInputs`."""
        return self._set(assembleInputs=value)

    def getNullPolicy(self) -> str:
        """Gets the value of `nullPolicy` or its default."""
        return self.getOrDefault(self.nullPolicy)

    def setNullPolicy(self, value: str) -> Self:
        """Sets the value of `nullPolicy`."""
        return self._set(nullPolicy=value)

    def getPreprocess(self) -> str | Callable[..., Any]:
        """Gets the value of `preprocess`."""
        return self.getOrDefault(self.preprocess)

    def setPreprocess(self, value: str | Callable[..., Any]) -> Self:
        """Sets the value of `preprocess`."""
        return self._set(preprocess=value)

    def getFillValue(self) -> float:
        """Gets the value of `fillValue` or its default."""
        return self.getOrDefault(self.fillValue)

    def setFillValue(self, value: float) -> Self:
        """Sets the value of `fillValue`."""
        return self._set(fillValue=value)


class LabelColumns(Params):
    """Several labels of a row."""

    labelCols: Param[list[str]] = Param(
        Params._dummy(),
        "labelCols",
        "scalar columns that become one label, (rows, columns), in place of labelCol",
        typeConverter=TypeConverters.toListString,
    )

    def getLabelCols(self) -> list[str]:
        """Gets the value of `labelCols`."""
        return self.getOrDefault(self.labelCols)

    def setLabelCols(self, value: list[str]) -> Self:
        """Sets the value of `labelCols`."""
        return self._set(labelCols=value)


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
    check_ships(function, "preprocess", param="preprocess", hint="make what it holds inside it")
    return function


def check_ships(value: Any, name: str, *, param: str, hint: str) -> None:
    """Refuses what cannot be sent to the ranks.

    Args:
        value: What is sent, by the cloudpickle that Spark brings to its executors.
        name: Names it in the message.
        param: Where it comes from.
        hint: What to do about it.

    Raises:
        ConfigError: It cannot be pickled.
    """
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigError(f"{name} cannot be shipped to the ranks: {error}", hint=hint, param=param) from error


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
