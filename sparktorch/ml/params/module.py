"""What is trained: module, loss, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Param, Params, TypeConverters

from sparktorch.ml.params.convert import to_dict, to_dicts

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MODULE_DEFAULTS", "ClassWeightParams", "ModuleParams"]

MODULE_DEFAULTS: dict[str, Any] = {
    "moduleParams": {},
    "lossParams": {},
    "optimizer": "AdamW",
    "optimizerParams": {},
    "learningRate": 0.001,
    "schedulerParams": {},
    "schedulerInterval": "epoch",
    "parameterGroups": [],
    "freeze": [],
}


class ModuleParams(Params):
    """What is trained."""

    module: Param[Any] = Param(
        Params._dummy(),
        "module",
        "the nn.Module class or factory, its import path 'package.module:Name', an instance, or a fitted model "
        "to go on from",
    )
    moduleParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "moduleParams",
        "keyword arguments of the module's factory",
        typeConverter=to_dict,
    )
    loss: Param[str | Callable[..., Any]] = Param(
        Params._dummy(),
        "loss",
        "a class in torch.nn by name, an import path, or a callable (output, label) -> loss per row",
    )
    lossParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "lossParams",
        "keyword arguments of the loss class",
        typeConverter=to_dict,
    )
    optimizer: Param[str | Callable[..., Any]] = Param(
        Params._dummy(),
        "optimizer",
        "a class in torch.optim by name, an import path, or a factory",
    )
    optimizerParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "optimizerParams",
        "keyword arguments of the optimizer besides the learning rate",
        typeConverter=to_dict,
    )
    learningRate: Param[float] = Param(
        Params._dummy(),
        "learningRate",
        "learning rate (> 0)",
        typeConverter=TypeConverters.toFloat,
    )

    scheduler: Param[str | Callable[..., Any]] = Param(
        Params._dummy(),
        "scheduler",
        "a class in torch.optim.lr_scheduler by name, an import path, or a factory (optimizer, **params)",
    )
    schedulerParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "schedulerParams",
        "keyword arguments of the scheduler; T_max and total_steps are known without them",
        typeConverter=to_dict,
    )
    schedulerInterval: Param[str] = Param(
        Params._dummy(),
        "schedulerInterval",
        "whether the scheduler steps after each 'step' or each 'epoch'",
        typeConverter=TypeConverters.toString,
    )
    warmupSteps: Param[int] = Param(
        Params._dummy(),
        "warmupSteps",
        "steps over which the learning rate rises linearly to what the scheduler says (>= 0)",
        typeConverter=TypeConverters.toInt,
    )
    referenceBatchSize: Param[int] = Param(
        Params._dummy(),
        "referenceBatchSize",
        "the batch size that learningRate was chosen for: scales it to batchSize, with a warm-up (> 0)",
        typeConverter=TypeConverters.toInt,
    )

    trainingStep: Param[str | Callable[..., Any]] = Param(
        Params._dummy(),
        "trainingStep",
        "a callable (module, batch) -> loss, or (loss, metrics), or its import path, in place of loss",
    )
    parameterGroups: Param[list[dict[str, Any]]] = Param(
        Params._dummy(),
        "parameterGroups",
        "optimizer settings of some parameters: dicts with 'params', glob patterns of names, and what differs for "
        "them, such as lr or weight_decay; the first that matches a name holds",
        typeConverter=to_dicts,
    )
    freeze: Param[list[str]] = Param(
        Params._dummy(),
        "freeze",
        "glob patterns of the names of parameters that are not trained; '!pattern' takes some out again",
        typeConverter=TypeConverters.toListString,
    )

    def getModule(self) -> Any:
        """Gets the value of `module` or its default."""
        return self.getOrDefault(self.module)

    def setModule(self, value: Any) -> Self:
        """Sets the value of `module`."""
        return self._set(module=value)

    def getModuleParams(self) -> dict[str, Any]:
        """Gets the value of `moduleParams` or its default."""
        return self.getOrDefault(self.moduleParams)

    def setModuleParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `moduleParams`."""
        return self._set(moduleParams=value)

    def getLoss(self) -> str | Callable[..., Any]:
        """Gets the value of `loss` or its default."""
        return self.getOrDefault(self.loss)

    def setLoss(self, value: str | Callable[..., Any]) -> Self:
        """Sets the value of `loss`."""
        return self._set(loss=value)

    def getLossParams(self) -> dict[str, Any]:
        """Gets the value of `lossParams` or its default."""
        return self.getOrDefault(self.lossParams)

    def setLossParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `lossParams`."""
        return self._set(lossParams=value)

    def getOptimizer(self) -> str | Callable[..., Any]:
        """Gets the value of `optimizer` or its default."""
        return self.getOrDefault(self.optimizer)

    def setOptimizer(self, value: str | Callable[..., Any]) -> Self:
        """Sets the value of `optimizer`."""
        return self._set(optimizer=value)

    def getOptimizerParams(self) -> dict[str, Any]:
        """Gets the value of `optimizerParams` or its default."""
        return self.getOrDefault(self.optimizerParams)

    def setOptimizerParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `optimizerParams`."""
        return self._set(optimizerParams=value)

    def getLearningRate(self) -> float:
        """Gets the value of `learningRate` or its default."""
        return self.getOrDefault(self.learningRate)

    def setLearningRate(self, value: float) -> Self:
        """Sets the value of `learningRate`."""
        return self._set(learningRate=value)

    def getScheduler(self) -> str | Callable[..., Any]:
        """Gets the value of `scheduler`."""
        return self.getOrDefault(self.scheduler)

    def setScheduler(self, value: str | Callable[..., Any]) -> Self:
        """Sets the value of `scheduler`."""
        return self._set(scheduler=value)

    def getSchedulerParams(self) -> dict[str, Any]:
        """Gets the value of `schedulerParams` or its default."""
        return self.getOrDefault(self.schedulerParams)

    def setSchedulerParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `schedulerParams`."""
        return self._set(schedulerParams=value)

    def getSchedulerInterval(self) -> str:
        """Gets the value of `schedulerInterval` or its default."""
        return self.getOrDefault(self.schedulerInterval)

    def setSchedulerInterval(self, value: str) -> Self:
        """Sets the value of `schedulerInterval`."""
        return self._set(schedulerInterval=value)

    def getWarmupSteps(self) -> int:
        """Gets the value of `warmupSteps`."""
        return self.getOrDefault(self.warmupSteps)

    def setWarmupSteps(self, value: int) -> Self:
        """Sets the value of `warmupSteps`."""
        return self._set(warmupSteps=value)

    def getReferenceBatchSize(self) -> int:
        """Gets the value of `referenceBatchSize`."""
        return self.getOrDefault(self.referenceBatchSize)

    def setReferenceBatchSize(self, value: int) -> Self:
        """Sets the value of `referenceBatchSize`."""
        return self._set(referenceBatchSize=value)

    def getTrainingStep(self) -> str | Callable[..., Any]:
        """Gets the value of `trainingStep`."""
        return self.getOrDefault(self.trainingStep)

    def setTrainingStep(self, value: str | Callable[..., Any]) -> Self:
        """Sets the value of `trainingStep`."""
        return self._set(trainingStep=value)

    def getParameterGroups(self) -> list[dict[str, Any]]:
        """Gets the value of `parameterGroups` or its default."""
        return self.getOrDefault(self.parameterGroups)

    def setParameterGroups(self, value: list[dict[str, Any]]) -> Self:
        """Sets the value of `parameterGroups`."""
        return self._set(parameterGroups=value)

    def getFreeze(self) -> list[str]:
        """Gets the value of `freeze` or its default."""
        return self.getOrDefault(self.freeze)

    def setFreeze(self, value: list[str]) -> Self:
        """Sets the value of `freeze`."""
        return self._set(freeze=value)


class ClassWeightParams(Params):
    """What each class counts for."""

    classWeights: Param[str | list[float]] = Param(
        Params._dummy(),
        "classWeights",
        "one weight per class, which rows' weights are multiplied by, or 'balanced' for rows / (classes * rows of the "
        "class)",
    )

    def getClassWeights(self) -> str | list[float]:
        """Gets the value of `classWeights`."""
        return self.getOrDefault(self.classWeights)

    def setClassWeights(self, value: str | list[float]) -> Self:
        """Sets the value of `classWeights`."""
        return self._set(classWeights=value)
