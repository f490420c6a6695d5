"""How it is validated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasValidationIndicatorCol

from sparktorch.ml.params.convert import to_dict

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["VALIDATION_DEFAULTS", "ValidationParams"]

VALIDATION_DEFAULTS: dict[str, Any] = {
    "validationInterval": 1,
    "validationUnit": "epoch",
    "metrics": {},
}


class ValidationParams(HasValidationIndicatorCol):
    """When and by what it is validated, and when that ends it."""

    validationInterval: Param[int] = Param(
        Params._dummy(),
        "validationInterval",
        "epochs from one validation to the next; the last is always validated (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    validationUnit: Param[str] = Param(
        Params._dummy(),
        "validationUnit",
        "what validationInterval counts: 'epoch' or 'step'",
        typeConverter=TypeConverters.toString,
    )
    validationBatchSize: Param[int] = Param(
        Params._dummy(),
        "validationBatchSize",
        "validation rows that a worker takes through the module at a time; without it, as many as training takes, and "
        "4096 at most (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    metrics: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "metrics",
        "further validation metrics by name: the name of a class in torchmetrics, {'name': ..., and its parameters}, "
        "a factory or an instance",
        typeConverter=to_dict,
    )
    earlyStoppingPatience: Param[int] = Param(
        Params._dummy(),
        "earlyStoppingPatience",
        "validations in a row without a smaller val_loss after which training ends; the model has the weights of "
        "the best one (> 0)",
        typeConverter=TypeConverters.toInt,
    )

    def getValidationInterval(self) -> int:
        """Gets the value of `validationInterval` or its default."""
        return self.getOrDefault(self.validationInterval)

    def setValidationInterval(self, value: int) -> Self:
        """Sets the value of `validationInterval`."""
        return self._set(validationInterval=value)

    def getValidationUnit(self) -> str:
        """Gets the value of `validationUnit` or its default."""
        return self.getOrDefault(self.validationUnit)

    def setValidationUnit(self, value: str) -> Self:
        """Sets the value of `validationUnit`."""
        return self._set(validationUnit=value)

    def getValidationBatchSize(self) -> int:
        """Gets the value of `validationBatchSize`."""
        return self.getOrDefault(self.validationBatchSize)

    def setValidationBatchSize(self, value: int) -> Self:
        """Sets the value of `validationBatchSize`."""
        return self._set(validationBatchSize=value)

    def getMetrics(self) -> dict[str, Any]:
        """Gets the value of `metrics` or its default."""
        return self.getOrDefault(self.metrics)

    def setMetrics(self, value: dict[str, Any]) -> Self:
        """Sets the value of `metrics`."""
        return self._set(metrics=value)

    def getEarlyStoppingPatience(self) -> int:
        """Gets the value of `earlyStoppingPatience`."""
        return self.getOrDefault(self.earlyStoppingPatience)

    def setEarlyStoppingPatience(self, value: int) -> Self:
        """Sets the value of `earlyStoppingPatience`."""
        return self._set(earlyStoppingPatience=value)

    def setValidationIndicatorCol(self, value: str) -> Self:
        """Sets the value of `validationIndicatorCol`."""
        return self._set(validationIndicatorCol=value)
