"""The Params of estimators and models. Camel case lives here and nowhere below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from sparktorch.ml.inputs import INPUT_DEFAULTS
from sparktorch.ml.storage import STORAGE_DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DEFAULTS",
    "SCORING_DEFAULTS",
    "CheckpointParams",
    "ClassWeightParams",
    "ClassifierColumns",
    "LaunchParams",
    "ModuleParams",
    "OutputColumns",
    "ScoringParams",
    "TrackingParams",
    "TrainingParams",
]


# Defaults of estimators and models.
SCORING_DEFAULTS: dict[str, Any] = {
    "device": "auto",
    "handleInvalid": "error",
    "predictBatchSize": 2048,
    "predictCompile": False,
    "predictPrecision": "fp32",
}

# Defaults of every estimator; the constructors repeat them where a reader looks for them.
DEFAULTS: dict[str, Any] = {
    **SCORING_DEFAULTS,
    **INPUT_DEFAULTS,
    **STORAGE_DEFAULTS,
    "moduleParams": {},
    "featuresCol": "features",
    "labelCol": "label",
    "predictionCol": "prediction",
    "lossParams": {},
    "optimizer": "AdamW",
    "optimizerParams": {},
    "learningRate": 1e-3,
    "schedulerParams": {},
    "schedulerInterval": "epoch",
    "parameterGroups": [],
    "freeze": [],
    "batchSize": 256,
    "epochs": 1,
    "accumulationSteps": 1,
    "precision": "fp32",
    "compile": False,
    "channelsLast": False,
    "syncBatchNorm": False,
    "nonFiniteLoss": "error",
    "deterministic": False,
    "validationInterval": 1,
    "validationUnit": "epoch",
    "metrics": {},
    "callbacks": [],
    "shuffle": True,
    "seed": 0,
    "strategy": "ddp",
    "strategyParams": {},
    "numWorkers": 1,
    "rendezvous": "auto",
    "preflight": "basic",
    "checkpointInterval": 1,
    "checkpointUnit": "epoch",
    "keepCheckpoints": 2,
    "maxRestarts": 0,
    "startTimeout": 3600.0,
    "stallTimeout": 600.0,
    "logLevel": "WARNING",
    "progress": True,
}


def _to_dicts(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list of dicts, got {type(value).__name__}")
    return [_to_dict(item) for item in value]


def _to_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a dict, got {type(value).__name__}")
    return dict(value)


class ScoringParams(HasFeaturesCol, HasInputCols, HasPredictionCol):
    """What estimator and model share: input columns, prediction column, how to score."""

    device: Param[str] = Param(
        Params._dummy(),
        "device",
        "'auto', 'cpu' or 'cuda', for training and for scoring; auto takes a GPU per task where there are any",
        typeConverter=TypeConverters.toString,
    )
    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        "what transform does with a row whose inputs are null or hold a null: 'error', or 'keep' it with null results",
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


class ClassifierColumns(HasRawPredictionCol, HasProbabilityCol):
    """The further output columns of a classifier; an empty name leaves a column out."""

    def setRawPredictionCol(self, value: str) -> Self:
        """Sets the value of `rawPredictionCol`."""
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self, value: str) -> Self:
        """Sets the value of `probabilityCol`."""
        return self._set(probabilityCol=value)


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


class OutputColumns(HasOutputCols):
    """Names for the outputs of a module that returns several."""

    def setOutputCols(self, value: list[str]) -> Self:
        """Sets the value of `outputCols`."""
        return self._set(outputCols=value)


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
        typeConverter=_to_dict,
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
        typeConverter=_to_dict,
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
        typeConverter=_to_dict,
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
        typeConverter=_to_dict,
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
        typeConverter=_to_dicts,
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


class TrainingParams(HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """How it is trained, and on which columns."""

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
    precision: Param[str] = Param(
        Params._dummy(),
        "precision",
        "'fp32', 'tf32' to let GPUs multiply float32 matrices with shorter mantissas, or 'bf16' or 'fp16' to train "
        "under autocast; the weights stay fp32",
        typeConverter=TypeConverters.toString,
    )
    validationInterval: Param[int] = Param(
        Params._dummy(),
        "validationInterval",
        "epochs from one validation to the next; the last is always validated (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    earlyStoppingPatience: Param[int] = Param(
        Params._dummy(),
        "earlyStoppingPatience",
        "validations in a row without a smaller val_loss after which training ends; the model has the weights of "
        "the best one (> 0)",
        typeConverter=TypeConverters.toInt,
    )

    strategyParams: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "strategyParams",
        "options of the strategy, as docs/training.md lists them",
        typeConverter=_to_dict,
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
    validationUnit: Param[str] = Param(
        Params._dummy(),
        "validationUnit",
        "what validationInterval counts: 'epoch' or 'step'",
        typeConverter=TypeConverters.toString,
    )
    metrics: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "metrics",
        "further validation metrics by name: the name of a class in torchmetrics, {'name': ..., and its parameters}, "
        "a factory or an instance",
        typeConverter=_to_dict,
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

    def getPrecision(self) -> str:
        """Gets the value of `precision` or its default."""
        return self.getOrDefault(self.precision)

    def setPrecision(self, value: str) -> Self:
        """Sets the value of `precision`."""
        return self._set(precision=value)

    def getValidationInterval(self) -> int:
        """Gets the value of `validationInterval` or its default."""
        return self.getOrDefault(self.validationInterval)

    def setValidationInterval(self, value: int) -> Self:
        """Sets the value of `validationInterval`."""
        return self._set(validationInterval=value)

    def getEarlyStoppingPatience(self) -> int:
        """Gets the value of `earlyStoppingPatience`."""
        return self.getOrDefault(self.earlyStoppingPatience)

    def setEarlyStoppingPatience(self, value: int) -> Self:
        """Sets the value of `earlyStoppingPatience`."""
        return self._set(earlyStoppingPatience=value)

    def getStrategyParams(self) -> dict[str, Any]:
        """Gets the value of `strategyParams` or its default."""
        return self.getOrDefault(self.strategyParams)

    def setStrategyParams(self, value: dict[str, Any]) -> Self:
        """Sets the value of `strategyParams`."""
        return self._set(strategyParams=value)

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

    def getValidationUnit(self) -> str:
        """Gets the value of `validationUnit` or its default."""
        return self.getOrDefault(self.validationUnit)

    def setValidationUnit(self, value: str) -> Self:
        """Sets the value of `validationUnit`."""
        return self._set(validationUnit=value)

    def getMetrics(self) -> dict[str, Any]:
        """Gets the value of `metrics` or its default."""
        return self.getOrDefault(self.metrics)

    def setMetrics(self, value: dict[str, Any]) -> Self:
        """Sets the value of `metrics`."""
        return self._set(metrics=value)

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

    def setValidationIndicatorCol(self, value: str) -> Self:
        """Sets the value of `validationIndicatorCol`."""
        return self._set(validationIndicatorCol=value)

    def setSeed(self, value: int) -> Self:
        """Sets the value of `seed`."""
        return self._set(seed=value)


class LaunchParams(Params):
    """Where it is trained."""

    numWorkers: Param[int] = Param(
        Params._dummy(),
        "numWorkers",
        "number of barrier tasks, the world size (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    rendezvous: Param[str] = Param(
        Params._dummy(),
        "rendezvous",
        "who hosts the store at which workers meet: 'auto', 'driver' or 'rank0'",
        typeConverter=TypeConverters.toString,
    )
    minWorkers: Param[int] = Param(
        Params._dummy(),
        "minWorkers",
        "the fewest workers that a restart goes on with, where the cluster has no slots for all of them any more (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    startTimeout: Param[float] = Param(
        Params._dummy(),
        "startTimeout",
        "seconds that a fit waits for slots which other jobs hold (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    stallTimeout: Param[float] = Param(
        Params._dummy(),
        "stallTimeout",
        "seconds that a worker may stand still, or start after the first one, before the fit ends with its name, its "
        "place and its Python stack (> 0)",
        typeConverter=TypeConverters.toFloat,
    )
    logLevel: Param[str] = Param(
        Params._dummy(),
        "logLevel",
        "from which level on the driver shows what workers log; what they print counts as 'INFO'",
        typeConverter=TypeConverters.toString,
    )
    preflight: Param[str] = Param(
        Params._dummy(),
        "preflight",
        "what is checked before the job starts: 'basic' for settings, slots and GPUs, 'full' for the executors as well",
        typeConverter=TypeConverters.toString,
    )
    progress: Param[bool] = Param(
        Params._dummy(),
        "progress",
        "whether fit shows a progress bar on the driver",
        typeConverter=TypeConverters.toBoolean,
    )

    def getNumWorkers(self) -> int:
        """Gets the value of `numWorkers` or its default."""
        return self.getOrDefault(self.numWorkers)

    def setNumWorkers(self, value: int) -> Self:
        """Sets the value of `numWorkers`."""
        return self._set(numWorkers=value)

    def getRendezvous(self) -> str:
        """Gets the value of `rendezvous` or its default."""
        return self.getOrDefault(self.rendezvous)

    def setRendezvous(self, value: str) -> Self:
        """Sets the value of `rendezvous`."""
        return self._set(rendezvous=value)

    def getMinWorkers(self) -> int:
        """Gets the value of `minWorkers`."""
        return self.getOrDefault(self.minWorkers)

    def setMinWorkers(self, value: int) -> Self:
        """Sets the value of `minWorkers`."""
        return self._set(minWorkers=value)

    def getStartTimeout(self) -> float:
        """Gets the value of `startTimeout` or its default."""
        return self.getOrDefault(self.startTimeout)

    def setStartTimeout(self, value: float) -> Self:
        """Sets the value of `startTimeout`."""
        return self._set(startTimeout=value)

    def getStallTimeout(self) -> float:
        """Gets the value of `stallTimeout` or its default."""
        return self.getOrDefault(self.stallTimeout)

    def setStallTimeout(self, value: float) -> Self:
        """Sets the value of `stallTimeout`."""
        return self._set(stallTimeout=value)

    def getLogLevel(self) -> str:
        """Gets the value of `logLevel` or its default."""
        return self.getOrDefault(self.logLevel)

    def setLogLevel(self, value: str) -> Self:
        """Sets the value of `logLevel`."""
        return self._set(logLevel=value)

    def getPreflight(self) -> str:
        """Gets the value of `preflight` or its default."""
        return self.getOrDefault(self.preflight)

    def setPreflight(self, value: str) -> Self:
        """Sets the value of `preflight`."""
        return self._set(preflight=value)

    def getProgress(self) -> bool:
        """Gets the value of `progress` or its default."""
        return self.getOrDefault(self.progress)

    def setProgress(self, value: bool) -> Self:
        """Sets the value of `progress`."""
        return self._set(progress=value)


class CheckpointParams(Params):
    """What survives the loss of workers."""

    checkpointDir: Param[str] = Param(
        Params._dummy(),
        "checkpointDir",
        "path or URL of a directory that all workers can write, for checkpoints; a fit whose directory holds an "
        "unfinished training of the same configuration goes on with it",
        typeConverter=TypeConverters.toString,
    )
    checkpointInterval: Param[int] = Param(
        Params._dummy(),
        "checkpointInterval",
        "epochs or steps from one checkpoint to the next (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    checkpointUnit: Param[str] = Param(
        Params._dummy(),
        "checkpointUnit",
        "what checkpointInterval counts: 'epoch' or 'step'",
        typeConverter=TypeConverters.toString,
    )
    keepCheckpoints: Param[int] = Param(
        Params._dummy(),
        "keepCheckpoints",
        "number of checkpoints that are kept, besides that of the best validation (> 0)",
        typeConverter=TypeConverters.toInt,
    )
    maxRestarts: Param[int] = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a training that loses a worker is started again, from its last checkpoint if it has one (>= 0)",
        typeConverter=TypeConverters.toInt,
    )

    def getCheckpointDir(self) -> str:
        """Gets the value of `checkpointDir`."""
        return self.getOrDefault(self.checkpointDir)

    def setCheckpointDir(self, value: str) -> Self:
        """Sets the value of `checkpointDir`."""
        return self._set(checkpointDir=value)

    def getCheckpointInterval(self) -> int:
        """Gets the value of `checkpointInterval` or its default."""
        return self.getOrDefault(self.checkpointInterval)

    def setCheckpointInterval(self, value: int) -> Self:
        """Sets the value of `checkpointInterval`."""
        return self._set(checkpointInterval=value)

    def getCheckpointUnit(self) -> str:
        """Gets the value of `checkpointUnit` or its default."""
        return self.getOrDefault(self.checkpointUnit)

    def setCheckpointUnit(self, value: str) -> Self:
        """Sets the value of `checkpointUnit`."""
        return self._set(checkpointUnit=value)

    def getKeepCheckpoints(self) -> int:
        """Gets the value of `keepCheckpoints` or its default."""
        return self.getOrDefault(self.keepCheckpoints)

    def setKeepCheckpoints(self, value: int) -> Self:
        """Sets the value of `keepCheckpoints`."""
        return self._set(keepCheckpoints=value)

    def getMaxRestarts(self) -> int:
        """Gets the value of `maxRestarts` or its default."""
        return self.getOrDefault(self.maxRestarts)

    def setMaxRestarts(self, value: int) -> Self:
        """Sets the value of `maxRestarts`."""
        return self._set(maxRestarts=value)


class TrackingParams(Params):
    """Where it is logged. Inside an active MLflow run every fit is logged, without these."""

    mlflowExperiment: Param[str] = Param(
        Params._dummy(),
        "mlflowExperiment",
        "name of the MLflow experiment, made if it is missing, in which each fit starts a run of its own, "
        "nested where a run is active",
        typeConverter=TypeConverters.toString,
    )
    mlflowRunName: Param[str] = Param(
        Params._dummy(),
        "mlflowRunName",
        "name of the MLflow run that each fit starts for itself, nested where a run is active",
        typeConverter=TypeConverters.toString,
    )

    def getMlflowExperiment(self) -> str:
        """Gets the value of `mlflowExperiment`."""
        return self.getOrDefault(self.mlflowExperiment)

    def setMlflowExperiment(self, value: str) -> Self:
        """Sets the value of `mlflowExperiment`."""
        return self._set(mlflowExperiment=value)

    def getMlflowRunName(self) -> str:
        """Gets the value of `mlflowRunName`."""
        return self.getOrDefault(self.mlflowRunName)

    def setMlflowRunName(self, value: str) -> Self:
        """Sets the value of `mlflowRunName`."""
        return self._set(mlflowRunName=value)
