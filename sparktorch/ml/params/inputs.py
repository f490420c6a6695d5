"""How columns become tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparktorch.ml.params.convert import by_column

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["INPUT_DEFAULTS", "InputParams", "LabelColumns"]

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


class InputParams(Params):
    """How the input columns become tensors."""

    inputShapes: Param[dict[str, list[int]]] = Param(
        Params._dummy(),
        "inputShapes",
        "one row's shape by input column, such as {'image': [28, 28, 1]}; by default that of the first row",
        typeConverter=by_column(TypeConverters.toListInt),
    )
    inputLayouts: Param[dict[str, str]] = Param(
        Params._dummy(),
        "inputLayouts",
        "what forward gets, by input column: 'dense' (the default), 'padded' or 'jagged' for arrays of unequal length, "
        "'sparse_csr' for ML vectors, 'raw' for bytes of a tensor, 'image' for JPEG and PNG files",
        typeConverter=by_column(TypeConverters.toString),
    )
    inputDtypes: Param[dict[str, str]] = Param(
        Params._dummy(),
        "inputDtypes",
        "the tensor's dtype by input column; by default int64 for whole numbers and float32 for all others",
        typeConverter=by_column(TypeConverters.toString),
    )
    maxLengths: Param[dict[str, int]] = Param(
        Params._dummy(),
        "maxLengths",
        "the number of elements after which rows are cut off, by padded or jagged input column (> 0)",
        typeConverter=by_column(TypeConverters.toInt),
    )
    padValues: Param[dict[str, float]] = Param(
        Params._dummy(),
        "padValues",
        "what rows are padded with, by padded input column; 0 by default",
        typeConverter=by_column(TypeConverters.toFloat),
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
