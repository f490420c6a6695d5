"""The classifier and its model. Outputs are those of Spark ML's own classifiers: scores, probabilities, classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from sparktorch.errors import shortens
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.checks import check_thresholds
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.params.mixins import ClassificationModelParams, ClassifierParams
from sparktorch.ml.scoring.column_metadata import class_index, nominal, vector
from sparktorch.ml.scoring.evaluation import ClassificationSummary, evaluate_classifier
from sparktorch.ml.scoring.importance import importance_of
from sparktorch.ml.scoring.output_fields import output_fields
from sparktorch.ml.scoring.quality import accuracy
from sparktorch.model.scorer import Scoring
from sparktorch.spark.column_names import quoted
from sparktorch.spark.rdd import dataframe_of
from sparktorch.train.recipe.task import classes_in

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TorchClassificationModel", "TorchClassifier"]


class TorchClassificationModel(TorchModelBase, ClassificationModelParams):
    """A classifier fitted by `TorchClassifier`.

    `transform` adds `rawPredictionCol` and `probabilityCol` (vectors, one entry per class) and
    `predictionCol` (double). An empty name omits a column.
    """

    _estimator = "sparktorch.ml.classification:TorchClassifier"

    @property
    def numClasses(self) -> int:
        """Number of classes."""
        return classes_in(self.trained.outputs[0].shape)

    @property
    def labels(self) -> list[str]:
        """The labels that `StringIndexer` wrote to the metadata of the label column; else `[]`."""
        return list(self.trained.labels)

    def predict(self, value: Any) -> float | None:
        """Predicts the class of one row in this process, without a Spark job.

        Args:
            value: The input: a vector or a (nested) list; for several input columns, a `Row` or dict.

        Returns:
            The class; `None` for an invalid row that `handleInvalid` keeps or skips.

        Raises:
            ColumnError: An input is missing, or has another type or shape than in the fit.
        """
        predicted: float | None = self._score_row(value, "prediction")
        return predicted

    def predictRaw(self, value: Any) -> DenseVector | None:
        """Returns the scores of one row, one per class; otherwise as `predict`."""
        return _dense(self._score_row(value, "scores"))

    def predictProbability(self, value: Any) -> DenseVector | None:
        """Returns the probabilities of one row, one per class; otherwise as `predict`."""
        return _dense(self._score_row(value, "probability"))

    def _quality(self, scored: DataFrame, label: str) -> tuple[str, int, float]:
        return accuracy(scored, self.getPredictionCol(), label, self.labels)

    @shortens
    def evaluate(self, dataset: DataFrame) -> ClassificationSummary:
        """Scores rows and compares with `labelCol`, weighted by `weightCol` if that is set.

        Labels are the numbers of the classes or, where the model has `labels`, these strings.

        Returns:
            The metrics of Spark's own summaries; for two classes, a `BinaryClassificationSummary`.

        Raises:
            ColumnError: A column is missing or not numeric, or a row has no weight, no prediction, or a label that
                is not a class of the model; or the numbers stand for other labels by the column's metadata.
        """
        named, dataset = self._named(), dataframe_of(dataset, "evaluate")
        return evaluate_classifier(named, named.transform, dataset, classes=self.numClasses, names=self.labels)

    @shortens
    def importance(
        self, dataset: DataFrame, metric: str | None = None, repeats: int = 5, seed: int = 0
    ) -> pd.DataFrame:
        """Returns how much each input column matters: the drop of a metric when its values are shuffled among rows.

        The rows are read once, mixed, and shuffled within Arrow batches. Each is scored `1 + columns * repeats` times;
        rows without a label or a prediction do not count.

        Args:
            dataset: Rows with the inputs, `labelCol`, and `weightCol` if that is set; best not those of the training.
            metric: "accuracy"; or, of two classes, "areaUnderROC", which is the default then.
            repeats: How often each column is shuffled (> 0).
            seed: The seed of the shuffling.

        Returns:
            `column`, `importance` (the mean of the drops) and `deviation`, the largest importance first.

        Raises:
            ConfigError: `metric` or `repeats` is invalid.
            ColumnError: A column is missing, or is of another type than in the fit; or there are no rows.
        """
        named, valid = self._named(), ["accuracy"]
        score = F.lit(0.0)
        if self.numClasses == 2:
            valid.insert(0, "areaUnderROC")
            score = vector_to_array(quoted(named.getRawPredictionCol()))[1]
        rows = dataframe_of(dataset, "importance")
        label = class_index(rows, self.getLabelCol(), self.labels)
        return importance_of(named, rows, label, metric or valid[0], valid, score, repeats, seed)

    def _named(self) -> Self:
        """Returns a copy whose output columns all have names, or the model itself."""
        params = (self.rawPredictionCol, self.probabilityCol, self.predictionCol)
        missing = {
            param: f"{self.uid}_{param.name}".replace(".", "_") for param in params if not self.getOrDefault(param)
        }
        return self.copy(missing) if missing else self

    def _scoring(self) -> Scoring:
        scoring = super()._scoring()
        if not self.isDefined(self.thresholds):
            return scoring
        check_thresholds(self, self.numClasses)
        return replace(scoring, thresholds=tuple(self.getThresholds()))

    def _prediction_fields(self) -> tuple[dict[str, str], dict[str, str]]:
        fields = {"scores": "vector", "probability": "vector", "prediction": "double"}
        names = (self.getRawPredictionCol(), self.getProbabilityCol(), self.getPredictionCol())
        outputs = output_fields(zip(names, fields, strict=True))
        return {field: fields[field] for field in outputs.values()}, outputs

    def _attribute(self, field: str, kind: str) -> dict[str, Any]:
        if kind == "vector":
            return vector(self.numClasses)
        return nominal(self.numClasses, self.labels) if field == "prediction" else {}


def _dense(values: list[float] | None) -> DenseVector | None:
    return None if values is None else Vectors.dense(values)


class TorchClassifier(TorchEstimatorBase[TorchClassificationModel], ClassifierParams):
    """Trains a PyTorch classifier.

    The module returns one score (logit) per class, shape `(rows, classes)`. For two classes it may return a single
    score with `loss="BCEWithLogitsLoss"`. Labels are whole numbers `0 ... classes - 1`.

    Example:
        >>> from pyspark.ml.linalg import Vectors
        >>> rows = [(Vectors.dense([i / 50, 1 - i / 50]), int(i > 25)) for i in range(50)]
        >>> data = spark.createDataFrame(rows, ["features", "label"])
        >>> classifier = TorchClassifier(
        ...     module="torch.nn:Linear",
        ...     moduleParams={"in_features": 2, "out_features": 2},
        ...     batchSize=10,
        ...     epochs=20,
        ...     learningRate=0.1,
        ...     progress=False,
        ... )
        >>> model = classifier.fit(data)
        >>> model.transform(data).columns
        ['features', 'label', 'rawPrediction', 'probability', 'prediction']
        >>> model.evaluate(data).accuracy > 0.9
        True

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _task = "classification"
    _model_class = TorchClassificationModel
