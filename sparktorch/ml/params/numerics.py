"""In what numbers it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NUMERICS_DEFAULTS", "NumericsParams"]

NUMERICS_DEFAULTS: dict[str, Any] = {
    "precision": "fp32",
    "compile": False,
    "channelsLast": False,
    "syncBatchNorm": False,
    "nonFiniteLoss": "error",
    "deterministic": False,
}


class NumericsParams(Params):
    """In what numbers, and with which kernels, it is computed."""

    precision: Param[str] = Param(
        Params._dummy(),
        "precision",
        "'fp32', 'tf32' to let GPUs multiply float32 matrices with shorter mantissas, or 'bf16' or 'fp16' to train "
        "under autocast; the weights stay fp32",
        typeConverter=TypeConverters.toString,
    )
    compile: Param[bool] = Param(
        Params._dummy(),
        "compile",
        "whether to train through torch.compile; workers need a C++ compiler for it on CPUs",
        typeConverter=TypeConverters.toBoolean,
    )
    channelsLast: Param[bool] = Param(
        Params._dummy(),
        "channelsLast",
        "whether images, inputs of four axes, and the module's weights are laid out with the channels last",
        typeConverter=TypeConverters.toBoolean,
    )
    syncBatchNorm: Param[bool] = Param(
        Params._dummy(),
        "syncBatchNorm",
        "whether batch normalisation takes its statistics over the rows of all workers",
        typeConverter=TypeConverters.toBoolean,
    )
    emaDecay: Param[float] = Param(
        Params._dummy(),
        "emaDecay",
        "decay of an exponential moving average of the weights, which validation and the model then use (> 0, < 1)",
        typeConverter=TypeConverters.toFloat,
    )
    nonFiniteLoss: Param[str] = Param(
        Params._dummy(),
        "nonFiniteLoss",
        "what happens at a loss that is NaN or infinite: 'error', or 'skip' the step",
        typeConverter=TypeConverters.toString,
    )
    deterministic: Param[bool] = Param(
        Params._dummy(),
        "deterministic",
        "whether two runs on the same machines give the same bits; operations that cannot are errors",
        typeConverter=TypeConverters.toBoolean,
    )

    def getPrecision(self) -> str:
        """Gets the value of `precision` or its default."""
        return self.getOrDefault(self.precision)

    def setPrecision(self, value: str) -> Self:
        """Sets the value of `precision`."""
        return self._set(precision=value)

    def getCompile(self) -> bool:
        """Gets the value of `compile` or its default."""
        return self.getOrDefault(self.compile)

    def setCompile(self, value: bool) -> Self:
        """Sets the value of `compile`."""
        return self._set(compile=value)

    def getChannelsLast(self) -> bool:
        """Gets the value of `channelsLast` or its default."""
        return self.getOrDefault(self.channelsLast)

    def setChannelsLast(self, value: bool) -> Self:
        """Sets the value of `channelsLast`."""
        return self._set(channelsLast=value)

    def getSyncBatchNorm(self) -> bool:
        """Gets the value of `syncBatchNorm` or its default."""
        return self.getOrDefault(self.syncBatchNorm)

    def setSyncBatchNorm(self, value: bool) -> Self:
        """Sets the value of `syncBatchNorm`."""
        return self._set(syncBatchNorm=value)

    def getEmaDecay(self) -> float:
        """Gets the value of `emaDecay`."""
        return self.getOrDefault(self.emaDecay)

    def setEmaDecay(self, value: float) -> Self:
        """Sets the value of `emaDecay`."""
        return self._set(emaDecay=value)

    def getNonFiniteLoss(self) -> str:
        """Gets the value of `nonFiniteLoss` or its default."""
        return self.getOrDefault(self.nonFiniteLoss)

    def setNonFiniteLoss(self, value: str) -> Self:
        """Sets the value of `nonFiniteLoss`."""
        return self._set(nonFiniteLoss=value)

    def getDeterministic(self) -> bool:
        """Gets the value of `deterministic` or its default."""
        return self.getOrDefault(self.deterministic)

    def setDeterministic(self, value: bool) -> Self:
        """Sets the value of `deterministic`."""
        return self._set(deterministic=value)
