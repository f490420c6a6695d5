"""Regression: one number a row, or a row of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark import keyword_only
from pyspark.sql import DataFrame

from sparktorch.errors import ConfigError
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.translate import given
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params import DEFAULTS, LabelColumns, TrueColumns
from sparktorch.ml.scoring.evaluation import RegressionSummary, evaluate_regressor

__all__ = ["TorchRegressionModel", "TorchRegressor"]


class TorchRegressionModel(TorchModelBase, TrueColumns):
    """A module fitted by `TorchRegressor`.

    `transform` adds `predictionCol`: double for one value a row, an array of double for several. An empty name leaves
    it out.
    """

    def predict(self, value: Any) -> Any:
        """Predicts for one row, in this process: no Spark job runs.

        Args:
            value: The input, a vector or a (nested) list; for several input columns a `Row` or dict that has them.

        Returns:
            A number, or a list of several; `None` for a row with a null in it, if `handleInvalid` is "keep".

        Raises:
            ColumnError: The row lacks an input, or has one of another type or shape than the model was fitted on.
        """
        return self._score_row(value, "prediction")

    def evaluate(self, dataset: DataFrame) -> RegressionSummary:
        """Scores rows whose values are known, in `labelCol`, and weighs them by `weightCol`, if that is set.

        Raises:
            ColumnError: A column is missing or no number, or a row has no weight, no prediction or no true value.
            ConfigError: The model predicts several values a row.
        """
        if self._kind != "double":
            raise ConfigError(
                "evaluate compares one value a row, and the model predicts several",
                hint="give Spark's RegressionEvaluator one at a time, prediction[0], prediction[1], ...",
            )
        unnamed = {self.predictionCol: f"{self.uid}_prediction"}
        return evaluate_regressor(self if self.getPredictionCol() else self.copy(unnamed), dataset)

    @property
    def _kind(self) -> str:
        return "double" if self.trained.outputs[0].shape in ((), (1,)) else "array<double>"

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        name = self.getPredictionCol()
        return ({"prediction": self._kind}, {name: "prediction"}) if name else ({}, {})


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
        validationBatchSize: int | None = None,
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
        dryRun: str = "driver",
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
