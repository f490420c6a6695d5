"""What estimator and model share, and how to score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasOutputCols,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasThresholds,
    HasWeightCol,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SCORING_DEFAULTS", "ClassifierColumns", "OutputColumns", "ScoringParams", "TrueColumns"]

# Of estimators and models.
SCORING_DEFAULTS: dict[str, Any] = {
    "device": "auto",
    "handleInvalid": "error",
    "predictBatchSize": 2048,
    "predictCompile": False,
    "predictPrecision": "fp32",
}


class ScoringParams(HasFeaturesCol, HasInputCols, HasPredictionCol):
    """What estimator and model share: input columns, prediction column, how to score."""

    device: Param[str] = Param(
        Params._dummy(),
        "device",
        "'auto', 'cpu' or a type of accelerator, such as 'cuda', for training and for scoring; auto takes one per task "
        "where there are any",
        typeConverter=TypeConverters.toString,
    )
    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        "what transform does with a row whose inputs are null or hold a null: 'error', 'keep' it with null results, or "
        "'skip' it, as one that holds NaN or infinity",
        typeConverter=TypeConverters.toString,
    )
    predictBatchSize: Param[int] = Param(
        Params._dummy(),
        "predictBatchSize",
        "the most rows that go through the module at a time when scoring (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    predictPrecision: Param[str] = Param(
        Params._dummy(),
        "predictPrecision",
        "'fp32', or 'bf16' or 'fp16' to score under autocast",
        typeConverter=TypeConverters.toString,
    )
    predictCompile: Param[bool] = Param(
        Params._dummy(),
        "predictCompile",
        "whether to score through torch.compile; executors need a C++ compiler for it on CPUs",
        typeConverter=TypeConverters.toBoolean,
    )

    def getDevice(self) -> str:
        """Gets the value of `device` or its default."""
        return self.getOrDefault(self.device)

    def setDevice(self, value: str) -> Self:
        """Sets the value of `device`."""
        return self._set(device=value)

    def getHandleInvalid(self) -> str:
        """Gets the value of `handleInvalid` or its default."""
        return self.getOrDefault(self.handleInvalid)

    def setHandleInvalid(self, value: str) -> Self:
        """Sets the value of `handleInvalid`."""
        return self._set(handleInvalid=value)

    def getPredictPrecision(self) -> str:
        """Gets the value of `predictPrecision` or its default."""
        return self.getOrDefault(self.predictPrecision)

    def setPredictPrecision(self, value: str) -> Self:
        """Sets the value of `predictPrecision`."""
        return self._set(predictPrecision=value)

    def getPredictCompile(self) -> bool:
        """Gets the value of `predictCompile` or its default."""
        return self.getOrDefault(self.predictCompile)

    def setPredictCompile(self, value: bool) -> Self:
        """Sets the value of `predictCompile`."""
        return self._set(predictCompile=value)

    def getPredictBatchSize(self) -> int:
        """Gets the value of `predictBatchSize` or its default."""
        return self.getOrDefault(self.predictBatchSize)

    def setPredictBatchSize(self, value: int) -> Self:
        """Sets the value of `predictBatchSize`."""
        return self._set(predictBatchSize=value)

    def setFeaturesCol(self, value: str) -> Self:
        """Sets the value of `featuresCol`."""
        return self._set(featuresCol=value)

    def setInputCols(self, value: list[str]) -> Self:
        """Sets the value of `inputCols`."""
        return self._set(inputCols=value)

    def setPredictionCol(self, value: str) -> Self:
        """Sets the value of `predictionCol`."""
        return self._set(predictionCol=value)


class ClassifierColumns(HasRawPredictionCol, HasProbabilityCol, HasThresholds):
    """The further output columns of a classifier, an empty name leaves one out; and how it decides for a class."""

    def setRawPredictionCol(self, value: str) -> Self:
        """Sets the value of `rawPredictionCol`."""
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self, value: str) -> Self:
        """Sets the value of `probabilityCol`."""
        return self._set(probabilityCol=value)

    def setThresholds(self, value: list[float]) -> Self:
        """Sets the value of `thresholds`: the class with the largest probability / threshold is predicted."""
        return self._set(thresholds=value)


class TrueColumns(HasLabelCol, HasWeightCol):
    """The columns that `evaluate` of a model compares its predictions with."""

    def setLabelCol(self, value: str) -> Self:
        """Sets the value of `labelCol`."""
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Self:
        """Sets the value of `weightCol`."""
        return self._set(weightCol=value)


class OutputColumns(HasOutputCols):
    """Names for the outputs of a module that returns several."""

    def setOutputCols(self, value: list[str]) -> Self:
        """Sets the value of `outputCols`."""
        return self._set(outputCols=value)
