"""In which steps it is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol, HasSeed, HasWeightCol

from sparktorch.ml.params.convert import to_dict

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TRAINING_DEFAULTS", "TrainingParams"]

TRAINING_DEFAULTS: dict[str, Any] = {
    "labelCol": "label",
    "batchSize": 256,
    "epochs": 1,
    "accumulationSteps": 1,
    "callbacks": [],
    "shuffle": True,
    "seed": 0,
    "strategy": "ddp",
    "strategyParams": {},
}


class TrainingParams(HasLabelCol, HasWeightCol, HasSeed):
    """In which steps it is trained, on how many rows each."""

    batchSize: Param[int] = Param(
        Params._dummy(),
        "batchSize",
        "rows of one optimizer step over all workers together (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    epochs: Param[int] = Param(
        Params._dummy(),
        "epochs",
        "passes over the training rows (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    shuffle: Param[bool] = Param(
        Params._dummy(),
        "shuffle",
        "whether every epoch draws its batches anew",
        typeConverter=TypeConverters.toBoolean,
    )
    idCol: Param[str] = Param(
        Params._dummy(),
        "idCol",
        "a column that identifies a row, used in place of its contents to order the training",
        typeConverter=TypeConverters.toString,
    )
    strategy: Param[str] = Param(
        Params._dummy(),
        "strategy",
        "how the workers share the work: 'ddp'; 'zero1', 'zero2' and 'zero3' divide optimizer state, gradients and "
        "parameters among them; 'localSGD', 'parameterServer', 'independent'",
        typeConverter=TypeConverters.toString,
    )
    accumulationSteps: Param[int] = Param(
        Params._dummy(),
        "accumulationSteps",
        "parts into which a worker splits its rows of a step, their gradients added up (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    microBatchSize: Param[int] = Param(
        Params._dummy(),
        "microBatchSize",
        "the most rows a worker takes through the module at a time, in place of accumulationSteps (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    gradientClipNorm: Param[float] = Param(
        Params._dummy(),
        "gradientClipNorm",
        "largest norm of the whole gradient; a larger one is scaled down (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    gradientClipValue: Param[float] = Param(
        Params._dummy(),
        "gradientClipValue",
        "largest absolute value of an element of the gradient; a larger one is cut off (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    strategyParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "strategyParams",
        "options of the strategy, as docs/training.md lists them",
        typeConverter=to_dict,
    )
    callbacks: Param[list[Any]] = Param(
        Params._dummy(),
        "callbacks",
        "Callback instances, whose hooks run in the workers and on the driver",
        typeConverter=TypeConverters.toList,
    )

    def getBatchSize(self) -> int:
        """Gets the value of `batchSize` or its default."""
        return self.getOrDefault(self.batchSize)

    def setBatchSize(self, value: int) -> Self:
        """Sets the value of `batchSize`."""
        return self._set(batchSize=value)

    def getEpochs(self) -> int:
        """Gets the value of `epochs` or its default."""
        return self.getOrDefault(self.epochs)

    def setEpochs(self, value: int) -> Self:
        """Sets the value of `epochs`."""
        return self._set(epochs=value)

    def getShuffle(self) -> bool:
        """Gets the value of `shuffle` or its default."""
        return self.getOrDefault(self.shuffle)

    def setShuffle(self, value: bool) -> Self:
        """Sets the value of `shuffle`."""
        return self._set(shuffle=value)

    def getIdCol(self) -> str:
        """Gets the value of `idCol` or its default."""
        return self.getOrDefault(self.idCol)

    def setIdCol(self, value: str) -> Self:
        """Sets the value of `idCol`."""
        return self._set(idCol=value)

    def getStrategy(self) -> str:
        """Gets the value of `strategy` or its default."""
        return self.getOrDefault(self.strategy)

    def setStrategy(self, value: str) -> Self:
        """Sets the value of `strategy`."""
        return self._set(strategy=value)

    def getAccumulationSteps(self) -> int:
        """Gets the value of `accumulationSteps` or its default."""
        return self.getOrDefault(self.accumulationSteps)

    def setAccumulationSteps(self, value: int) -> Self:
        """Sets the value of `accumulationSteps`."""
        return self._set(accumulationSteps=value)

    def getMicroBatchSize(self) -> int:
        """Gets the value of `microBatchSize`."""
        return self.getOrDefault(self.microBatchSize)

    def setMicroBatchSize(self, value: int) -> Self:
        """Sets the value of `microBatchSize`."""
        return self._set(microBatchSize=value)

    def getGradientClipNorm(self) -> float:
        """Gets the value of `gradientClipNorm`."""
        return self.getOrDefault(self.gradientClipNorm)

    def setGradientClipNorm(self, value: float) -> Self:
        """Sets the value of `gradientClipNorm`."""
        return self._set(gradientClipNorm=value)

    def getGradientClipValue(self) -> float:
        """Gets the value of `gradientClipValue`."""
        return self.getOrDefault(self.gradientClipValue)

    def setGradientClipValue(self, value: float) -> Self:
        """Sets the value of `gradientClipValue`."""
        return self._set(gradientClipValue=value)

    def getStrategyParams(self) -> dict[str, Any]:
        """Gets the value of `strategyParams` or its default."""
        return self.getOrDefault(self.strategyParams)

    def setStrategyParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `strategyParams`."""
        return self._set(strategyParams=value)

    def getCallbacks(self) -> list[Any]:
        """Gets the value of `callbacks` or its default."""
        return self.getOrDefault(self.callbacks)

    def setCallbacks(self, value: list[Any]) -> Self:
        """Sets the value of `callbacks`."""
        return self._set(callbacks=value)

    def setLabelCol(self, value: str) -> Self:
        """Sets the value of `labelCol`."""
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Self:
        """Sets the value of `weightCol`."""
        return self._set(weightCol=value)

    def setSeed(self, value: int) -> Self:
        """Sets the value of `seed`."""
        return self._set(seed=value)
