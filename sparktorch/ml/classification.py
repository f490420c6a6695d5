"""Classification: scores, probabilities and predicted classes, as Spark ML's own classifiers give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyspark import keyword_only
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import DataFrame

from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.translate import check_thresholds, given
from sparktorch.ml.model import TorchModelBase, output_fields
from sparktorch.ml.params import DEFAULTS, ClassifierColumns, ClassWeightParams, TrueColumns
from sparktorch.ml.scoring.column_metadata import nominal, vector
from sparktorch.ml.scoring.evaluation import ClassificationSummary, evaluate_classifier
from sparktorch.spark.scoring_udf import Scoring
from sparktorch.train.recipe.task import classes_in

__all__ = ["TorchClassificationModel", "TorchClassifier"]


class TorchClassificationModel(TorchModelBase, ClassifierColumns, TrueColumns):
    """A classifier fitted by `TorchClassifier`.

    `transform` adds `rawPredictionCol` and `probabilityCol` (vectors, one entry per class) and
    `predictionCol` (double). An empty name leaves a column out.
    """

    def __init__(self) -> None:
        """Makes a model without a module, for `load` to fill."""
        super().__init__()
        self._setDefault(probabilityCol="probability", rawPredictionCol="rawPrediction")

    @property
    def numClasses(self) -> int:
        """Number of classes."""
        return classes_in(self.trained.outputs[0].shape)

    @property
    def labels(self) -> list[str]:
        """What the classes are called, where `StringIndexer` had noted it in the labels of the fit; else `[]`."""
        return list(self.trained.labels)

    def predict(self, value: Any) -> float | None:
        """Predicts the class of one row, in this process: no Spark job runs.

        Args:
            value: The input, a vector or a (nested) list; for several input columns a `Row` or dict that has them.

        Returns:
            The class; `None` for a row with a null in it, if `handleInvalid` is "keep".

        Raises:
            ColumnError: The row lacks an input, or has one of another type or shape than the model was fitted on.
        """
        predicted: float | None = self._score_row(value, "prediction")
        return predicted

    def predictRaw(self, value: Any) -> DenseVector | None:
        """Returns the scores of one row, one per class; otherwise as `predict`."""
        return _dense(self._score_row(value, "scores"))

    def predictProbability(self, value: Any) -> DenseVector | None:
        """Returns the probabilities of one row, one per class; otherwise as `predict`."""
        return _dense(self._score_row(value, "probability"))

    def evaluate(self, dataset: DataFrame) -> ClassificationSummary:
        """Scores rows whose classes are known, in `labelCol`, and weighs them by `weightCol`, if that is set.

        Returns:
            The figures of Spark's own summaries; of two classes, a `BinaryClassificationSummary`.

        Raises:
            ColumnError: A column is missing or no number, or a row has no weight, no prediction or no class of the
                model.
        """
        columns = (self.rawPredictionCol, self.probabilityCol, self.predictionCol)
        unnamed = {param: f"{self.uid}_{param.name}" for param in columns if not self.getOrDefault(param)}
        return evaluate_classifier(self.copy(unnamed) if unnamed else self, dataset)

    def _scoring(self) -> Scoring:
        scoring = super()._scoring()
        if not self.isDefined(self.thresholds):
            return scoring
        check_thresholds(self, self.numClasses)
        return replace(scoring, thresholds=tuple(self.getThresholds()))

    def _fields(self) -> tuple[dict[str, str], dict[str, str]]:
        fields = {"scores": "vector", "probability": "vector", "prediction": "double"}
        names = (self.getRawPredictionCol(), self.getProbabilityCol(), self.getPredictionCol())
        outputs = output_fields(zip(names, fields, strict=True))
        return {field: fields[field] for field in outputs.values()}, outputs

    def _attribute(self, field: str, kind: str) -> dict[str, Any]:
        return vector(self.numClasses) if kind == "vector" else nominal(self.numClasses, self.labels)


def _dense(values: list[float] | None) -> DenseVector | None:
    return None if values is None else Vectors.dense(values)


class TorchClassifier(TorchEstimatorBase[TorchClassificationModel], ClassifierColumns, ClassWeightParams):
    """Trains a PyTorch module to tell classes apart.

    The module returns one score (logit) per class, shape `(rows, classes)`, or a single one for two
    classes with `loss="BCEWithLogitsLoss"`. Labels are whole numbers `0 ... classes - 1`.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "classification"
    _model_class = TorchClassificationModel

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
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        thresholds: list[float] | None = None,
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        idCol: str | None = None,
        loss: str | Callable[..., Any] = "CrossEntropyLoss",
        lossParams: dict[str, Any] | None = None,
        classWeights: str | list[float] | None = None,
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
        self._setDefault(
            **DEFAULTS,
            loss="CrossEntropyLoss",
            probabilityCol="probability",
            rawPredictionCol="rawPrediction",
        )
        self._set(**given(self))
