"""Regression: one number a row, or a row of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark import keyword_only

from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params import DEFAULTS, LabelColumns
from sparktorch.ml.translate import given

__all__ = ["TorchRegressionModel", "TorchRegressor"]


class TorchRegressionModel(TorchModelBase):
    """A module fitted by `TorchRegressor`.

    `transform` adds `predictionCol`: double for one value a row, an array of double for several.
    """

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        shape = self.trained.outputs[0].shape
        kind = "double" if shape in ((), (1,)) else "array<double>"
        return {"prediction": kind}, {self.getPredictionCol(): "prediction"}


class TorchRegressor(TorchEstimatorBase[TorchRegressionModel], LabelColumns):
    """Trains a PyTorch module to predict numbers.

    The module returns shape `(rows,)` or `(rows, 1)` for a number as label, `(rows, values)` for
    an array.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "regression"
    _model_class = TorchRegressionModel

    @keyword_only
    def __init__(
        self,
        *,
        module: Any = None,
        moduleParams: dict[str, Any] | None = None,
        featuresCol: str = "features",
        inputCols: list[str] | None = None,
        assembleInputs: bool = False,
        inputShapes: dict[str, list[int]] | None = None,
        inputLayouts: dict[str, str] | None = None,
        inputDtypes: dict[str, str] | None = None,
        maxLengths: dict[str, int] | None = None,
        padValues: dict[str, float] | None = None,
        preprocess: str | Callable[..., Any] | None = None,
        nullPolicy: str = "error",
        fillValue: float = 0.0,
        labelCol: str = "label",
        labelCols: list[str] | None = None,
        predictionCol: str = "prediction",
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        idCol: str | None = None,
        loss: str | Callable[..., Any] = "MSELoss",
        lossParams: dict[str, Any] | None = None,
        trainingStep: str | Callable[..., Any] | None = None,
        optimizer: str | Callable[..., Any] = "AdamW",
        optimizerParams: dict[str, Any] | None = None,
        learningRate: float = 1e-3,
        parameterGroups: list[dict[str, Any]] | None = None,
        freeze: list[str] | None = None,
        scheduler: str | Callable[..., Any] | None = None,
        schedulerParams: dict[str, Any] | None = None,
        schedulerInterval: str = "epoch",
        warmupSteps: int | None = None,
        referenceBatchSize: int | None = None,
        batchSize: int = 256,
        accumulationSteps: int = 1,
        microBatchSize: int | None = None,
        gradientClipNorm: float | None = None,
        gradientClipValue: float | None = None,
        precision: str = "fp32",
        compile: bool = False,
        channelsLast: bool = False,
        syncBatchNorm: bool = False,
        emaDecay: float | None = None,
        nonFiniteLoss: str = "error",
        deterministic: bool = False,
        epochs: int = 1,
        validationInterval: int = 1,
        validationUnit: str = "epoch",
        metrics: dict[str, Any] | None = None,
        earlyStoppingPatience: int | None = None,
        callbacks: list[Any] | None = None,
        split: str = "key",
        storage: str = "memory",
        memoryBudget: int = 1024,
        shuffle: bool = True,
        shuffleBlock: int | None = None,
        seed: int = 0,
        strategy: str = "ddp",
        strategyParams: dict[str, Any] | None = None,
        numWorkers: int = 1,
        device: str = "auto",
        rendezvous: str = "auto",
        preflight: str = "basic",
        checkpointDir: str | None = None,
        checkpointInterval: int = 1,
        checkpointUnit: str = "epoch",
        keepCheckpoints: int = 2,
        maxRestarts: int = 0,
        minWorkers: int | None = None,
        startTimeout: float = 3600.0,
        stallTimeout: float = 600.0,
        logLevel: str = "WARNING",
        handleInvalid: str = "error",
        predictBatchSize: int = 2048,
        predictPrecision: str = "fp32",
        predictCompile: bool = False,
        progress: bool = True,
        mlflowExperiment: str | None = None,
        mlflowRunName: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS, loss="MSELoss")
        self._set(**given(self))
